"""The summation of products of fp8 operands: plain data, part of a kernel's key."""

from __future__ import annotations

import math

from lowering.records import frozen

GROUP = 128
"""Elements of K, and of MN where a scale is a block's, that share a scale."""


RECENT = 64
"""Stages for which scales that are few for a tile are kept."""


@frozen
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
        """True where the operands have scales of 128 elements of K."""
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


@frozen
class TileScales:
    """The scales of a tile of one operand in shared memory: one for every `step` rows of the tile.

    `rows` rows of the operand share one. `start`: floats before them, of a stage, or of few scales.
    """

    rows: int
    step: int
    count: int
    start: int

    @property
    def few(self) -> bool:
        """True where they are of blocks, and so lie in the ring for few scales."""
        return self.rows > 1


@frozen
class ScaleTiles:
    """The scales that a stage needs: those of A's rows, then of B's."""

    a: TileScales
    b: TileScales

    @property
    def floats(self) -> int:
        """Floats of a stage: whole 16 bytes."""
        return sum(-(-tile.count // 4) * 4 for tile in (self.a, self.b) if not tile.few)

    @property
    def few(self) -> int:
        """Entries of the ring for few scales."""
        return sum(tile.count for tile in (self.a, self.b) if tile.few)


def scale_tiles(promotion: Promotion, tile: tuple[int, int], steps: tuple[int, int]) -> ScaleTiles:
    """The layout in shared memory of the scales of a `tile` of rows of A and rows of B.

    Where scales are of blocks, as many rows as divide a block and a step have an entry of their own;
    ValueError where those would not fill the tile.
    """
    a_rows, b_rows = promotion.rows_a, promotion.rows_b
    a_step, b_step = (math.gcd(rows, step) for rows, step in zip((a_rows, b_rows), steps))
    if tile[0] % a_step or tile[1] % b_step:
        raise ValueError(f"steps of {steps} in a tile of {tile}; {a_rows} and {b_rows} rows share a scale")
    a = TileScales(a_rows, a_step, tile[0] // a_step, 0)
    before = -(-a.count // 4) * 4
    if a.few != (b_rows > 1):
        before = 0
    elif a.few:
        before = a.count
    return ScaleTiles(a, TileScales(b_rows, b_step, tile[1] // b_step, before))
