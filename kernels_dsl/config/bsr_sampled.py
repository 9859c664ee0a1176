"""Configurations of the Hopper sampled product: plain frozen data, free of any compiler import."""

from __future__ import annotations

from dataclasses import dataclass

from kernels_dsl.config.gemm import Schedule

MAX_COLUMNS = 256
"""Columns of a tile: WGMMA's largest N."""
WAVE_BLOCKS = {64: 88, 128: 32}
"""Rows of a tile -> tiles of rows worked on together, so that the factors are read from memory less often.

Measured at 8192 x 8192 x 8192, 25 % kept; of 64 rows: all in turn 370 TFLOPS, 44 393, 88 417; of 128 any."""


@dataclass(frozen=True)
class Sm90SampledConfig:
    """One instance of the TMA + WGMMA kernel whose output tiles are kept blocks of a row, side by side.

    `tile_m`: rows of a tile, a divisor of the block's; `unit_n`: columns that a tile takes of one block, a
    divisor of the block's; `units`: blocks in a tile. `group`: block rows worked on together.
    `rows_together`: block rows of a tile, which computes of them the columns that any of them keeps.
    """

    tile_m: int
    unit_n: int
    units: int
    schedule: Schedule = Schedule.COOPERATIVE
    group: int = 32
    rows_together: int = 1

    family = "sm90"


def choose_sampled(block: tuple[int, int], b_k_major: bool, aligned: bool) -> Sm90SampledConfig | None:
    """The configuration for blocks of (rows, columns); None where this family has none.

    `b_k_major`: b (K, N) is contiguous along K. `aligned`: both factors begin at 16 bytes, and so do their
    rows or columns. Blocks of 16 or 32 rows share WGMMA's M with those below them.
    """
    rows, columns = block
    if aligned and b_k_major and rows in (16, 32) and columns <= MAX_COLUMNS:
        return Sm90SampledConfig(
            64, columns, MAX_COLUMNS // columns, Schedule.PINGPONG, WAVE_BLOCKS[64], 64 // rows
        )
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
    return Sm90SampledConfig(tile_m, unit_n, units, schedule, WAVE_BLOCKS[tile_m])
