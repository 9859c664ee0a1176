"""Tiles that have rows of A along WGMMA's M, and as many columns of the matrix as let all SMs work.

WGMMA's M is a multiple of 64, so rows may be fewer than the tile has: TMA would fill the others with zeros,
at a quarter of the speed at which it loads rows. So the last tile is loaded in part.
"""

from __future__ import annotations

from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.matrix import SHORT_K, Matrix
from lowering.records import changed

UNIT = 8
"""Of rows that are loaded."""


def filling(height: int, matrix: Matrix, ctas: int = 1, waves: int = 1, most: float = 1.0) -> Sm90GemmConfig:
    """Tiles of `height` rows, for as many clusters of `ctas` as `most` of the SMs have room for."""
    tiles = int(matrix.sms * most) // ctas * waves
    columns = -(-matrix.tiles * 64 // (tiles * matrix.unit)) * matrix.unit
    return along_rows(height, columns, late=waves == 1)


def along_rows(height: int, columns: int, late: bool = False) -> Sm90GemmConfig:
    """A tile of so many columns."""
    return Sm90GemmConfig(height, columns, l2_prefetch=True, evict_first_b=True, late=late)


def with_last_rows(tile: Sm90GemmConfig, rows: int, matrix: Matrix) -> Sm90GemmConfig:
    """The same, whose last tile is loaded in part, where lines are along K and K is long enough."""
    shared = tile.cluster_m if tile.turned else tile.cluster_n
    size = tile.tile_n if tile.turned else tile.tile_m
    last = -(-((rows - 1) % size + 1) // UNIT) * UNIT
    if shared > 1 or last == size or tile.tile_k or matrix.k < SHORT_K or not matrix.k_contiguous:
        return tile
    return changed(tile, last_n=last) if tile.turned else changed(tile, last_m=last)
