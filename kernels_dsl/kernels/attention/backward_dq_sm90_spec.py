"""Trace-time facts of the SM90 kernel that computes dQ by tiles of queries."""

from dataclasses import dataclass
from typing import Any

import cutlass

from kernels_dsl.blocks.attention.kv_blocks import RightEdge
from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw.wgmma import WGMMA_M

from .forward_sm90_spec import QueryTileSpec, Registers


@dataclass(frozen=True)
class DqSpec(QueryTileSpec):
    """Static facts of one instance; extents in elements. Fields of the configuration are explained there."""

    tile_m: int
    tile_n: int
    dim: int
    dim_v: int
    k_stages: int
    v_stages: int
    ctas_per_sm: int
    row_tile: int
    """Query rows whose log-sum-exp lie together in memory."""
    varlen: bool
    """Packed sequences."""
    dtype: type[cutlass.Numeric]
    epilogue: EpiloguePlan
    variant: Any  # AttentionVariant

    pack = 1
    joined = 1
    right_edge = RightEdge.FALLING

    @property
    def registers(self) -> Registers:
        """Registers of the roles; 64 K registers serve the SM."""
        if self.ctas_per_sm == 2:
            return Registers(24, 232)
        return {1: Registers(40, 232), 2: Registers(24, 240)}[self.consumers]

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a tile of operands."""
        return rows * columns * self.dtype.width // 8


def make_spec(config: Any, variant: Any, dtype: type[cutlass.Numeric], varlen: bool, row_tile: int) -> DqSpec:
    """Completes an `Sm90DqConfig`. The output is staged in the first 64 columns of Q: two buffers of half as
    many columns are as large as a warpgroup's rows there. ValueError where a step would wait for itself."""
    if config.k_stages < 2:
        raise ValueError(f"k_stages must be 2 or more, since K is kept for a step's dQ; it is {config}")
    columns = epilogue_columns(config.dim, dtype)
    plan = EpiloguePlan((WGMMA_M, config.dim), columns, 2, dtype, True)
    return DqSpec(
        config.tile_m, config.tile_n, config.dim, config.dim_v, config.k_stages, config.v_stages,
        config.ctas_per_sm, row_tile, varlen, dtype, plan, variant,
    )  # fmt: skip
