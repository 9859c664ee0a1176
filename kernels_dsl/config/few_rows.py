"""Tiles of products of 1 to 256 rows with a large matrix, as served models multiply, from measurements.

The time is that of reading the matrix, or of the matrix instructions of the SM with most of them: so its rows
lie along WGMMA's M, all rows of A along its N, and few SMs may be left without work. Where tiles are too few
or a little too many for the SMs, CTAs of a cluster share a tile's K. The model of waves in `gemm_table` does
not say that. Measured on an H200 with matrices of 2112 to 57344 rows.
"""

from __future__ import annotations

from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.problem import Device, GemmProblem
from lowering.records import changed, frozen

LEAST_K = 1024
LEAST_TILES = 32
"""Of 64 rows of the matrix."""
ENOUGH_TILES = 64
"""Between a third of the SMs and it little was measured."""
THIN, FEW, ONE_TILE, NARROW, MANY, MOST = 16, 64, 128, 144, 208, 256
"""Numbers of rows of A up to which a rule holds."""
OVERLAPPED_TILES = 112
"""With more, the next kernel's CTAs beside a thin product's cost more than they bring."""
LONG_K = 8192
SHORT_K = 4096
SHORT_RING = 10
"""Stages of which an SM has room for two rings: with a short K the next kernel's CTA is there in time."""
MIB = 1 << 20


