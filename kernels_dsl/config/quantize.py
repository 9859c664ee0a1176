"""How a tensor becomes fp8: what the quantisation kernels are specialised for."""

from __future__ import annotations

import math
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
CTAS_PER_SM = {1: 4, 2: 4, 4: 2}
"""CTAs that an SM's registers are divided among, by the bytes of an element of x. All hold a whole tile."""
MANY_PARTS = 4096
"""More maxima than this become fewer before every CTA reads all of them."""
FEW_PARTS = 256
MAXIMA_ALIGN = 4
"""Elements of 16 bytes: rows of maxima start at multiples of them."""


@dataclass(frozen=True)
class TileQuantization:
    """One pass over tiles of 128 x 128. `plain` and `turned` say where the scales of x and of its transpose
    come from: None (there is no such output), "one" (all 1), "given" (a scale of all, which is there),
    "whole", "matrix" and "lines" (of all, of each matrix or of each row of the output, made from maxima of
    parts), "group" (of each row's 128 elements in the tile) or "block" (of the tile).
    """

    format: str
    plain: str | None
    turned: str | None
    key_order: bool = False
    """The columns of the transpose are permuted within every 16, for the second product of fp8 attention: the
    pairs 0 … 7 stand in the order 0, 4, 1, 5, 2, 6, 3, 7."""
    early: bool = False
    """Programmatic dependent launch: it begins beside the tail of the kernel before, and lets the next."""

    @property
    def of_parts(self) -> bool:
        """Whether maxima come from a kernel before this one, which read x too."""
        return bool({"whole", "matrix", "lines"} & {self.plain, self.turned})


@dataclass(frozen=True)
class RowQuantization:
    """One pass over rows, each held in registers by `threads` threads of `cluster` CTAs, `vectors` in each
    thread; with `vectors` 0 rows are too long for that and are read twice."""

    format: str
    threads: int
    vectors: int
    cluster: int = 1
    early: bool = False
    """As in `TileQuantization`."""
    whole: bool = False
    """All of x, which is contiguous, is one row."""

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return THREADS // self.threads


def row_quantization(format: str, columns: int, hopper: bool, bytes_each: int = 4) -> RowQuantization:
    """The division of rows of `columns` elements of that many bytes among threads; `hopper`: clusters can be
    had, early launches too."""
    for threads, most in ((32, 4), (THREADS, 8)):
        for vectors in (1, 2, 4, 8):
            if vectors <= most and columns <= threads * vectors * VECTOR:
                return RowQuantization(format, threads, vectors, 1, hopper)
    if not hopper:
        return RowQuantization(format, THREADS, 0)
    for cluster, vectors in ((2, 8), (4, 8), (8, 8), (8, 16)):
        if columns <= THREADS * vectors * cluster * VECTOR and vectors * bytes_each <= 32:
            return RowQuantization(format, THREADS, vectors, cluster, True)
    return RowQuantization(format, THREADS, 0, 8, True)


def maxima_elements(matrices: int, rows: int, columns: int, parts: int, kinds: tuple[str | None, ...]) -> int:
    """Elements of the workspace of `quantize_by_maxima`. `kinds`: the spec's (plain, turned)."""

    def padded(*shape: int) -> int:
        return math.prod(shape[:-1]) * (-(-shape[-1] // MAXIMA_ALIGN) * MAXIMA_ALIGN)

    if "lines" not in kinds:
        return padded(matrices, parts) + FEW_PARTS
    own = padded(matrices, -(-columns // TILE) + 1, rows) if kinds[0] == "lines" else 0
    return padded(matrices, parts, columns) + own
