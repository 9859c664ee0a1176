"""Tiles of products of 1 to 256 rows with a large matrix, as served models multiply, from measurements.

The time is that of reading the matrix, or of the matrix instructions of the SM with most of them: so its rows
lie along WGMMA's M, all rows of A along its N, and few SMs may be left without work. The model of waves in
`gemm_table` does not say that. Measured on an H200 with matrices of 2112 to 51200 rows.
"""

from __future__ import annotations

from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.problem import Device, GemmProblem
from lowering.records import changed, frozen

LEAST_K = 1024
LEAST_TILES = 32
"""Of 64 rows of the matrix."""
A_THIRD = 44
"""Tiles that leave two of three SMs without work. Between it and `ENOUGH_TILES` little was measured."""
ENOUGH_TILES = 64
THIN, FEW, ONE_TILE, MANY, MOST = 16, 64, 128, 208, 256
"""Numbers of rows of A up to which a rule holds."""
OVERLAPPED_TILES = 112
"""With more, the next kernel's CTAs beside a thin product's cost more than they bring."""
OVERLAPPED_FP8_BYTES = 100 << 20


@frozen
class _Matrix:
    """The large matrix: tiles of 64 of its rows, K, bytes of an element; SMs of the device."""

    tiles: int
    k: int
    element_bytes: int
    sms: int

    @property
    def fp8(self) -> bool:
        return self.element_bytes == 1

    def waves(self, height: int, ctas: int = 1) -> int:
        """Waves of tiles of `height` times 64 rows, `ctas` CTAs each."""
        return -(-self._tiles_of(height) * ctas // self.sms)

    def _tiles_of(self, height: int) -> int:
        return -(-self.tiles // height)

    @property
    def long(self) -> bool:
        """K is more than twice the number of rows."""
        return self.k > 2 * 64 * self.tiles


def tile_for_few_rows(problem: GemmProblem, device: Device) -> Sm90GemmConfig | None:
    """The tile of a problem in the kernel's orientation before the tile turns it; None where the model of
    `gemm_table` is to say. Nothing is said of alignments, or of what fits."""
    scaled = problem.promotion is not None and problem.promotion.scaled
    if problem.grouped or problem.l != 1 or scaled or problem.ab_bytes > 2 or problem.k < LEAST_K:
        return None
    thin = problem.n <= THIN
    rows, wide = (problem.n, problem.m) if thin else (problem.m, problem.n)
    matrix = _Matrix(-(-wide // 64), problem.k, problem.ab_bytes, device.sm_count)
    if matrix.tiles < LEAST_TILES:
        return None
    if thin:
        return _thin(matrix)
    whole = Sm90GemmConfig(64, _up_to_16(rows), turned=True, l2_prefetch=True)
    if rows <= THIN or rows > MOST:
        return None
    if rows <= FEW:
        return _few(whole, matrix)
    halves = changed(whole, tile_n=_up_to_16(-(-rows // 2)), cluster_n=2)
    if rows <= ONE_TILE:
        return _one_tile(whole, halves, matrix)
    return _many(whole, halves, matrix, rows)


def _up_to_16(rows: int) -> int:
    return -(-rows // 16) * 16


def _thin(matrix: _Matrix) -> Sm90GemmConfig | None:
    """Of at most 16 rows."""
    tile = Sm90GemmConfig(64, 16, l2_prefetch=True)
    if matrix.tiles < ENOUGH_TILES:
        return None if matrix.fp8 or matrix.tiles > A_THIRD else changed(tile, split_k=2)
    read = matrix.tiles * 64 * matrix.k * matrix.element_bytes
    if matrix.tiles > OVERLAPPED_TILES or (matrix.fp8 and read > OVERLAPPED_FP8_BYTES):
        return None
    return changed(tile, overlap=True)


def _few(whole: Sm90GemmConfig, matrix: _Matrix) -> Sm90GemmConfig | None:
    """Of 17 to 64 rows."""
    if matrix.tiles >= ENOUGH_TILES:
        return whole
    if matrix.tiles > A_THIRD:
        return None
    if matrix.fp8:
        return whole if whole.tile_n <= 48 else None
    return changed(whole, split_k=2)


def _one_tile(whole: Sm90GemmConfig, halves: Sm90GemmConfig, matrix: _Matrix) -> Sm90GemmConfig | None:
    """Of 65 to 128 rows."""
    if matrix.tiles < ENOUGH_TILES:
        return halves if matrix.tiles <= A_THIRD else None
    if matrix.waves(3) == 1 and matrix.waves(2) > 1:
        return changed(whole, tile_m=192)
    return changed(whole, tile_m=128) if matrix.waves(3) > 1 else whole


def _many(whole: Sm90GemmConfig, halves: Sm90GemmConfig, matrix: _Matrix, rows: int) -> Sm90GemmConfig | None:
    """Of 129 to 256 rows. Halves of them in a cluster share the matrix's rows."""
    few, most, fp8 = whole.tile_n <= 144, rows > MANY, matrix.fp8
    enough, in_halves = matrix.tiles >= ENOUGH_TILES, matrix.waves(1, 2) == 1
    if matrix.long and enough and not fp8 and not most:
        if few:  # too few tiles for their matrix instructions: they are cut along K
            return changed(halves, tile_m=128, stream_k=True)
        if in_halves:
            return None
    alone = (few and not fp8) if in_halves else (few or not fp8)
    if alone and enough and matrix.waves(1) == 1 and not most:
        return whole
    for height in (1, 2, 3):
        if matrix.waves(height, 2) == 1:
            return changed(halves, tile_m=64 * height)
    if most:
        return changed(halves, tile_m=192) if fp8 and matrix.waves(3) == 1 else None
    if matrix.waves(2) == 1:
        return changed(whole, tile_m=128) if few else None
    if matrix.waves(3) == 1:
        return changed(whole if few else halves, tile_m=192)
    if fp8:
        return changed(whole if few else halves, tile_m=128)
    if matrix.waves(2) > 2:
        return changed(whole, tile_m=128, cluster_m=2, stream_k=True)
    return changed(whole, tile_m=128, cluster_m=4 if few else 1)
