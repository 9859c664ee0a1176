"""Tiles of products of 65 to 256 rows with a large matrix, as in `few_rows`, by the time that each takes.

A stage takes as long as its matrix instructions or its way into shared memory; all stages together no less
than the matrix takes from memory, and what CTAs load from L2. Rows of A are whole in a tile, or in two halves
whose CTAs load the matrix for each other. Fitted to 150 products of 100 to 256 rows on an H200, bf16 and fp8
with one scale, where the choice is 0.6 % from the best of 8 to 14 tiles measured.
"""

from __future__ import annotations

from kernels_dsl.config.budget import why_not
from kernels_dsl.config.few_rows import (
    FEW,
    MANY,
    ONE_TILE,
    along_rows,
    filling,
    rows_and_matrix,
    with_last_rows,
)
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.problem import LONG_K, MIB, SHORT_K, Device, GemmProblem, Matrix
from lowering.records import changed, frozen

RESIDENT = {1: 1.0, 2: 1.0, 3: 0.887, 4: 0.91, 6: 0.773, 8: 0.91}
"""Share of the SMs that clusters of so many CTAs fill."""
LATE_BYTES = 160 * MIB
"""Of a matrix up to which one wave of CTAs has the next kernel start late."""
STAGE_BYTES = 128
"""Of K in a stage."""
ONE_CHUNK = 144
"""Columns up to which promoted sums of 64 rows a warpgroup are summed as one chunk."""
MOST_SHARED_FP8 = 112
"""Rows of A up to which four CTAs share them, in fp8."""
MOST_PAIRED = 192
MOST_WHOLE = 112
"""Columns of the matrix beside 128 rows in each of two CTAs, and beside 256 in one."""
THREE_WARPGROUPS = {False: 144, True: 112}
"""Columns of three warpgroups, by promotion of sums, that leave no spills."""

HALVES = (
    Sm90GemmConfig(64, 8, cluster_n=2),
    Sm90GemmConfig(128, 8, cluster_n=2),
    Sm90GemmConfig(192, 8, cluster_n=2),
    Sm90GemmConfig(128, 8, cluster_n=2, cluster_k=3),
    Sm90GemmConfig(192, 8, cluster_n=2, cluster_k=2),
    Sm90GemmConfig(128, 8, cluster_n=2, stream_k=True),
    Sm90GemmConfig(192, 8, cluster_n=2, stream_k=True),
)
WHOLE = (
    Sm90GemmConfig(64, 8, cluster_k=2),
    Sm90GemmConfig(64, 8, cluster_k=3),
    Sm90GemmConfig(128, 8, cluster_m=4),
    Sm90GemmConfig(128, 8, cluster_k=2),
    Sm90GemmConfig(128, 8, cluster_m=2, cluster_k=2),
    Sm90GemmConfig(128, 8, cluster_m=2, stream_k=True),
    Sm90GemmConfig(192, 8),
    Sm90GemmConfig(192, 8, cluster_k=3),
    Sm90GemmConfig(192, 8, cluster_m=2, cluster_k=4),
)
"""Tiles whose columns are still to be set; what they have in common is, too."""


@frozen
class Rates:
    """Facts of the hardware that the model has: clocks a microsecond and bytes a microsecond, in millions.

    `instruction`: clocks of 64 rows and 4 columns of a stage, `load`: of the 128 bytes of a row or column,
    `stage`: of each stage beside. `enough`: share of the SMs that reads at full rate. Microseconds:
    `shared_k`, `stream_k`, `loaded_along_m`, `large_cluster` (of more than four CTAs).
    """

    memory: float
    l2: float
    clocks: float
    instruction: float
    load: float
    stage: float
    enough: float
    shared_k: float
    stream_k: float
    loaded_along_m: float
    large_cluster: float


BF16 = Rates(
    memory=4.23, l2=17.6, clocks=1.62, instruction=2.07, load=1.42, stage=1.1,
    enough=0.82, shared_k=1.47, stream_k=7.42, loaded_along_m=1.33, large_cluster=0.03,
)  # fmt: skip
FP8 = Rates(
    memory=4.40, l2=12.6, clocks=1.72, instruction=2.28, load=1.51, stage=4.7,
    enough=0.40, shared_k=1.69, stream_k=7.25, loaded_along_m=0.12, large_cluster=1.65,
)  # fmt: skip


def tile_for_many_rows(problem: GemmProblem, device: Device) -> Sm90GemmConfig | None:
    """The tile that takes least, of those that fit a problem without scales of blocks; None where the model
    of `gemm_table` is to say."""
    found = rows_and_matrix(problem, device)
    if found is None or found[0] <= FEW or problem.gated:
        return None
    rows, matrix = found
    tile = _measured(rows, matrix) if matrix.k_contiguous else None
    if tile is not None:
        tile = changed(tile, epi_tma=problem.d_align == 16)
        if why_not(tile, problem, device) is None:
            return tile
    if rows > MANY and not _few_enough(matrix):
        return None
    timed = [(time(tile, rows, matrix), tile) for tile in tiles(rows, matrix)]
    for _, tile in sorted(timed, key=lambda pair: pair[0]):
        late = matrix.bytes <= LATE_BYTES and tile.cluster_k == 1 and _waves(tile, rows, matrix) == 1
        tile = changed(tile, late=late, epi_tma=problem.d_align == 16)
        if tile.tile_m == 64 or (tile.tile_m == 128 and rows <= ONE_CHUNK):
            tile = with_last_rows(tile, rows, matrix)
        if why_not(tile, problem, device) is None:
            return tile
    return None


