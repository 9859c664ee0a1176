"""Trace-time facts of the SM90 attention backward."""

from dataclasses import dataclass
from typing import Any

import cutlass

from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.config.attention_backward import SumsOfTile

CONSUMERS = 2
TILE_K = CONSUMERS * WGMMA_M
"""Keys of a work tile: 64 a consumer warpgroup."""


@dataclass(frozen=True)
class BackwardSpec:
    """Static facts of one instance; extents in elements."""

    tile_q: int
    dim: int
    dim_v: int
    stages: int
    """Query blocks in flight: Q with its log-sum-exp, dO with its row sums."""
    deterministic: bool
    varlen: bool
    dtype: type[cutlass.Numeric]
    dk_epilogue: EpiloguePlan
    dv_epilogue: EpiloguePlan
    dq_share: tuple[int, int]
    """Queries and columns of a warpgroup's share of dQ."""
    sums: SumsOfTile
    variant: Any  # AttentionVariant
    gives_q: bool
    gives_kv: bool

    tile_k = TILE_K
    ds_stages = 2
    """Buffers of dS: one barrier a block is enough with two."""

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of one step."""
        return self.tile_q, self.tile_k

    @property
    def threads(self) -> int:
        """Two consumer warpgroups and a producer."""
        return (CONSUMERS + 1) * WARPGROUP_THREADS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread after setmaxnreg: (producer, consumer)."""
        return 24, 240

    @property
    def stats_bytes(self) -> int:
        """Bytes of a query block's log-sum-exp, and as many of its row sums."""
        return self.tile_q * 4

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a tile of operands."""
        return rows * columns * self.dtype.width // 8


def make_spec(config: Any, variant: Any, dtype: type[cutlass.Numeric], varlen: bool) -> BackwardSpec:
    """Completes an `Sm90BackwardConfig`."""

    def epilogue(columns: int) -> EpiloguePlan:
        return EpiloguePlan((WGMMA_M, columns), epilogue_columns(columns, dtype), 2, dtype, config.tma_stores)

    return BackwardSpec(
        config.tile_q, config.dim, config.dim_v, config.stages, config.deterministic, varlen, dtype,
        epilogue(config.dim), epilogue(config.dim_v), config.dq_share, config.sums, variant,
        config.gives_q, config.gives_kv,
    )  # fmt: skip
