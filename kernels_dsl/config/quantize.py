"""How a tensor becomes fp8: what the quantisation kernels are specialised for."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = {"e4m3": 448.0, "e5m2": 57344.0}
"""fp8 format -> its largest finite value."""
SMALLEST_SCALE = 2.0**-126
"""Scales are normal float32 numbers, so that their reciprocals are finite."""
TILE = 128
"""Rows and columns of a CTA's tile, and elements of a group."""
VECTOR = 8
"""Elements of a thread's access: 16 bytes of a 16-bit input, 8 bytes of fp8."""
PITCH = 16
"""Rows of fp8 outputs start at multiples of this many bytes, as TMA and tensor cores need."""
THREADS = 256
COLUMN_TILES = 4
"""Tiles that a CTA of the pass over columns takes below each other."""


@dataclass(frozen=True)
class TileQuantization:
    """One pass over tiles of 128 x 128. `plain` and `turned` say where the scales of x and of its transpose
    come from: None (there is no such output), "given" (a scale for each row of the output), "one" (all 1),
    "group" (of each row's 128 elements in the tile) or "block" (of the tile).
    """

    format: str
    plain: str | None
    turned: str | None
    key_order: bool = False
    """The columns of the transpose are permuted within every 16, for the second product of fp8 attention: the
    pairs 0 … 7 stand in the order 0, 4, 1, 5, 2, 6, 3, 7."""


@dataclass(frozen=True)
class RowQuantization:
    """One pass over rows, each held in the registers of `threads` threads, `vectors` in each; with `vectors`
    0 rows are too long for that and are read twice."""

    format: str
    threads: int
    vectors: int

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return THREADS // self.threads


def row_quantization(format: str, columns: int) -> RowQuantization:
    """The division of rows of `columns` elements among threads."""
    for threads, most in ((32, 4), (THREADS, 8)):
        for vectors in (1, 2, 4, 8):
            if vectors <= most and columns <= threads * vectors * VECTOR:
                return RowQuantization(format, threads, vectors)
    return RowQuantization(format, THREADS, 0)
