"""Trace-time facts of the SM90 forward kernel, from its configuration and operand types."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import Boolean
from cutlass.cute.nvgpu import OperandMajorMode

from kernels_dsl.blocks.attention.kv_blocks import RightEdge, TileShape
from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.blocks.mainloop.operand_ring import BARRIER_BYTES, SMEM_BYTES
from kernels_dsl.config.attention import (
    DESCALE_KEYS,
    PACKS,
    TRANSPOSING_WARPS,
    AttentionVariant,
    Sm90AttentionConfig,
)


class Registers(NamedTuple):
    """Registers a thread after setmaxnreg."""

    producer: int
    consumer: int


class QueryTileSpec:
    """Facts that follow from others, of an instance whose CTAs each keep a tile of queries."""

    tile_m: int
    tile_n: int
    joined: int
    pack: int
    varlen: bool
    epilogue: EpiloguePlan
    variant: AttentionVariant

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

    def has_rows(self, at: QueryTile, seq: SeqInfo) -> Boolean:
        """False for a tile past the end of its packed sequence."""
        return at.m * self.tile.queries < seq.q_len if self.varlen else Boolean(True)

    @property
    def threads(self) -> int:
        """Consumer warpgroups and one producer warpgroup."""
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def tile(self) -> TileShape:
        """Queries and keys of one step."""
        return TileShape(self.tile_m // self.pack, self.tile_n // self.joined, self.joined)


@dataclass(frozen=True)
class ForwardSpec(QueryTileSpec):
    """Static facts of one instance; extents in elements. Fields of the configuration are explained there."""

    tile_m: int
    tile_n: int
    dim: int
    dim_v: int
    q_stages: int
    stages: int
    """Steps of K in shared memory."""
    pingpong: bool
    lazy_rescale: bool
    late_wait: bool
    no_max: bool
    """`watch_sums` of the configuration."""
    linear_exps: int
    ctas_per_sm: int
    joined: int
    """Listed key blocks that a step takes side by side."""
    pack: int
    """Query heads whose rows share a tile: row r is query r // pack of head r % pack."""
    varlen: bool
    """Packed sequences."""
    stage_in_q: bool
    """The output is staged in Q's memory: there is no room elsewhere. Costs the overlap with the next Q."""
    dtype: type[cutlass.Numeric]
    out_dtype: type[cutlass.Numeric]
    epilogue: EpiloguePlan
    variant: AttentionVariant
    scales_by_block: bool = False
    """fp8 K or V have a factor a block of keys."""
    deferred_shares: int = 0
    """`later_v` of the configuration: shares of V's heads whose transpose is not deferred; 0: nothing is."""
    deferred_keys: int = 0
    """`later_keys` of the configuration: keys of a segment."""
    raw_stages: int = 0
    """Blocks of V in shared memory before they are transposed; 0: V arrives transposed."""

    @property
    def right_edge(self) -> RightEdge:
        """Place in the walk of the blocks that the mask's right edge cuts.

        Where sums are watched the leftmost is first: there a causal mask leaves every row a key, and a row
        without one in its first block takes another reference in its next. LAST where that was measured to be
        faster: a warpgroup that sees nothing of the last blocks is done earlier.
        """
        if not self.no_max or self.varlen:
            return RightEdge.FALLING
        tall = self.consumers == 3 and self.dim_v == 128
        causal = self.variant.right and not self.variant.left and self.variant.lists is None
        return RightEdge.LAST if tall and causal else RightEdge.RISING

    @property
    def skips_rows(self) -> bool:
        """True where a warpgroup without a row in a tile skips its products."""
        return self.consumers > 1 and self.dtype.width == 8 and not self.varlen

    @property
    def v_major(self) -> OperandMajorMode:
        """Contiguous mode of V in shared memory: fp8 WGMMA reads both operands along the keys."""
        return OperandMajorMode.K if self.dtype.width == 8 else OperandMajorMode.MN

    @property
    def loaded_v_stages(self) -> int:
        """Stages of the ring of V that TMA fills."""
        return self.raw_stages or self.stages

    @property
    def q_bytes(self) -> int:
        """Bytes of a query tile in shared memory, as TMA announces them."""
        return self.tile_m * self.dim * self.dtype.width // 8

    @property
    def k_bytes(self) -> int:
        """Bytes of one stage of K."""
        return self.tile_n * self.dim * self.dtype.width // 8

    @property
    def v_bytes(self) -> int:
        """Bytes of one stage of V."""
        return self.tile_n * self.dim_v * self.dtype.width // 8

    @property
    def registers(self) -> Registers:
        """Registers of the roles; 64 K registers serve the SM."""
        if self.ctas_per_sm == 2:
            return Registers(24, 232)
        if self.raw_stages:
            return Registers(40, 232)
        return {1: Registers(40, 232), 2: Registers(24, 240), 3: Registers(32, 160)}[self.consumers]


Spec = cutlass.Constexpr[ForwardSpec]
"""A `ForwardSpec` as a parameter of device functions."""


