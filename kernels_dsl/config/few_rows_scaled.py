"""Tiles of products of few rows whose operands have scales of 128 of K, as `few_rows` has them for others.

A tile has rows of A along WGMMA's M from 17 rows on: turned, it has a scale for each of its columns, which
pays at 129 to 144 rows only, of which tiles of 64 would be half empty.
"""

from __future__ import annotations

from kernels_dsl.config.few_rows import (
    FEW,
    ONE_TILE,
    OVERLAPPED_TILES,
    THIN,
    along_rows,
    rows_and_matrix,
    with_last_rows,
)
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.problem import LONG_K, MIB, Device, GemmProblem, Matrix
from lowering.records import changed

HALVES = 144
"""Rows of A up to which halves of them are a tile's columns."""
THREE_TILES = 192
"""Rows of A up to which they are one tile of three warpgroups."""


def scaled_tile_for_few_rows(problem: GemmProblem, device: Device) -> Sm90GemmConfig | None:
    """None where the model of `gemm_table` is to say."""
    found = rows_and_matrix(problem, device)
    if found is None or (problem.gated and found[0] > THIN):
        return None
    rows, matrix = found
    if rows <= THIN:
        return _thin(matrix)
    if rows <= FEW:
        tile = _few(matrix)
    elif rows <= ONE_TILE:
        tile = _two_of_64(matrix)
    elif rows <= HALVES:
        tile = _halves(rows, matrix)
    elif rows <= THREE_TILES:
        return None
    else:
        tile = _two_of_128(matrix)
    return None if tile is None else with_last_rows(tile, rows, matrix)


def _thin(matrix: Matrix) -> Sm90GemmConfig:
    """Of at most 16 rows."""
    tile = Sm90GemmConfig(64, 16)
    early = changed(tile, l2_prefetch=True)
    if matrix.third or matrix.little_over or (matrix.paired and matrix.bytes >= 48 * MIB):
        return changed(early, cluster_k=2)
    if matrix.paired:
        return changed(early, overlap=True)
    return changed(tile, overlap=True) if matrix.tiles <= OVERLAPPED_TILES else tile


def _few(matrix: Matrix) -> Sm90GemmConfig | None:
    """Of 17 to 64 rows."""
    small = along_rows(64, 64, late=True)
    if matrix.little_over:
        return changed(small, cluster_k=2)
    return None if matrix.paired else small


def _two_of_64(matrix: Matrix) -> Sm90GemmConfig:
    """Of 65 to 128 rows: two tiles, but where those of 128 rows share out the SMs better."""
    pair = along_rows(64, 128)
    if matrix.third:
        return changed(along_rows(128, 64), cluster_k=3)
    if matrix.paired:
        if matrix.k > LONG_K:
            return changed(along_rows(128, 64), cluster_k=2)
        return changed(along_rows(64, 64, late=True), cluster_m=2)
    if matrix.waves(2, 2) == 1:
        if matrix.tall == 4 and matrix.k > LONG_K:
            return changed(along_rows(128, 128), cluster_n=2, stream_k=True)
        return changed(pair, cluster_m=2, late=True)
    if matrix.little_over:
        return changed(pair, cluster_m=2, stream_k=True)
    if matrix.waves(2) == 1:
        return along_rows(128, 128, late=True)
    if matrix.waves(3) == 1:
        return along_rows(128, 192, late=True)
    return changed(pair, cluster_m=2)


def _halves(rows: int, matrix: Matrix) -> Sm90GemmConfig:
    """Of 129 to 144 rows."""
    half = Sm90GemmConfig(
        64, -(-rows // 16) * 8, cluster_n=2, turned=True, l2_prefetch=True, evict_first=True
    )
    long = along_rows(192, 128)
    if matrix.k >= 2 * LONG_K:
        return changed(long, stream_k=True)
    for height in (64, 128, 192):
        ctas = matrix.ctas(height // 64, 2)
        if ctas <= matrix.sms and (height < 192 or ctas * 5 >= matrix.sms * 4):
            return changed(half, tile_m=height, late=True)
    if matrix.waves(3) == 1:
        return changed(half, tile_m=192)
    return changed(long, stream_k=matrix.tiles % (2 * matrix.sms) < matrix.sms)


def _two_of_128(matrix: Matrix) -> Sm90GemmConfig:
    """Of 193 to 256 rows."""
    pair = changed(along_rows(128, 128), cluster_m=2)
    if matrix.third:
        return changed(along_rows(64, 64, late=True), cluster_m=2)
    if matrix.paired:
        return changed(pair, tile_n=64, late=True)
    if matrix.tall == 4 and matrix.k > 2 * LONG_K:
        return changed(pair, stream_k=True)
    if matrix.waves(2, 2) == 1:
        return changed(pair, late=True)
    if matrix.waves(3, 2) == 1:
        return changed(pair, stream_k=True) if matrix.little_over else changed(pair, tile_n=192, late=True)
    return changed(pair, stream_k=matrix.little_left)
