"""Trace-time facts of the SM90 kernel that computes dQ by tiles of queries."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean

from kernels_dsl.blocks.attention.kv_blocks import TileShape
from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.wgmma import WGMMA_M


class Registers(NamedTuple):
    """Registers a thread after setmaxnreg."""

    producer: int
    consumer: int


@dataclass(frozen=True)
class DqSpec:
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
    rising = False

    @property
    def predicated_epilogue(self) -> EpiloguePlan:
        """The epilogue with predicated stores instead of TMA."""
        return replace(self.epilogue, use_tma=False)

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, of 64 query rows each."""
        return self.tile_m // WGMMA_M

    @property
    def clears_each_block(self) -> bool:
        """True where any block of a visit may reach past the end of a packed sequence, not only the first."""
        return self.varlen and self.variant.lists is not None

    @property
    def tile(self) -> TileShape:
        """Queries and keys of one step."""
        return TileShape(self.tile_m, self.tile_n)

    @property
    def threads(self) -> int:
        """Consumer warpgroups and one producer warpgroup."""
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def registers(self) -> Registers:
        """Registers of the roles; 64 K registers serve the SM."""
        if self.ctas_per_sm == 2:
            return Registers(24, 232)
        return {1: Registers(40, 232), 2: Registers(24, 240)}[self.consumers]

    def has_rows(self, at: QueryTile, seq: SeqInfo) -> Boolean:
        """False for a tile past the end of its packed sequence."""
        return at.m * self.tile_m < seq.q_len if self.varlen else Boolean(True)

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
