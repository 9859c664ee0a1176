"""Facts that the SM90 sampled product derives from its configuration and operand types at trace time."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass

from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.mainloop.operand_ring import Registers, Warpgroups, stages_that_fit
from kernels_dsl.config.bsr_sampled import Sm90SampledConfig

TILE_K = 64
"""Elements of K in a stage: 128 bytes, the widest swizzle."""


@dataclass(frozen=True)
class SampledSpec(Warpgroups):
    """Static facts of one instance; extents in elements. `subs`: tiles of a block along rows and columns.

    `rows_together`: block rows in a tile. `peers`: CTAs whose tiles are of one block row.
    """

    tile_m: int
    unit_n: int
    units: int
    subs: tuple[int, int]
    wg_m: int
    pingpong: bool
    stages: int
    rows_together: int
    peers: int
    dtype: type[cutlass.Numeric]
    epilogue: EpiloguePlan

    consumers = 2
    tile_k = TILE_K
    registers = Registers(40, 232)

    @property
    def mma_dtypes(self) -> tuple[type[cutlass.Numeric], type[cutlass.Numeric]]:  # type: ignore[override]
        """One of A and B."""
        return self.dtype, self.dtype

    @property
    def cluster(self) -> tuple[int, int]:  # type: ignore[override]
        """CTAs of a cluster share A."""
        return 1, self.peers

    @property
    def tile_n(self) -> int:
        """Columns of a tile: those of all its units."""
        return self.unit_n * self.units

    @property
    def stage_bytes(self) -> int:  # type: ignore[override]
        """Bytes of one stage of A and B in shared memory, which are what TMA announces."""
        return (self.tile_m + self.tile_n) * TILE_K * 2


def make_spec(config: Sm90SampledConfig, block: tuple[int, int], dtype, d_dtype) -> SampledSpec:
    """Completes a configuration for blocks of (rows, columns). ValueError: what does not fit."""
    rows = block[0] * config.rows_together
    if rows % config.tile_m or block[1] % config.unit_n:
        raise ValueError(
            f"tile_m and unit_n are {config.tile_m} and {config.unit_n}, must divide {(rows, block[1])}"
        )
    if config.rows_together > 1 and (rows, block[1]) != (config.tile_m, config.unit_n):
        raise ValueError(
            f"rows_together is {config.rows_together}, must be 1 where tiles are not whole blocks"
        )
    pingpong = config.schedule.name == "PINGPONG"
    tile_n = config.unit_n * config.units
    wg_m = config.tile_m if pingpong else config.tile_m // 2
    epi_n = epilogue_columns(config.unit_n, d_dtype)
    stage_bytes = (config.tile_m + tile_n) * TILE_K * 2
    subtile_bytes = 2 * 64 * epi_n * d_dtype.width // 8
    stages, epi_stages = stages_that_fit(config, 0, stage_bytes, subtile_bytes, most=12)
    return SampledSpec(
        config.tile_m, config.unit_n, config.units, (rows // config.tile_m, block[1] // config.unit_n),
        wg_m=wg_m, pingpong=pingpong, stages=stages, rows_together=config.rows_together,
        peers=config.cluster, dtype=dtype,
        epilogue=EpiloguePlan((wg_m, tile_n), epi_n, epi_stages, d_dtype, True),
    )  # fmt: skip