@frozen
class Matrix:
    """The large matrix: tiles of 64 of its rows, K, bytes of an element; SMs of the device.

    `fast`: fp8 whose sums are not promoted.
    """

    tiles: int
    k: int
    element_bytes: int
    sms: int
    fast: bool

    @property
    def fp8(self) -> bool:
        return self.element_bytes == 1

    @property
    def bytes(self) -> int:
        return self.tiles * 64 * self.k * self.element_bytes

    def ctas(self, height: int, ctas: int = 1) -> int:
        """CTAs, `ctas` for each tile of `height` times 64 rows."""
        return -(-self.tiles // height) * ctas

    def waves(self, height: int, ctas: int = 1) -> int:
        """Waves of them."""
        return -(-self.ctas(height, ctas) // self.sms)

    @property
    def third(self) -> bool:
        """Tiles leave two of three SMs without work."""
        return self.waves(1, 3) == 1

    @property
    def paired(self) -> bool:
        """Two CTAs a tile run at once."""
        return self.waves(1, 2) == 1

    @property
    def little_over(self) -> bool:
        """Tiles are more than the SMs by a third at most."""
        return self.sms < self.tiles <= self.sms * 4 // 3

    @property
    def little_left(self) -> bool:
        """The last wave of tiles is for an eighth of the SMs at most."""
        return self.waves(1) > 1 and 0 < self.tiles % self.sms <= self.sms // 8

    @property
    def tall(self) -> int:
        """CTAs of a cluster that share K of 192 rows such that all run at once, on four of five SMs or more.

        1 where none do. Clusters of more than two do not fill the device; sums that are fast need registers.
        """
        if self.k < LONG_K or self.paired or self.fast:
            return 1
        for count, most in ((4, self.sms * 10 // 11), (3, self.sms * 10 // 11), (2, self.sms)):
            if self.sms * 4 // 5 <= self.ctas(3, count) <= most:
                return count
        return 1

    @property
    def long(self) -> bool:
        """K is more than twice the number of rows."""
        return self.k > 2 * 64 * self.tiles


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
    matrix = Matrix(-(-wide // 64), problem.k, problem.ab_bytes, device.sm_count, fast)
    if matrix.tiles < LEAST_TILES or (rows <= THIN and not thin) or rows > MOST:
        return None
    return rows, matrix


def tile_for_few_rows(problem: GemmProblem, device: Device) -> Sm90GemmConfig | None:
    """The tile of a problem without scales of blocks; None where the model of `gemm_table` is to say. Nothing
    is said of alignments, or of what fits."""
    few = rows_and_matrix(problem, device)
    if few is None:
        return None
    rows, matrix = few
    if rows <= THIN:
        return _thin(matrix)
    whole = Sm90GemmConfig(64, _up_to_16(rows), turned=True, l2_prefetch=True)
    if rows <= FEW:
        return _few(whole, matrix)
    halves = changed(whole, tile_n=_up_to_16(-(-rows // 2)), cluster_n=2)
    if rows <= ONE_TILE:
        return _one_tile(whole, halves, matrix)
    if rows > MANY:
        return _most(halves, matrix)
    found = _in_clusters(whole, halves, matrix, rows <= NARROW)
    return found or _many(whole, halves, matrix, rows <= NARROW)


def _up_to_16(rows: int) -> int:
    return -(-rows // 16) * 16


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


def _few(whole: Sm90GemmConfig, matrix: Matrix) -> Sm90GemmConfig | None:
    """Of 33 to 64 rows."""
    whole = changed(whole, evict_first=True)
    two, late = changed(whole, cluster_k=2), changed(whole, late=True)
    high = changed(late, tile_m=128)
    if matrix.third:
        return two
    if matrix.tiles < ENOUGH_TILES:
        return None
    if matrix.paired and matrix.bytes >= 32 * MIB:
        return two
    if matrix.little_over:
        return two if matrix.fp8 else high
    if matrix.waves(1) == 1 and matrix.tall > 1:
        return changed(whole, tile_m=192, cluster_k=matrix.tall)
    if matrix.little_left:
        return whole
    if matrix.waves(1) == 1 and matrix.tiles <= OVERLAPPED_TILES:
        return late if matrix.paired else high
    if matrix.fp8 or matrix.k < SHORT_K:
        return late
    return changed(high, cluster_k=2) if matrix.waves(1) == 1 or matrix.waves(2) > 2 else high


def _one_tile(whole: Sm90GemmConfig, halves: Sm90GemmConfig, matrix: Matrix) -> Sm90GemmConfig | None:
    """Of 65 to 128 rows."""
    if matrix.third:
        return changed(whole, cluster_k=3)
    if matrix.tiles < ENOUGH_TILES:
        return None
    if matrix.tall > 1:
        return changed(whole, tile_m=192, cluster_k=matrix.tall)
    if matrix.paired:
        return changed(whole, cluster_k=2) if matrix.bytes >= 32 * MIB else whole
    if matrix.waves(1) == 1:
        return changed(whole, tile_m=128, cluster_k=2) if matrix.bytes >= 128 * MIB else whole
    if matrix.waves(3, 2) == 1:
        return changed(halves, tile_m=192)
    if matrix.waves(3) == 1:
        return changed(whole, tile_m=192) if matrix.waves(2) > 1 else whole
    return changed(whole, tile_m=128) if matrix.fp8 else _in_even_shares(whole)


def _in_even_shares(whole: Sm90GemmConfig) -> Sm90GemmConfig:
    """Tiles of 128 rows of the matrix, two in a cluster, of which the last ones are cut along K."""
    return changed(whole, tile_m=128, cluster_m=2, stream_k=True)


def _in_clusters(
    whole: Sm90GemmConfig, halves: Sm90GemmConfig, matrix: Matrix, narrow: bool
) -> Sm90GemmConfig | None:
    """Of 129 to 208 rows, where tiles are no more than the SMs: cut along K; None where they are not.

    Sums of fp8 products that are not narrow are too many for it.
    """
    fp8, enough = matrix.fp8, matrix.tiles >= ENOUGH_TILES
    shared = changed(halves, tile_m=192, stream_k=True)
    if fp8 and not narrow:
        return shared if matrix.tall == 4 and matrix.long else None
    if matrix.third:
        return None if fp8 else changed(whole, cluster_k=3)
    if matrix.paired:
        return changed(whole, cluster_k=2) if enough else None
    if matrix.tall == 4 and not fp8:
        return shared
    two = matrix.bytes >= 40 * MIB if narrow else matrix.long and matrix.tall == 1
    return changed(whole, tile_m=128, cluster_k=2) if two and matrix.waves(1) == 1 else None


def _many(
    whole: Sm90GemmConfig, halves: Sm90GemmConfig, matrix: Matrix, narrow: bool
) -> Sm90GemmConfig | None:
    """Of 129 to 208 rows. Halves of them in a cluster share the matrix's rows."""
    fp8, alone = matrix.fp8, narrow or not matrix.fp8
    if alone and matrix.tiles >= ENOUGH_TILES and matrix.waves(1) == 1:
        return whole
    for height in (1, 2, 3):
        if matrix.waves(height, 2) == 1:
            return changed(halves, tile_m=64 * height)
    if matrix.waves(2) == 1:
        return changed(whole, tile_m=128) if narrow else None
    if matrix.waves(3) == 1:
        return changed(whole if narrow else halves, tile_m=192)
    if matrix.waves(2) > (3 if fp8 else 2) and alone:
        return _in_even_shares(whole)
    if fp8:
        return changed(whole if narrow else halves, tile_m=128)
    return changed(whole, tile_m=128, cluster_m=4 if narrow else 1)


def _most(halves: Sm90GemmConfig, matrix: Matrix) -> Sm90GemmConfig | None:
    """Of 209 to 256 rows."""
    if matrix.fp8 and not matrix.paired and matrix.tiles * 64 <= matrix.sms // 2 * 96:
        return Sm90GemmConfig(128, 96, cluster_m=2, l2_prefetch=True)
    for height, least in ((1, 0), (2, matrix.sms * 2 // 3), (3, matrix.sms * 9 // 10)):
        if matrix.waves(height, 2) == 1:
            return changed(halves, tile_m=64 * height) if matrix.ctas(height, 2) >= least else None
    return changed(halves, tile_m=192) if matrix.fp8 and matrix.waves(3) == 1 else None
