"""Configurations of the Hopper sampled product: plain frozen data, free of any compiler import."""

from __future__ import annotations

import math

from kernels_dsl.config.gemm import Schedule
from lowering.records import frozen

MAX_COLUMNS = 256
"""Columns of a tile: WGMMA's largest N."""
WAVE_BLOCKS = {64: 128, 128: 32}
"""Rows of a tile -> tiles of rows worked on together, so that the factors are read from memory less often.

Measured at 8192 x 8192 x 8192, 25 % kept; of 64 rows: all in turn 370 TFLOPS, 44 393, 88 417, and in another
run 88 388, 128 425; of 128 rows any."""


SHARING_TILES = 3
"""Tiles that a row's kept blocks fill, on average, from which on two CTAs share its rows of A."""
MANY_TILES = 8
"""The same of block rows that share a tile, where all blocks are counted, common columns too."""
WASTE = 1.12
"""The factor by which filling up to an even number may lengthen a row's tiles: 7 to 19 % are gained."""


@frozen
class Sm90SampledConfig:
    """One instance of the TMA + WGMMA kernel whose output tiles are kept blocks of a row, side by side.

    `tile_m`: rows of a tile, a divisor of the block's; `unit_n`: columns that a tile takes of one block, a
    divisor of the block's; `units`: blocks in a tile. `group`: block rows worked on together.
    `rows_together`: block rows of a tile, which computes of them the columns that any of them keeps.
    `cluster`: CTAs that have tiles of one block row side by side, and share its rows of A by multicast.
    """

    tile_m: int
    unit_n: int
    units: int
    schedule: Schedule = Schedule.COOPERATIVE
    group: int = 32
    rows_together: int = 1
    cluster: int = 1

    family = "sm90"


def choose_sampled(
    block: tuple[int, int], b_k_major: bool, aligned: bool, kept: float
) -> Sm90SampledConfig | None:
    """The configuration for blocks of (rows, columns); None where this family has none.

    `b_k_major`: b (K, N) is contiguous along K. `aligned`: both factors begin at 16 bytes, and so do their
    rows or columns. `kept`: blocks of a block row, on average. Blocks of 16 or 32 rows share WGMMA's M with
    those below them.
    """
    rows, columns = block
    if aligned and b_k_major and rows in (16, 32) and columns <= MAX_COLUMNS:
        units = MAX_COLUMNS // columns
        return Sm90SampledConfig(
            64, columns, units, Schedule.PINGPONG, WAVE_BLOCKS[64], 64 // rows,
            cluster=_sharing_rows(kept, units, 64 // rows),
        )  # fmt: skip
    if not aligned or rows % 64:
        return None
    tile_m = 128 if rows % 128 == 0 else 64
    # A tile's swizzle must be its units': 128 bytes along N, where N is the contiguous mode.
    step = 16 if b_k_major else 64
    if columns % step:
        return None
    unit_n = max(n for n in range(step, MAX_COLUMNS + 1, step) if columns % n == 0)
    units = MAX_COLUMNS // unit_n if unit_n == columns else 1
    schedule = Schedule.COOPERATIVE if tile_m == 128 else Schedule.PINGPONG
    cluster = _sharing_rows(kept, units, 1) if tile_m == 64 and unit_n == columns else 1
    return Sm90SampledConfig(tile_m, unit_n, units, schedule, WAVE_BLOCKS[tile_m], cluster=cluster)


def _sharing_rows(kept: float, units: int, rows_together: int) -> int:
    """CTAs that share the rows of A: two, unless one of them would often have nothing to do."""
    tiles = kept * rows_together / units
    if rows_together > 1:
        return 2 if tiles >= MANY_TILES else 1
    even = 2 * math.ceil(tiles / 2)
    return 2 if tiles >= SHARING_TILES and even <= WASTE * math.ceil(tiles) else 1
