"""Tiles of products of few rows whose operands have scales of 128 of K, as `few_rows` has them for others.

A tile has rows of A along WGMMA's M from 33 rows on: turned, it would have a scale for each of its columns.
"""

from __future__ import annotations

from kernels_dsl.config.few_rows import (
    FEW,
    LONG_K,
    MANY,
    MIB,
    ONE_TILE,
    OVERLAPPED_TILES,
    THIN,
    Matrix,
    rows_and_matrix,
)
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.problem import Device, GemmProblem
from lowering.records import changed

THREE_TILES = 192
"""Rows of A up to which they are one tile of three warpgroups."""


def scaled_tile_for_few_rows(problem: GemmProblem, device: Device) -> Sm90GemmConfig | None:
    """None where the model of `gemm_table` is to say."""
    found = rows_and_matrix(problem, device)
    if found is None:
        return None
    rows, matrix = found
    if rows <= THIN:
        return _thin(matrix)
    small = Sm90GemmConfig(64, 64, l2_prefetch=True)
    wide = Sm90GemmConfig(64, 128, cluster_m=2, l2_prefetch=True)
    few_tiles = matrix.paired and matrix.k < LONG_K
    if rows <= FEW:
        if matrix.little_over:
            return changed(small, cluster_k=2)
        return small if matrix.tiles > OVERLAPPED_TILES else None
    if rows <= ONE_TILE:
        if few_tiles:
            return changed(small, cluster_m=2)
        return changed(wide, stream_k=True) if matrix.little_over else None
    if rows <= MANY and matrix.paired and not matrix.third and (rows > THREE_TILES or few_tiles):
        return wide
    if THREE_TILES < rows <= MANY and matrix.waves(1) > 1 and matrix.waves(3, 2) == 1:
        return changed(wide, tile_m=128, stream_k=True)
    return None


def _thin(matrix: Matrix) -> Sm90GemmConfig:
    """Of at most 16 rows."""
    tile = Sm90GemmConfig(64, 16)
    early = changed(tile, l2_prefetch=True)
    if matrix.third or matrix.little_over or (matrix.paired and matrix.bytes >= 48 * MIB):
        return changed(early, cluster_k=2)
    if matrix.paired:
        return changed(early, overlap=True)
    return changed(tile, overlap=True) if matrix.tiles <= OVERLAPPED_TILES else tile
