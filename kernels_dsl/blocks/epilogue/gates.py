"""Gated activations, one row each: out = f(gate, up) of two neighbouring columns of a product.

A row has what kernels compute, PyTorch's definition, and the derivative, as `activations` has them of one
value. This module imports the compiler and PyTorch only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS, sigmoid
from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from lowering.records import NamedTuple, frozen

_OAI_ALPHA = 1.702
_OAI_LIMIT = 7.0


class Gradients(NamedTuple):
    """Gradients of gate and up."""

    gate: Any
    up: Any


class Gate(NamedTuple):
    """One gated activation f.

    traced: f of the DSL's values. exact: the definition, f of torch.Tensors in their own dtype. partials:
    (gradient, gate, up), all float32 -> `Gradients`, by PyTorch's operations. traced_partials: the same of
    the DSL's values. says: the documentation's formula of f.
    """

    traced: Callable[[Any, Any], Any]
    exact: Callable[[Any, Any], Any]
    partials: Callable[[Any, Any, Any], Gradients]
    traced_partials: Callable[[Any, Any, Any], Gradients]
    says: str

    def of_pairs(self, z: Any) -> Any:
        """PyTorch's definition of columns (gate, up, gate, up, …): (…, N) -> (…, N / 2)."""
        return self.exact(*_pairs(z))

    def backward(self, gradient: Any, z: Any) -> Any:
        """The gradient of z (…, N), from that of the result (…, N / 2)."""
        import torch

        return torch.stack(self.partials(gradient, *_pairs(z)), dim=-1).flatten(-2)


def _pairs(z: Any) -> tuple[Any, Any]:
    """Gate and up of z, as views that a DTensor has without communication."""
    pairs = z.unflatten(-1, (z.shape[-1] // 2, 2))
    return pairs[..., 0], pairs[..., 1]


def _by_activation(name: str, says: str) -> Gate:
    """activation(gate) * up."""
    row = ACTIVATIONS[name]
    derivative, slope = row.backward, row.slope
    assert derivative is not None and slope is not None
    return Gate(
        lambda gate, up: row.traced(gate) * up,
        lambda gate, up: row.exact(gate) * up,
        lambda gradient, gate, up: Gradients(derivative(gradient * up, gate), gradient * row.exact(gate)),
        lambda gradient, gate, up: Gradients(gradient * up * slope(gate), gradient * row.traced(gate)),
        says,
    )


def _oai_limited(gate: Any, up: Any) -> tuple[Any, Any]:
    """gate up to the limit, up within both. Comparisons that are false keep NaN."""
    import cutlass.cute as cute

    gate = cute.where(gate > _OAI_LIMIT, cute.full_like(gate, _OAI_LIMIT), gate)
    up = cute.where(up > _OAI_LIMIT, cute.full_like(up, _OAI_LIMIT), up)
    return gate, cute.where(up < -_OAI_LIMIT, cute.full_like(up, -_OAI_LIMIT), up)


def _oai(gate: Any, up: Any) -> Any:
    gate, up = _oai_limited(gate, up)
    return gate * sigmoid(gate * _OAI_ALPHA) * (up + 1.0)


def _oai_exact(gate: Any, up: Any) -> Any:
    gate, up = gate.clamp(max=_OAI_LIMIT), up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
    return gate * (gate * _OAI_ALPHA).sigmoid() * (up + 1.0)


def _oai_partials(gradient: Any, gate: Any, up: Any) -> Gradients:
    low, middle = gate.clamp(max=_OAI_LIMIT), up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
    share = (low * _OAI_ALPHA).sigmoid()
    slope = share * (1.0 + _OAI_ALPHA * low * (1.0 - share))
    # As clamp's own derivative: 1 at the limits themselves.
    return Gradients(
        gradient * (middle + 1.0) * slope * (gate <= _OAI_LIMIT),
        gradient * low * share * (up.abs() <= _OAI_LIMIT),
    )


def _oai_traced_partials(gradient: Any, gate: Any, up: Any) -> Gradients:
    import cutlass.cute as cute

    # 1 at the limits themselves, and 0 for an up of NaN, as `_oai_partials` has it.
    low, middle = _oai_limited(gate, up)
    share = sigmoid(low * _OAI_ALPHA)
    slope = share * (low * (1.0 - share) * _OAI_ALPHA + 1.0)
    of_gate, of_up = gradient * (middle + 1.0) * slope, gradient * low * share
    zero = cute.zeros_like(gradient)
    of_up = cute.where(up <= _OAI_LIMIT, of_up, zero)
    return Gradients(cute.where(gate > _OAI_LIMIT, zero, of_gate), cute.where(up >= -_OAI_LIMIT, of_up, zero))


def _glu(gate: Any, up: Any) -> Any:
    return sigmoid(gate) * up


def _glu_partials(gradient: Any, gate: Any, up: Any) -> Gradients:
    share = gate.sigmoid()
    return Gradients(gradient * up * share * (1.0 - share), gradient * share)


def _glu_traced_partials(gradient: Any, gate: Any, up: Any) -> Gradients:
    share = sigmoid(gate)
    return Gradients(gradient * up * share * (1.0 - share), gradient * share)


GATES = {
    "swiglu": _by_activation("silu", "silu(gate) · up"),
    "geglu": _by_activation("gelu", "gelu(gate) · up, by the error function"),
    "geglu_tanh": _by_activation("gelu_tanh", "gelu_tanh(gate) · up"),
    "reglu": _by_activation("relu", "max(gate, 0) · up"),
    "glu": Gate(
        _glu, lambda gate, up: gate.sigmoid() * up, _glu_partials, _glu_traced_partials,
        "up / (1 + exp(-gate))",
    ),
    "swiglu_oai": Gate(
        _oai, _oai_exact, _oai_partials, _oai_traced_partials,
        "g / (1 + exp(-1.702 g)) · (u + 1), g = min(gate, 7), u = up between -7 and 7, as in gpt-oss",
    ),
}  # fmt: skip


@frozen
class GatedEpilogue:
    """f of neighbouring columns of `inner`'s result z: column i of D is f(z[:, 2i], z[:, 2i + 1]).

    The operands are those of `inner`; with `preact`, a tensor that z is written to comes last.
    """

    inner: LinearEpilogue
    activation: str
    preact: bool = False

    def of_pairs(self, z: Any) -> Any:
        """f of the pairs (gate, up) that are neighbours among the float32 registers `z`, in their order."""
        import cutlass.cute as cute

        size = cute.size(z) // 2
        gate, up = (
            cute.make_tensor(z.iterator + start, cute.make_layout(size, stride=2)).load() for start in (0, 1)
        )
        return GATES[self.activation].traced(gate, up)


def documented() -> str:
    """The table of docs/gemm.md."""
    rows = [f"| `{name}` | {row.says} |" for name, row in GATES.items()]
    return "\n".join(["| activation | of gate and up |", "|---|---|", *rows])
