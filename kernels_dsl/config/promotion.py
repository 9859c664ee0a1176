"""How a kernel sums products of fp8 operands: plain data, part of a kernel's key."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 128
"""Elements of K, and of MN where a scale is a block's, that share a scale."""


@dataclass(frozen=True)
class Promotion:
    """Sums over a K tile, which must divide 128, are scaled and added to a second set of accumulators.

    The matrix unit keeps few bits of a sum of fp8 products below its largest term; summed up to 128 of K at
    a time and added in float32, the loss does not grow with K.

    `rows_a` and `rows_b` are how many rows of A (M, K) and of B (N, K) share a float32 scale of 128 elements
    of K: 1, 128 (a block), or 0 for an operand without such scales.
    """

    rows_a: int = 0
    rows_b: int = 0

    @property
    def scaled(self) -> bool:
        """Whether the operands have scales of 128 elements of K."""
        return self.rows_a > 0

    def swapped(self) -> Promotion:
        """The same of D^T = B^T A^T."""
        return Promotion(self.rows_b, self.rows_a)

    def __post_init__(self) -> None:
        for name, rows in (("rows_a", self.rows_a), ("rows_b", self.rows_b)):
            if rows not in (0, 1, GROUP):
                raise ValueError(f"{name} is {rows}, must be 0, 1 or {GROUP}")
        if (self.rows_a == 0) != (self.rows_b == 0):
            raise ValueError(f"{self} has scales for one operand; it must have them for both or for none")
