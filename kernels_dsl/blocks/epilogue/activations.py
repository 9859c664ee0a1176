"""The activations of products, one row each.

A row has what kernels compute, PyTorch's definition, and the derivative. Options, gradients, references, test
cases and the table of docs/gemm.md are made from the rows, so a new activation is a new row. This module
imports the compiler and PyTorch only inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lowering.records import NamedTuple

_LOG2_E = math.log2(math.e)


class Activation(NamedTuple):
    """One activation f.

    traced: f of the DSL's values, accurate to float32. slope: f' of them. exact: the definition, f of a
    torch.Tensor in its own dtype. backward: (gradient, z), both float32 -> gradient · f'(z); None, as is
    `slope` then: asking for a gradient is an error. says: the documentation's formula of f.
    """

    traced: Callable[[Any], Any]
    slope: Callable[[Any], Any] | None
    exact: Callable[[Any], Any]
    backward: Callable[[Any, Any], Any] | None
    says: str


def relu(x: Any) -> Any:
    """max(x, 0), elementwise; NaN stays NaN, as in PyTorch."""
    import cutlass.cute as cute

    # Comparing with < keeps NaN: the comparison is false, and x itself is chosen.
    return cute.where(x < 0.0, cute.zeros_like(x), x)


def relu_slope(x: Any) -> Any:
    """1 where x > 0, else 0, as PyTorch has it."""
    import cutlass.cute as cute

    return cute.where(x > 0.0, cute.full_like(x, 1.0), cute.zeros_like(x))


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), elementwise, to about 2 ulp of float32.

    exp2 and the reciprocal are the hardware's approximations (2 ulp and 1 ulp). An exact division takes some
    twenty instructions an element, and the gain would vanish in any output dtype but float32.
    """
    import cutlass.cute as cute

    return cute.math.rcp(cute.math.exp2(x * -_LOG2_E, fastmath=True) + 1.0, approx=True, ftz=True)


def silu(x: Any) -> Any:
    """x * sigmoid(x), elementwise."""
    return x * sigmoid(x)


def silu_slope(x: Any) -> Any:
    """The derivative of `silu`."""
    share = sigmoid(x)
    return share + x * (share * (1.0 - share))


def gelu(x: Any) -> Any:
    """x * Phi(x) with the error function, elementwise: PyTorch's `gelu(approximate="none")`."""
    import cutlass.cute as cute

    half_x = x * 0.5
    return half_x + half_x * cute.math.erf(x * math.sqrt(0.5))


def gelu_slope(x: Any) -> Any:
    """The derivative of `gelu`: Phi(x) + x phi(x)."""
    import cutlass.cute as cute

    density = cute.math.exp2(x * x * (-0.5 * _LOG2_E), fastmath=True) * (1.0 / math.sqrt(2.0 * math.pi))
    return cute.math.erf(x * math.sqrt(0.5)) * 0.5 + 0.5 + x * density


def gelu_tanh(x: Any) -> Any:
    """0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3): PyTorch's `gelu(approximate="tanh")`.

    Computed as the equal x * sigmoid(2u), because the hardware's tanh is accurate to 11 bits only.
    """
    two_u = x * (x * x * (2.0 * math.sqrt(2.0 / math.pi) * 0.044715) + 2.0 * math.sqrt(2.0 / math.pi))
    return x * sigmoid(two_u)


def gelu_tanh_slope(x: Any) -> Any:
    """The derivative of `gelu_tanh`."""
    outer, inner = 2.0 * math.sqrt(2.0 / math.pi), 2.0 * math.sqrt(2.0 / math.pi) * 0.044715
    square = x * x
    share = sigmoid(x * (square * inner + outer))
    return share + x * (share * (1.0 - share)) * (square * (3.0 * inner) + outer)


def _of_torch(name: str, **options: Any) -> Callable[[Any], Any]:
    """The function of torch.nn.functional of that name."""

    def function(x: Any) -> Any:
        import torch

        return getattr(torch.nn.functional, name)(x, **options)

    return function


def _backward_of_torch(name: str, **options: Any) -> Callable[[Any, Any], Any]:
    """PyTorch's own derivative, (gradient, z) -> gradient · f'(z)."""

    def function(gradient: Any, z: Any) -> Any:
        import torch

        return getattr(torch.ops.aten, name)(gradient, z, **options)

    return function


def _relu_backward(gradient: Any, z: Any) -> Any:
    import torch

    return torch.where(z > 0, gradient, torch.zeros_like(gradient))


ACTIVATIONS = {
    "relu": Activation(relu, relu_slope, _of_torch("relu"), _relu_backward, "max(z, 0)"),
    "gelu": Activation(
        gelu, gelu_slope, _of_torch("gelu"), _backward_of_torch("gelu_backward"),
        "z · Φ(z), by the error function",
    ),
    "gelu_tanh": Activation(
        gelu_tanh, gelu_tanh_slope, _of_torch("gelu", approximate="tanh"),
        _backward_of_torch("gelu_backward", approximate="tanh"),
        "the same by tanh, as PyTorch's `approximate=\"tanh\"`",
    ),
    "silu": Activation(
        silu, silu_slope, _of_torch("silu"), _backward_of_torch("silu_backward"), "z / (1 + exp(-z))"
    ),
}  # fmt: skip


def documented() -> str:
    """The table of docs/gemm.md."""
    rows = [
        f"| `{name}` | {row.says} | {'yes' if row.backward is not None else 'no'} |"
        for name, row in sorted(ACTIVATIONS.items())
    ]
    return "\n".join(["| activation | of z | gradients |", "|---|---|---|", *rows])
