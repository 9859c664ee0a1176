"""Epilogue functions: applied to the float32 accumulator before it is stored.

An epilogue is a function `f(acc, *operands) -> value`, called once for each piece of the accumulator that a
thread holds. `acc` and the tensor operands are float32 `TensorSSA` of one shape, and scalar operands are
`Float32`. The value has acc's shape, and the kernel rounds it to the output's dtype. Any Python function of
that form will do:

    def bias_gelu(acc, bias):
        return gelu(acc + bias)

`LinearEpilogue` is the ready-made one. This module imports the compiler only in functions that are traced, so
that an epilogue can be named, hashed and looked up in a cache without it.
"""

from __future__ import annotations

from typing import Any

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS, gelu, gelu_tanh, relu, sigmoid, silu
from lowering.records import frozen

__all__ = [
    "ACTIVATIONS", "LinearEpilogue", "ScaledEpilogue", "gelu", "gelu_tanh", "identity", "relu",
    "run_epilogue", "sigmoid", "silu",
]  # fmt: skip


def identity(acc: Any) -> Any:
    """Returns the accumulator unchanged."""
    return acc


@frozen
class LinearEpilogue:
    """activation(alpha * acc + beta * C + bias) + residual, each part optional.

    The operands of the parts that are present follow the accumulator in this order:

    - `alpha`: Float32 scalar. Absent: 1.
    - `beta`: two operands, the Float32 scalar beta and then the tensor C.
    - `bias`: tensor; a row or a column is a view whose other stride is 0.
    - `residual`: tensor, added after the activation.

    `activation` is None or a key of `ACTIVATIONS`; ValueError for another name. TypeError at trace time if
    the number of operands does not match the flags.
    """

    alpha: bool = False
    beta: bool = False
    bias: bool = False
    residual: bool = False
    activation: str | None = None

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ValueError(f"activation is {self.activation!r}; it must be None or one of {known}")

    @property
    def num_operands(self) -> int:
        """Operands that follow the accumulator."""
        return self.alpha + 2 * self.beta + self.bias + self.residual

    def __call__(self, acc: Any, *operands: Any) -> Any:
        """Applies to `acc`; operands as documented for the class."""
        if len(operands) != self.num_operands:
            raise TypeError(f"{self} takes {self.num_operands} operands, got {len(operands)}")
        remaining = iter(operands)
        value = acc * next(remaining) if self.alpha else acc
        if self.beta:
            beta, c = next(remaining), next(remaining)
            value = value + c * beta
        if self.bias:
            value = value + next(remaining)
        if self.activation is not None:
            value = ACTIVATIONS[self.activation].traced(value)
        if self.residual:
            value = value + next(remaining)
        return value


@frozen
class ScaledEpilogue:
    """inner(acc * scale_a * scale_b, *operands) * scale_result: an epilogue between the scales of quantised
    operands and that of a quantised result.

    The first `scales` operands are the scales of A and B. With `result` that of the result comes next, and
    with `amax` the maximum to which values before that scale are reported. The operands of `inner` follow.
    """

    inner: Any
    scales: int = 2
    result: bool = False
    amax: bool = False

    def __call__(self, acc: Any, *operands: Any) -> Any:
        """Applies to `acc`; operands as documented for the class."""
        for scale in operands[: self.scales]:
            acc = acc * scale
        value = run_epilogue(self.inner, acc, operands[self.scales + self.result + self.amax :])
        if self.amax:
            operands[self.scales + self.result].see(value)
        return value * operands[self.scales] if self.result else value


def run_epilogue(epilogue: Any, acc: Any, operands: tuple[Any, ...]) -> Any:
    """Calls epilogue(acc, *operands). TypeError that names a user's function that cannot be traced."""
    if isinstance(epilogue, (LinearEpilogue, ScaledEpilogue)):
        return epilogue(acc, *operands)
    from kernels_dsl.blocks.hw.user_functions import call_epilogue

    return call_epilogue(epilogue, acc, operands)