def _measured(rows: int, matrix: Matrix) -> Sm90GemmConfig | None:
    """The tile that was faster than those of the lists, where there is one."""
    if rows > MANY:
        return _measured_most(rows, matrix)
    if rows <= ONE_TILE and not matrix.fp8 and (matrix.two_thirds or matrix.little_over):
        return with_last_rows(changed(filling(64, matrix, ctas=2), cluster_m=2), rows, matrix)
    if rows > (MOST_SHARED_FP8 if matrix.fp8 else ONE_CHUNK):
        return None
    shared = _with_columns(Sm90GemmConfig(64, 8, cluster_m=4), rows)
    waves = _waves(shared, rows, matrix)
    if waves == 1 and matrix.tiles * 3 >= matrix.sms * 2 and (matrix.k >= LONG_K or not matrix.fp8):
        return changed(shared, late=True)
    return shared if waves > 6 and matrix.k < LONG_K else None


def _measured_most(rows: int, matrix: Matrix) -> Sm90GemmConfig | None:
    """The same of more than 208 rows: pairs of CTAs have all rows of A, or one has."""
    if matrix.third:
        return with_last_rows(
            changed(filling(64, matrix, ctas=4, most=RESIDENT[4]), cluster_m=4), rows, matrix
        )
    if matrix.paired:
        return None
    pair = filling(128, matrix, ctas=2)
    if pair.tile_n <= MOST_PAIRED:
        return with_last_rows(changed(pair, cluster_m=2), rows, matrix)
    whole = along_rows(256, MOST_WHOLE)
    waves = matrix.tiles * 64 / MOST_WHOLE / matrix.sms
    if (matrix.fp8 or matrix.k <= SHORT_K) and waves % 1 > 0.9:
        return with_last_rows(whole, rows, matrix)
    return None


def _few_enough(matrix: Matrix) -> bool:
    """Halves of more than 208 rows are one wave."""
    return matrix.waves(2, 2) == 1 or (matrix.fp8 and matrix.waves(3) == 1)


def tiles(rows: int, matrix: Matrix) -> list[Sm90GemmConfig]:
    """Those of the lists above, with their columns, that are worth a try."""
    promoted = matrix.fp8 and not matrix.fast
    found = [_with_columns(tile, -(-rows // 2)) for tile in HALVES]
    for tile in WHOLE:
        tile = _with_columns(tile, rows)
        most = THREE_WARPGROUPS[promoted] if tile.tile_m == 192 else ONE_CHUNK if promoted else tile.tile_n
        if tile.tile_n <= most:
            found.append(tile)
    return [tile for tile in found if tile.cluster_k == 1 or _waves(tile, rows, matrix) <= 1]


def _with_columns(tile: Sm90GemmConfig, columns: int) -> Sm90GemmConfig:
    return changed(tile, tile_n=-(-columns // 8) * 8, turned=True, l2_prefetch=True, evict_first=True)


def _ctas(tile: Sm90GemmConfig, rows: int, matrix: Matrix) -> int:
    """CTAs of all tiles, without those that share K."""
    along_m = -(-matrix.tiles * 64 // (tile.tile_m * tile.cluster_m)) * tile.cluster_m
    return along_m * -(-rows // tile.tile_n)


def _waves(tile: Sm90GemmConfig, rows: int, matrix: Matrix) -> float:
    """Waves of them; a part of one where their K is cut into even shares."""
    most = int(matrix.sms * RESIDENT[tile.cluster_ctas])
    ctas = _ctas(tile, rows, matrix) * tile.cluster_k
    return ctas / most if tile.stream_k else float(-(-ctas // most))


def time(tile: Sm90GemmConfig, rows: int, matrix: Matrix) -> float:
    """Microseconds, without those that all tiles have in common."""
    rates = FP8 if matrix.fp8 else BF16
    ctas, waves = _ctas(tile, rows, matrix), _waves(tile, rows, matrix)
    k_bytes = matrix.k * matrix.element_bytes
    instruction = BF16.instruction if matrix.fast else rates.instruction
    multiplied = tile.tile_m / 64 * tile.tile_n * instruction
    clocks = max(multiplied, (tile.tile_m + tile.tile_n) * rates.load) + rates.stage
    products = waves * k_bytes / STAGE_BYTES / tile.cluster_k * clocks / (rates.clocks * 1e3)
    fetched = tile.tile_m / tile.cluster_n + tile.tile_n / tile.cluster_m
    from_l2 = ctas * k_bytes * fetched / (rates.l2 * 1e6)
    busy = 1.0 if tile.stream_k else ctas * tile.cluster_k / (waves * matrix.sms)
    from_memory = matrix.bytes / (rates.memory * 1e6) * max(1.0, rates.enough / busy)
    # The largest, and more where others are close to it.
    longest: float = (products**4 + from_l2**4 + from_memory**4) ** 0.25
    longest += rates.shared_k * (tile.cluster_k > 1) + rates.stream_k * tile.stream_k
    return (
        longest + rates.loaded_along_m * (tile.cluster_m > 1) + rates.large_cluster * (tile.cluster_ctas > 4)
    )
