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

import math
from dataclasses import dataclass
from typing import Any

_LOG2_E = math.log2(math.e)


def identity(acc: Any) -> Any:
    """The accumulator as it is."""
    return acc


def relu(x: Any) -> Any:
    """max(x, 0), elementwise; NaN stays NaN, as in PyTorch."""
    import cutlass.cute as cute

    # Comparing with < keeps NaN: the comparison is false and x itself is chosen.
    return cute.where(x < 0.0, cute.zeros_like(x), x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), elementwise, to about 2 ulp of float32.

    exp2 and the reciprocal are the hardware's approximations (2 ulp and 1 ulp): an exact division costs
    some twenty instructions an element and its error would vanish in any output dtype but float32.
    """
    import cutlass.cute as cute

    return cute.math.rcp(cute.math.exp2(x * -_LOG2_E, fastmath=True) + 1.0, approx=True, ftz=True)


def silu(x: Any) -> Any:
    """x * sigmoid(x), elementwise."""
    return x * sigmoid(x)


def gelu(x: Any) -> Any:
    """x * Phi(x) with the error function, elementwise: PyTorch's `gelu(approximate="none")`."""
    import cutlass.cute as cute

    half_x = x * 0.5
    return half_x + half_x * cute.math.erf(x * math.sqrt(0.5))


def gelu_tanh(x: Any) -> Any:
    """0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3): PyTorch's `gelu(approximate="tanh")`.

    Written as x * sigmoid(2u), the same number: the hardware's tanh is good to 11 bits only.
    """
    two_u = x * (x * x * (2.0 * math.sqrt(2.0 / math.pi) * 0.044715) + 2.0 * math.sqrt(2.0 / math.pi))
    return x * sigmoid(two_u)


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


@dataclass(frozen=True)
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
            value = ACTIVATIONS[self.activation](value)
        if self.residual:
            value = value + rest.pop(0)
        return value


@dataclass(frozen=True)
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
    from .user_functions import call_epilogue

    return call_epilogue(epilogue, acc, operands)
