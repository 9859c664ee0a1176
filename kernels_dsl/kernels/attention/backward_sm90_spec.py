"""Trace-time facts of the SM90 attention backward."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass

from kernels_dsl.blocks.attention.query_blocks import TILES_AT_ONCE
from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.config.attention_backward import SumsOfTile

CONSUMERS = 2
"""Warpgroups that compute dK and dV."""
HEADS_AT_ONCE = 16
"""Heads whose key tiles start side by side, at most: fewer of one head then wait for one another's turn."""


class Registers(NamedTuple):
    """Registers a thread, of each role; `dq` that of the third consumer."""

    producer: int
    consumer: int
    dq: int = 0


@dataclass(frozen=True)
class BackwardSpec:
    """Static facts of one instance; extents in elements."""

    tile_q: int
    tile_k: int
    ctas: int
    """CTAs that share a tile of keys."""
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
    """Queries and columns of dQ that a warpgroup computes at a time."""
    sums_buffers: int
    """Buffers of dQ in shared memory, of each warpgroup that computes it."""
    sums: SumsOfTile
    stores_first: bool
    """The first share of a query tile's dQ is stored, where all others are added."""
    many_tiles: bool
    """A CTA takes tile after tile of keys, in place of one."""
    variant: Any  # AttentionVariant
    gives_q: bool
    gives_kv: bool
    short_probs: bool
    """P is kept with 16 bits for dS."""
    v_registers: int
    """Columns of V that a warpgroup keeps in registers, a multiple of 16."""

    @property
    def row_tile(self) -> int:
        """Query rows whose sums lie together in memory."""
        return self.tile_q

    @property
    def cta_keys(self) -> int:
        """Keys of one CTA."""
        return self.tile_k // self.ctas

    @property
    def roles(self) -> bool:
        """Says whether the consumer warpgroups have the same keys and a product each."""
        return self.cta_keys == WGMMA_M

    @property
    def cluster(self) -> tuple[int, int]:
        """CTAs of a cluster."""
        return self.ctas, 1

    @property
    def consumers(self) -> int:
        """Consumer warpgroups: a third one computes dQ where each has a role."""
        return CONSUMERS + (self.roles and self.gives_q)

    @property
    def from_last(self) -> bool:
        """Says whether the key tiles of a head start, and add to dQ, from the last to the first.

        Under a causal mask a key tile begins at the queries of its diagonal, where none after it adds.
        In this order it is the first to add there, and no tile waits for one that started when it did. Tiles
        that wait for their turn have started after those that they wait for, in either order.
        """
        return self.deterministic and self.variant.right and self.variant.lists is None

    @property
    def tiles_at_once(self) -> int:
        """Key tiles of the heads that start side by side: about as many as a GPU runs at a time.

        Where tiles of a head wait for each other's turn, the last of those that start together waits for all
        others, at first and at the end. Twice as many heads halve that: narrow ones, all of which fit L2.
        """
        chained = self.deterministic and not (self.from_last or self.roles)
        return TILES_AT_ONCE * 2 if chained and self.tile_q > 64 else TILES_AT_ONCE

    @property
    def shares(self) -> int:
        """Warpgroups that compute a share of dQ each."""
        if not self.gives_q:
            return 0
        return 1 if self.roles else CONSUMERS

    @property
    def adders(self) -> int:
        """Warps that add to the sums of dQ, or see to the order: one for each share."""
        return self.shares if self.sums_buffers or self.deterministic else 0

    @property
    def counts_shares(self) -> bool:
        """Says whether shares of dQ are counted: for their order, or since the first is stored, not added."""
        return self.deterministic or self.stores_first

    @property
    def gives_late(self) -> bool:
        """Says whether a warpgroup gives dS once dQ of the block before and dK are issued, which do not need
        it: the fence takes some 150 cycles, and dS is read half a step later at the earliest.

        So where warpgroups add to the sums themselves, as measured on an H200; else dQ has its own fence.
        """
        return self.gives_q and self.short_probs and not (self.roles or self.sums_buffers)

    @property
    def sums_parts(self) -> int:
        """Parts in which a warpgroup hands over its share of dQ."""
        return self.sums.columns // self.dq_share[1]

    @property
    def sums_part(self) -> int:
        """Elements of a part."""
        return self.sums.size // self.sums_parts

    @property
    def staged_sums(self) -> int:
        """Elements of dQ in shared memory, on their way to the sums."""
        return self.shares * self.sums_buffers * self.sums_part

    @property
    def handoff_words(self) -> int:
        """Words of the mbarriers of P and dS on their way to another warpgroup or CTA."""
        return (2 if self.roles else 1) * 2 * self.stages + self.ctas - 1

    @property
    def ds_tiles(self) -> int:
        """Tiles of dS in shared memory: the stages of a ring, and one for what the other CTA sends."""
        return self.stages + self.ctas - 1

    @property
    def handed_elements(self) -> int:
        """Elements of P in shared memory, on their way from one role to another."""
        return self.stages * self.tile_q * self.cta_keys if self.roles else 0

    @property
    def k_stages(self) -> int:
        """Tiles of K in flight: dQ of a tile's last block is computed beside the first of the next one."""
        return 2 if self.many_tiles else 1

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of one step."""
        return self.tile_q, self.tile_k

    @property
    def threads(self) -> int:
        """Consumer warpgroups and a producer."""
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def registers(self) -> Registers:
        """Registers a thread after setmaxnreg."""
        if self.consumers == CONSUMERS:
            return Registers(24, 240)
        return Registers(24, 208, 72)

    @property
    def stats_bytes(self) -> int:
        """Bytes of a query block's log-sum-exp, and as many of its row sums."""
        return self.tile_q * 4

    def columns_at_once(self, columns: int) -> int:
        """Columns of dK or dV that one instruction computes. ptxas assembles none with more accumulators than
        a thread has registers at the launch, 128 of four warpgroups."""
        return min(columns, 128) if columns % 128 == 0 else columns

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a tile of operands."""
        return rows * columns * self.dtype.width // 8


def make_spec(config: Any, variant: Any, dtype: type[cutlass.Numeric], varlen: bool) -> BackwardSpec:
    """Completes an `Sm90BackwardConfig`."""

    # Two buffers a warpgroup would make each store wait for the last.
    room = config.cta_keys * (config.ctas * config.dim + config.dim_v) // CONSUMERS

    def epilogue(columns: int) -> EpiloguePlan:
        part = epilogue_columns(columns, dtype)
        stages = min(4, room // (WGMMA_M * part))
        return EpiloguePlan((WGMMA_M, columns), part, stages, dtype, config.tma_stores)

    return BackwardSpec(
        config.tile_q, config.tile_k, config.ctas, config.dim, config.dim_v, config.stages,
        config.deterministic, varlen, dtype, epilogue(config.dim), epilogue(config.dim_v), config.dq_share,
        config.sums_buffers, config.sums, not config.clears_sums, config.many_tiles, variant, config.gives_q,
        config.gives_kv, config.short_probs, config.v_registers,
    )  # fmt: skip
