"""Tiles of products of 1 to 64 rows with a large matrix, as served models multiply, from measurements.

The time is that of reading the matrix, or of the matrix instructions of the SM with most of them: so its rows
lie along WGMMA's M, all rows of A along its N, and few SMs may be left without work. Where tiles are too few
or a little too many for the SMs, CTAs of a cluster share a tile's K. The model of waves in `gemm_table` does
not say that. Measured on an H200 with matrices of 2112 to 57344 rows.

Tiles may have rows of A along WGMMA's M, too, and as many columns of the matrix as let all SMs work. M is a
multiple of 64, so rows may be fewer than the tile has: TMA would fill the others with zeros, at a quarter of
the speed at which it loads rows. So the last tile is loaded in part.
"""

from __future__ import annotations

from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.problem import LONG_K, MIB, SHORT_K, Device, GemmProblem, Matrix
from lowering.records import changed

LEAST_K = 1024
LEAST_TILES = 32
"""Of 64 rows of the matrix."""
ENOUGH_TILES = 64
"""Between a third of the SMs and it little was measured."""
THIN, FEW, ONE_TILE, MANY, MOST = 16, 64, 128, 208, 256
"""Numbers of rows of A up to which a rule holds."""
OVERLAPPED_TILES = 112
"""With more, the next kernel's CTAs beside a thin product's cost more than they bring."""
MOST_FILLED = 112
"""Columns of a tile of 64 rows of A."""
MOST_HIGH = 48
"""Rows of A up to which tiles of 128 rows of a matrix with a short K are faster; from there on as fast, and
slower where L2 has the matrix."""
SHORT_RING = 10
"""Stages of which an SM has room for two rings: with a short K the next kernel's CTA is there in time."""
UNIT = 8
"""Of rows that are loaded."""


def thin_by_tma(rows: int, columns: int, k: int, element_bytes: int) -> bool:
    """True where results of so few rows leave by TMA."""
    return rows <= THIN and columns > 64 * (LEAST_TILES - 1) and k >= LEAST_K and element_bytes <= 2


def rows_and_matrix(problem: GemmProblem, device: Device) -> tuple[int, Matrix] | None:
    """Rows of A and the large matrix of a problem in the kernel's orientation before the tile turns it; None
    where no rule of few rows holds."""
    if problem.grouped or problem.l != 1 or problem.ab_bytes > 2 or problem.k < LEAST_K:
        return None
    thin = problem.n <= THIN
    rows, wide = (problem.n, problem.m) if thin else (problem.m, problem.n)
    fast = problem.ab_bytes == 1 and problem.promotion is None
    scaled = problem.promotion is not None and problem.promotion.scaled
    unit = 16 if problem.d_bytes == 1 else 8
    matrix = Matrix(
        -(-wide // 64), problem.k, problem.ab_bytes, device.sm_count, fast=fast, scaled=scaled, unit=unit,
        k_contiguous=problem.a_k_major and problem.b_k_major,
    )  # fmt: skip
    if matrix.tiles < LEAST_TILES or (rows <= THIN and not thin) or rows > MOST:
        return None
    return rows, matrix


def tile_for_few_rows(problem: GemmProblem, device: Device) -> Sm90GemmConfig | None:
    """The tile of a problem of 1 to 64 rows without scales of blocks; None where another module is to say.
    Nothing is said of alignments, or of what fits."""
    few = rows_and_matrix(problem, device)
    if few is None:
        return None
    rows, matrix = few
    if rows <= THIN:
        return _thin(matrix)
    return _few(rows, matrix) if rows <= FEW and not problem.gated else None


def _thin(matrix: Matrix) -> Sm90GemmConfig | None:
    """Of at most 16 rows."""
    tile = Sm90GemmConfig(64, 16, l2_prefetch=True, evict_first=True)
    two, late = changed(tile, cluster_k=2), changed(tile, late=True)
    if matrix.paired and matrix.k * matrix.element_bytes >= 6144:
        large = matrix.bytes >= 48 * MIB and not matrix.third
        return two if large else changed(two, overlap=True)
    if matrix.tiles < ENOUGH_TILES:
        return None
    if matrix.tiles <= OVERLAPPED_TILES and (matrix.paired or matrix.k > LONG_K):
        return changed(tile, overlap=True)
    if matrix.k < SHORT_K and not matrix.fp8:
        return changed(late, stages=SHORT_RING)
    if matrix.tiles <= OVERLAPPED_TILES:
        return changed(late, tile_m=128)
    if matrix.fp8:
        if matrix.little_over:
            return changed(two, overlap=True)
        return changed(tile, l2_prefetch=False) if matrix.little_left else late
    return changed(late, tile_m=192) if matrix.little_over else changed(late, tile_k=128)


def _filled_waves(matrix: Matrix) -> int:
    """Waves of tiles of 64 rows of A, where they are better than those of the matrix's rows; 0 elsewhere."""
    if matrix.fp8:
        return int(matrix.little_over)
    if matrix.k < SHORT_K or not matrix.k_contiguous:
        return 0
    if matrix.two_thirds or matrix.sms < matrix.tiles <= MOST_FILLED * matrix.sms // 64:
        return 1
    return 2 if 2 * matrix.sms < matrix.tiles <= 2 * MOST_FILLED * matrix.sms // 64 else 0


def _few(rows: int, matrix: Matrix) -> Sm90GemmConfig | None:
    """Of 17 to 64 rows."""
    whole = Sm90GemmConfig(64, -(-rows // 16) * 16, turned=True, l2_prefetch=True, evict_first=True)
    two, late = changed(whole, cluster_k=2), changed(whole, late=True)
    high = changed(late, tile_m=128)
    if matrix.third:
        return two
    waves = _filled_waves(matrix)
    if waves:
        return with_last_rows(filling(64, matrix, waves=waves), rows, matrix)
    if matrix.tiles < ENOUGH_TILES:
        return None
    if matrix.paired and matrix.bytes >= 32 * MIB:
        return two
    if matrix.little_over:
        return two if matrix.fp8 else high
    if matrix.waves(1) == 1 and matrix.tall > 1:
        if not matrix.fp8 and matrix.k_contiguous:
            shared = changed(filling(64, matrix, ctas=2), cluster_k=2, late=False)
            return with_last_rows(shared, rows, matrix)
        if matrix.fp8 and matrix.tall == 4:
            return with_last_rows(filling(64, matrix), rows, matrix)
        return changed(whole, tile_m=192, cluster_k=matrix.tall)
    if matrix.little_left:
        return whole
    if matrix.waves(1) == 1 and matrix.tiles <= OVERLAPPED_TILES:
        low = matrix.k < SHORT_K and rows > MOST_HIGH and not matrix.fp8
        return late if matrix.paired or low else high
    if matrix.fp8 or matrix.k < SHORT_K:
        return late
    return changed(high, cluster_k=2) if matrix.waves(1) == 1 or matrix.waves(2) > 2 else high


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