def make_spec(
    config: Sm90AttentionConfig,
    variant: AttentionVariant,
    dtype: type[cutlass.Numeric],
    out_dtype: type[cutlass.Numeric],
    varlen: bool,
    scales_by_block: bool = False,
) -> ForwardSpec:
    """Completes a configuration for operands of `dtype`. ValueError names what does not fit."""
    if dtype.width == 8 and (config.tile_n % 32 or config.lazy_rescale):
        raise ValueError(f"with fp8, tile_n must be a multiple of 32, without lazy_rescale; it is {config}")
    if config.watch_sums and (dtype.width != 8 or scales_by_block or variant.sinks):
        raise ValueError(f"watch_sums is for fp8 without sinks and factors a block of keys; it is {config}")
    if scales_by_block and DESCALE_KEYS % config.tile_n:
        raise ValueError(f"tile_n must divide {DESCALE_KEYS}, of which a factor is; it is {config.tile_n}")
    if config.tile_m not in (64, 128, 192):
        raise ValueError(f"tile_m must be 64, 128 or 192; it is {config.tile_m}")
    if config.tile_n % 16 or not 16 <= config.tile_n <= 256:
        raise ValueError(f"tile_n must be a multiple of 16 from 16 to 256; it is {config.tile_n}")
    if config.pack not in PACKS or (config.pack > 1 and not variant.packable):
        raise ValueError(f"pack must be one of {PACKS}, and 1 with masks by head; it is {config.pack}")
    width = dtype.width // 8
    consumers = config.tile_m // WGMMA_M
    raw_stages = 0
    if config.turns_v:
        if dtype.width != 8 or varlen or consumers > 2 or config.ctas_per_sm > 1:
            raise ValueError(f"turns_v is for fp8, dense, tile_m up to 128, one CTA an SM; it is {config}")
        raw_stages = 2 if config.dim_v <= 128 else 1
    epi_n = epilogue_columns(config.dim_v, out_dtype)
    if dtype.width == 8 and consumers == 3 and config.dim_v == 128:
        epi_n = 64  # two subtiles, not four: as measured with 192 x 96
    if config.joined > 1 and (
        dtype.width == 8 or variant.lists is None or config.tile_n % (16 * config.joined)
    ):
        raise ValueError(
            "joined must be 1 with fp8 and without lists, and divide tile_n into multiples of 16; it is "
            f"{config}"
        )
    tiles = config.tile_m * config.dim
    tiles += config.tile_n * config.stages * (config.dim + config.dim_v)
    tiles += raw_stages * config.tile_n * config.dim_v
    if config.later_v:
        if dtype.width != 8 or varlen or consumers != 3:
            raise ValueError(f"later_v is for fp8, dense, tile_m 192; it is {config}")
        tiles += 2 * TRANSPOSING_WARPS * config.later_keys * config.dim_v
    if config.ctas_per_sm not in (1, 2) or (config.ctas_per_sm == 2 and consumers > 1):
        raise ValueError(f"ctas_per_sm must be 1, or 2 with tile_m 64; it is {config.ctas_per_sm}")
    # The SM keeps 1 KB for itself of each CTA's share.
    share = SMEM_BYTES if config.ctas_per_sm == 1 else (SMEM_BYTES - 1024) // 2
    room = share - BARRIER_BYTES - tiles * width
    if room < 0:
        raise ValueError(f"{config} needs {-room} bytes of shared memory more than there are")
    q_bytes = config.tile_m * config.dim * width
    epi_bytes = consumers * WGMMA_M * epi_n * out_dtype.width // 8
    q_stages = 2 if room >= q_bytes + 2 * epi_bytes else 1
    epi_stages = min(4, (room - (q_stages - 1) * q_bytes) // epi_bytes)
    stage_in_q = epi_stages < 2
    if stage_in_q:
        # Two buffers of 64 x epi_n are as large as 64 rows of one 128-byte column of swizzled Q.
        if config.dim % 64 or dtype.width == 8:
            raise ValueError(f"{config} leaves {room} bytes of shared memory for the output: too few")
        epi_stages = 2
    once = config.dim_v // epi_n <= epi_stages
    plan = EpiloguePlan((WGMMA_M, config.dim_v), epi_n, epi_stages, out_dtype, config.o_tma, fills_once=once)
    return ForwardSpec(
        config.tile_m, config.tile_n, config.dim, config.dim_v, q_stages=q_stages, stages=config.stages,
        joined=config.joined, pingpong=config.pingpong and consumers > 1,
        lazy_rescale=config.lazy_rescale, late_wait=config.late_wait, no_max=config.watch_sums,
        linear_exps=config.linear_exps,
        ctas_per_sm=config.ctas_per_sm, pack=config.pack, varlen=varlen, stage_in_q=stage_in_q,
        dtype=dtype, out_dtype=out_dtype, epilogue=plan, variant=variant, scales_by_block=scales_by_block,
        raw_stages=raw_stages, deferred_shares=config.later_v, deferred_keys=config.later_keys,
    )  # fmt: skip
