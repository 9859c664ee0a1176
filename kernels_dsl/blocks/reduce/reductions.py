"""Reductions of a result beside it, one row each: a float32 number for every row or column.

They are of the epilogue's float32 values, before these are rounded to D's dtype. NaN stays NaN in all of
them. What kernels compute is in
`lines`; this module does without the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowering.records import NamedTuple, frozen


class Reduction(NamedTuple):
    """One reduction.

    identity: of no elements; None where there must be some. summed: by addition, else by the larger one.
    exact: the definition, of a tensor in its own dtype and a mode. backward: (gradient of the reduction,
    result), which broadcast -> the gradient of the result; None where there is none. says: the
    documentation's formula.
    """

    identity: float | None
    summed: bool
    exact: Callable[[Any, int], Any]
    backward: Callable[[Any, Any], Any] | None
    says: str


REDUCTIONS = {
    "sum": Reduction(
        0.0, True, lambda d, dim: d.sum(dim), lambda gradient, d: gradient, "Σ d"
    ),
    "sum_squares": Reduction(
        0.0, True, lambda d, dim: d.square().sum(dim),
        lambda gradient, d: 2 * gradient * d, "Σ d²",
    ),
    "max": Reduction(None, False, lambda d, dim: d.amax(dim), None, "max d"),
    "abs_max": Reduction(0.0, False, lambda d, dim: d.abs().amax(dim), None, "max abs(d)"),
}  # fmt: skip


@frozen
class ReducedEpilogue:
    """`inner`, whose values are reduced over the kernel's columns (`over` "n") or rows ("m").

    The operands are those of `inner`; float32 partial results (parts, lines, L) that are written come last.
    """

    inner: Any
    reduction: str
    over: str


def documented() -> str:
    """The table of docs/gemm_reduce.md."""
    rows = [
        f"| `{name}` | {row.says} | {'yes' if row.backward else 'no'} |" for name, row in REDUCTIONS.items()
    ]
    return "\n".join(["| reduce | of a row or column d | gradients |", "|---|---|---|", *rows])
