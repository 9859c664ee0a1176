"""Producer role of the SM90 kernel of dQ by tiles of queries: Q and dO once, then K and V of each step.

    K0 | Q | dO | V0 | K1 | V1 | K2 | V2 ...    as far as stages are empty

V comes after the K of its step, since a stage of V is given back sooner.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.kv_blocks import block_at
from kernels_dsl.blocks.attention.tile_queue import WorkTile
from kernels_dsl.blocks.attention.work import Work, kv_head
from kernels_dsl.blocks.hw.pipeline import producer_state, put

from .backward_sm90_producer import Loads, Rings, tile_loader


class SharedTiles(NamedTuple):
    """Tiles in shared memory."""

    q: cute.Tensor
    """(M, D, 1)"""
    k: cute.Tensor
    """(N, D, stages)"""
    v: cute.Tensor
    """(N, Dv, stages)"""
    do: cute.Tensor
    """(M, Dv, 1)"""
    scratch: cute.Tensor
    """float32 (threads of a warpgroup, consumers), which nobody reads: see `keep_order`"""
    staging: cute.Tensor
    """(64, columns of a subtile, 2, consumers): dQ on its way out, where Q was"""


@cute.jit
def produce(
    spec: cutlass.Constexpr, rings: Rings, loads: Loads, tiles: SharedTiles, work: Work, tile: WorkTile
):
    """Producer warp: the operands of one query tile, in the order of their use."""
    at, seq, visit = tile
    batch, q_start, k_start = at.batch, Int32(0), Int32(0)
    if cutlass.const_expr(spec.varlen):
        batch, q_start, k_start = Int32(0), seq.q_start, seq.k_start
    of_queries, of_keys = (at.head, batch), (kv_head(at.head, work.heads_per_kv), batch)
    load_q = tile_loader(loads.q, tiles.q, (spec.tile_m, spec.dim), q_start, of_queries)
    load_do = tile_loader(loads.do, tiles.do, (spec.tile_m, spec.dim_v), q_start, of_queries)
    load_k = tile_loader(loads.k, tiles.k, (spec.tile_n, spec.dim), k_start, of_keys)
    load_v = tile_loader(loads.v, tiles.v, (spec.tile_n, spec.dim_v), k_start, of_keys)
    k_state, v_state = producer_state(spec.k_stages), producer_state(spec.v_stages)
    block = block_at(spec.variant, visit, at, work.lists, Int32(0))
    k_state = put(rings.k, k_state, partial(load_k, block))
    put(rings.q, producer_state(1), partial(load_q, at.m))
    put(rings.do, producer_state(1), partial(load_do, at.m))
    v_state = put(rings.v, v_state, partial(load_v, block))
    for position in cutlass.range(1, visit.count, unroll=1):
        block = block_at(spec.variant, visit, at, work.lists, position)
        k_state = put(rings.k, k_state, partial(load_k, block))
        v_state = put(rings.v, v_state, partial(load_v, block))
