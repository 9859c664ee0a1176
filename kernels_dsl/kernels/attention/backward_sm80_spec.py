"""Trace-time facts of the SM80-class attention backward."""

from dataclasses import dataclass
from typing import Any

import cutlass

from kernels_dsl.blocks.hw.swizzled_rows import RowsTile
from kernels_dsl.config.attention_backward import Sm80BackwardConfig, SumsOfTile


@dataclass(frozen=True)
class BackwardSpec:
    """Static facts of one instance; extents in elements, offsets in bytes of shared memory."""

    config: Sm80BackwardConfig
    dtype: type[cutlass.Numeric]
    variant: Any  # AttentionVariant
    varlen: bool
    """Packed sequences."""

    from_last = False
    """Key tiles start from the first to the last: the other order takes registers that are not there."""

    @property
    def tile_q(self) -> int:
        """Queries of a step."""
        return self.config.tile_q

    @property
    def tile_k(self) -> int:
        """Keys of a CTA."""
        return self.config.tile_k

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of one step."""
        return self.tile_q, self.tile_k

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.config.warps

    @property
    def warp_keys(self) -> int:
        """Keys of a warp."""
        return self.config.warp_keys

    @property
    def key_warps(self) -> int:
        """Warps that share the keys."""
        return self.tile_k // self.warp_keys

    @property
    def score_warps(self) -> int:
        """Warps that compute P; where columns are shared, as many others compute dS."""
        halves = self.config.by_columns or self.config.by_gradients
        return self.config.warps // 2 if halves else self.config.warps

    @property
    def query_warps(self) -> int:
        """Warps that have the same keys and share the queries of a step: 1 or 2."""
        return self.score_warps // self.key_warps

    @property
    def column_warps(self) -> int:
        """Warps that have the same keys and share the columns of dK and dV, 16 at a time."""
        return self.config.warps // self.key_warps if self.config.by_columns else 1

    @property
    def row_tile(self) -> int:
        """Query rows whose sums lie together in memory."""
        return self.config.row_tile

    @property
    def row_parts(self) -> int:
        """Steps of one tile of rows whose sums lie together in memory."""
        return self.config.row_tile // self.tile_q

    @property
    def warp_queries(self) -> int:
        """Queries of a warp in a step."""
        return self.tile_q // self.query_warps

    @property
    def all_queries(self) -> range:
        """Numbers of a warp's queries of a step."""
        return range(self.warp_queries)

    @property
    def passes(self) -> list[range]:
        """The same, of each pass."""
        count = self.warp_queries // self.config.passes
        return [range(first, first + count) for first in range(0, self.warp_queries, count)]

    @property
    def dq_column_warps(self) -> int:
        """Warps that share the columns of dQ, 16 at a time: four where a column block has as many."""
        return min(self.q_tile.width // 16, self.config.warps // 2)

    @property
    def dq_rows(self) -> int:
        """Queries of a warp's part of dQ."""
        return self.tile_q * self.dq_column_warps // self.config.warps

    @property
    def dq_columns(self) -> int:
        """Columns of a warp's part of dQ."""
        return self.config.dim // self.dq_column_warps

    @property
    def sums(self) -> SumsOfTile:
        """Order of the sums of dQ."""
        return self.config.sums

    @property
    def one_barrier(self) -> bool:
        """Says whether a step has no barrier before its first product, which needs two buffers of all that it
        reads."""
        return self.config.copies_ahead

    @property
    def finds_places(self) -> bool:
        """Says whether a warp finds its places anew in each step, which its accumulators leave no registers
        for."""
        return self.config.by_columns and self.warp_keys == 32

    @property
    def k_tile(self) -> RowsTile:
        """K (keys, D)."""
        return RowsTile(self.tile_k, self.config.dim)

    @property
    def v_tile(self) -> RowsTile:
        """V (keys, Dv)."""
        return RowsTile(self.tile_k, self.config.dim_v)

    @property
    def q_tile(self) -> RowsTile:
        """One buffer of Q (queries, D)."""
        return RowsTile(self.tile_q, self.config.dim)

    @property
    def do_tile(self) -> RowsTile:
        """One buffer of dO (queries, Dv)."""
        return RowsTile(self.tile_q, self.config.dim_v)

    @property
    def ds_tile(self) -> RowsTile:
        """One buffer of dS^T (keys, queries)."""
        return RowsTile(self.tile_k, self.tile_q)

    @property
    def rows_bytes(self) -> int:
        """Bytes of a float32 number for each query of a step."""
        return 4 * self.tile_q

    @property
    def v_offset(self) -> int:
        """Offset of V; K lies before it."""
        return self.k_tile.bytes

    @property
    def q_offset(self) -> int:
        """Offset of the buffers of Q."""
        return self.v_offset + self.v_tile.bytes

    @property
    def do_offset(self) -> int:
        """Offset of the buffers of dO."""
        return self.q_offset + self.config.q_stages * self.q_tile.bytes

    @property
    def ds_offset(self) -> int:
        """Offset of the buffers of dS."""
        return self.do_offset + self.config.do_stages * self.do_tile.bytes

    @property
    def lse_offset(self) -> int:
        """Offset of the buffers of the log-sum-exp, as many as of Q."""
        return self.ds_offset + self.config.ds_stages * self.ds_tile.bytes

    @property
    def row_sums_offset(self) -> int:
        """Offset of the buffers of the row sums, as many as of dO."""
        return self.lse_offset + self.config.q_stages * self.rows_bytes


def make_spec(
    config: Sm80BackwardConfig, variant: Any, dtype: type[cutlass.Numeric], varlen: bool
) -> BackwardSpec:
    """Completes a configuration. ValueError names what does not fit."""
    keys = config.warps * config.warp_keys
    least = 2 * config.tile_k if config.by_columns or config.by_gradients else config.tile_k
    allowed = (least,) if config.by_gradients else (least, 2 * least)
    if config.warp_keys not in (16, 32) or keys not in allowed:
        raise ValueError(
            f"tile_k is {config.tile_k} for {config.warps} warps with {config.warp_keys} keys each; it must "
            "be all of their keys or half of them (half or a quarter by columns), 16 or 32 keys for each"
        )
    if not 1 <= config.do_stages <= config.q_stages <= 2:
        raise ValueError(
            f"q_stages and do_stages are {config.q_stages} and {config.do_stages}, must be 1 or 2, and of dO "
            "not more than of Q"
        )
    if config.by_gradients and (config.dim != config.dim_v or not config.copies_ahead or config.warps != 8):
        raise ValueError(
            f"dim and dim_v are {config.dim} and {config.dim_v}; with a gradient for each warp they must be "
            "equal, with eight warps and two buffers of Q and dO"
        )
    spec = BackwardSpec(config, dtype, variant, varlen)
    if spec.warp_queries % (16 * config.passes):
        raise ValueError(
            f"passes is {config.passes}, must part a warp's {spec.warp_queries} queries by multiples of 16"
        )
    for tile in (spec.k_tile, spec.v_tile, spec.q_tile, spec.do_tile):
        tile.check_threads(spec.threads)
    return spec
