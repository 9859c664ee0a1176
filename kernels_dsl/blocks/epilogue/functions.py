"""Epilogue functions: what is done to the float32 accumulator before it is stored.

An epilogue is a function `f(acc, *operands) -> value`, called once for each piece of the accumulator
that a thread holds. `acc` and the tensor operands are float32 `TensorSSA` of one shape, scalar operands
are `Float32`; the value has acc's shape and is rounded to the output's dtype by the kernel. Any Python
function of that form will do:

    def bias_gelu(acc, bias):
        return gelu(acc + bias)

`LinearEpilogue` is the ready-made one. This module imports the compiler only inside the functions that
are traced, so that an epilogue can be named, hashed and looked up in a cache without it.
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
    """The accumulator as it is."""
    return acc


@frozen
class LinearEpilogue:
    """activation(alpha * acc + beta * C + bias) + residual, each part present or not.

    The operands follow the accumulator in this order, those that are absent left out:

    - `alpha`: Float32 scalar. Absent: 1.
    - `beta`: two operands, the Float32 scalar beta and then the tensor C.
    - `bias`: tensor; a row or a column is a view whose other stride is 0.
    - `residual`: tensor, added after the activation.

    `activation` is None or a key of `ACTIVATIONS`. Raises ValueError for another name, and TypeError at
    trace time where the number of operands is not what the flags say.
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
        """How many operands follow the accumulator."""
        return self.alpha + 2 * self.beta + self.bias + self.residual

    def __call__(self, acc: Any, *operands: Any) -> Any:
        """Apply to `acc`; operands as the class says."""
        if len(operands) != self.num_operands:
            raise TypeError(f"{self} takes {self.num_operands} operands, got {len(operands)}")
        rest = list(operands)
        value = acc * rest.pop(0) if self.alpha else acc
        if self.beta:
            beta, c = rest.pop(0), rest.pop(0)
            value = value + c * beta
        if self.bias:
            value = value + rest.pop(0)
        if self.activation is not None:
            value = ACTIVATIONS[self.activation].traced(value)
        if self.residual:
            value = value + rest.pop(0)
        return value


@frozen
class ScaledEpilogue:
    """inner(acc * scale_a * scale_b, *operands) * scale_result: any other epilogue between the scales of
    quantised operands and that of a quantised result.

    The first `scales` operands are those of A and B; with `result`, that of the result comes next; with
    `amax` the maximum that the values before that scale are reported to; those of `inner` follow.
    """

    inner: Any
    scales: int = 2
    result: bool = False
    amax: bool = False

    def __call__(self, acc: Any, *operands: Any) -> Any:
        """Apply to `acc`; operands as the class says."""
        for scale in operands[: self.scales]:
            acc = acc * scale
        value = run_epilogue(self.inner, acc, operands[self.scales + self.result + self.amax :])
        if self.amax:
            operands[self.scales + self.result].see(value)
        return value * operands[self.scales] if self.result else value


def run_epilogue(epilogue: Any, acc: Any, operands: tuple[Any, ...]) -> Any:
    """epilogue(acc, *operands). TypeError that names a user's function which cannot be traced."""
    if isinstance(epilogue, (LinearEpilogue, ScaledEpilogue)):
        return epilogue(acc, *operands)
    from kernels_dsl.blocks.hw.user_functions import call_epilogue

    return call_epilogue(epilogue, acc, operands)
