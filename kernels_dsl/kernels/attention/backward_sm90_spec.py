"""Trace-time facts of the SM90 attention backward."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass

from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.config.attention_backward import SumsOfTile

CONSUMERS = 2
"""Warpgroups that compute dK and dV."""


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

    @property
    def row_tile(self) -> int:
        """Query rows whose sums lie together in memory."""
        return self.tile_q

    @property
    def roles(self) -> bool:
        """Says whether the consumer warpgroups have the same keys and a product each."""
        return self.tile_k == WGMMA_M

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
    def heads_at_once(self) -> int:
        """Heads whose key tiles start side by side: fewer of one head then wait for one another's turn."""
        return 1 if self.roles else 4

    @property
    def stages_sums(self) -> bool:
        """Says whether a warp adds dQ to the sums out of shared memory, see `backward_sm90_sums`."""
        return self.gives_q and not self.roles

    @property
    def adders(self) -> int:
        """Warps that add to the sums of dQ, or see to the order: one for each warpgroup that computes dQ."""
        if not self.gives_q:
            return 0
        return CONSUMERS if self.stages_sums else int(self.deterministic)

    @property
    def staged_sums(self) -> int:
        """Elements of dQ in shared memory, on their way to the sums."""
        return CONSUMERS * self.sums.size if self.stages_sums else 0

    @property
    def handoff_words(self) -> int:
        """Words of the mbarriers of P and dS on their way to another warpgroup."""
        return (2 if self.roles else 1) * 2 * self.stages

    @property
    def handed_elements(self) -> int:
        """Elements of P in shared memory, on their way from one role to another."""
        return self.stages * self.tile_q * self.tile_k if self.roles else 0

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

    def epilogue(columns: int) -> EpiloguePlan:
        return EpiloguePlan((WGMMA_M, columns), epilogue_columns(columns, dtype), 2, dtype, config.tma_stores)

    return BackwardSpec(
        config.tile_q, config.tile_k, config.dim, config.dim_v, config.stages, config.deterministic, varlen,
        dtype, epilogue(config.dim), epilogue(config.dim_v), config.dq_share, config.sums, variant,
        config.gives_q, config.gives_kv,
    )  # fmt: skip
