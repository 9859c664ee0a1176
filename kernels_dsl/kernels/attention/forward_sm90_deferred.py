"""Transposing role of the SM90 attention with fp8 operands, for launches of many tiles: V of later heads.

fp8 WGMMA reads V along the keys. A kernel before the attention transposes V of the first heads, whose tiles
come first. The three warps of each producer warpgroup that issue no TMA share that of the others meanwhile: a
warp has TMA load a segment of the keys of a head, turns it from one buffer in shared memory to another, has
TMA store it, and counts it in global memory; a producer whose tile is of these heads waits, once in a launch,
until all are counted.

Segments are claimed one by one, so that CTAs need not all run at the same time. Numbers are 0 before the
launch and after it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import staged_smem_layout
from kernels_dsl.config.attention import LATER_NUMBERS, LATER_SHARES

from .forward_sm90_transpose import WARPS, turn_block

ROLES = WARPS + 1
"""Warps of a CTA that leave at the end."""
CLAIMED, THERE, LEFT = range(3)
"""Numbers: segments that are claimed, segments that are there, warps that have left."""


class Later(NamedTuple):
    """V as it comes and transposed, and what says how far the transpose is."""

    load: tuple
    """(atom, coordinates) of V (keys, Dv, Hk, B)."""
    store: tuple
    """(atom, coordinates) of V transposed (Dv, keys, Hk, B)."""
    numbers: cute.Tensor
    """int32 (LATER_NUMBERS,)."""
    heads: Int32
    """Of a sequence."""
    first: Int32
    """Heads, of all sequences, that are there before."""
    segments: Int32
    """Of a head."""
    size: Int32
    """Segments in all."""


def first_heads(kv_heads: Int32, shares: int) -> Int32:
    """How many of the heads of V of all sequences are transposed before: so many LATER_SHARES-ths."""
    return (kv_heads * shares + LATER_SHARES - 1) // LATER_SHARES


def later_layouts(spec) -> tuple:
    """Layouts in shared memory of segments: as they come (keys, Dv, WARPS), transposed (Dv, keys, WARPS)."""
    return tuple(
        staged_smem_layout(spec.dtype, shape, WARPS, OperandMajorMode.K)
        for shape in ((spec.later_keys, spec.dim_v), (spec.dim_v, spec.later_keys))
    )


def describe_later(
    spec, values: cute.Tensor, turned: cute.Tensor, numbers: cute.Tensor, layouts: tuple
) -> Later:
    """For V (keys, Dv, Hk, B) and V transposed (Dv, keys, Hk, B)."""
    keys, _, heads, batch = values.shape
    first, segments = first_heads(heads * batch, spec.later_v), cute.ceil_div(keys, spec.later_keys)
    return Later(
        tma.make_load_atom(values, layouts[0], (spec.later_keys, spec.dim_v)),
        tma.make_store_atom(turned, layouts[1], (spec.dim_v, spec.later_keys)),
        numbers,
        heads,
        first,
        segments,
        (heads * batch - first) * segments,
    )


@cute.jit
def turn_later(
    spec: cutlass.Constexpr,
    later: Later,
    ring: pipeline.PipelineTmaAsync,
    buffers: tuple,
    warp: Int32,
):
    """Warp number `warp` of those that transpose: segments as long as there are some.

    `ring` has a stage a warp, of which it is both sides; `buffers` are of `later_layouts`.
    """
    lane = cute.arch.lane_idx()
    shape = cutlass.const_expr((spec.later_keys, spec.dim_v))
    source, target = (buffer.iterator.toint() + warp * (shape[0] * shape[1]) for buffer in buffers)
    state = pipeline.PipelineState(WARPS, Int32(0), warp, Int32(0))
    item = claim(later)
    while item < later.size:
        number = item // later.segments
        segment = item - number * later.segments
        number = number + later.first
        batch = number // later.heads
        place = (number - batch * later.heads, batch)
        ring.sync_object_full.arrive(state.index, None)
        load_segment(spec, later, buffers[0], place, (segment, warp), ring.producer_get_barrier(state))
        item = claim(later)  # while that one comes
        ring.consumer_wait(state)
        turn_block(shape, source, target, lane, 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        store_segment(spec, later, buffers[1], place, (segment, warp))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")  # TMA of others will read what this one's has written
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.atomic_add(later.numbers.iterator + THERE, Int32(1), sem="release", scope="gpu")
        state = pipeline.PipelineState(WARPS, state.count, state.index, state.phase ^ 1)
    leave(later)


def load_segment(spec, later: Later, buffers: cute.Tensor, place: tuple, at: tuple, barrier) -> None:
    """at: segment of the head at `place` (head, batch), and buffer."""
    atom, values = later.load
    tiles = cute.local_tile(values[None, None, place[0], place[1]], (spec.later_keys, spec.dim_v), (None, 0))
    t_s, t_g = tma.load_partition(atom, tiles, buffers, cute.make_layout(1), Int32(0))
    tma.tile_loader(atom, t_g, t_s, None)(at[0], at[1], barrier)


def store_segment(spec, later: Later, buffers: cute.Tensor, place: tuple, at: tuple) -> None:
    """As `load_segment`."""
    atom, turned = later.store
    tiles = cute.local_tile(turned[None, None, place[0], place[1]], (spec.dim_v, spec.later_keys), (0, None))
    t_s, t_g = tma.load_partition(atom, tiles, buffers, cute.make_layout(1), Int32(0))
    cute.copy(atom, t_s[None, at[1]], t_g[None, at[0]])


@cute.jit
def claim(later: Later) -> Int32:
    """The next segment, the same in all lanes."""
    item = Int32(0)
    if cute.arch.lane_idx() == 0:
        item = cute.arch.atomic_add(later.numbers.iterator + CLAIMED, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(item, 0))


@cute.jit
def await_values(later: Later, head: Int32, batch: Int32, there: cutlass.Boolean) -> cutlass.Boolean:
    """Returns once V of this head is there. One warp, all lanes.

    `there`, and what is returned: V of all heads is there and this warp has seen it.
    """
    if not there and batch * later.heads + head >= later.first:
        count = later.numbers.iterator + THERE
        while cute.arch.load(count, Int32, sem="acquire", scope="gpu") < later.size:
            pass
        cute.arch.fence_proxy("async.global")
        there = cutlass.Boolean(True)
    return there


@cute.jit
def leave(later: Later):
    """A warp of ROLES has read or written its last number; the last of all CTAs clears them."""
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(later.numbers.iterator + LEFT, Int32(1), sem="acq_rel", scope="gpu")
        if before == ROLES * cute.arch.grid_dim()[0] - 1:
            for i in cutlass.range_constexpr(LATER_NUMBERS):
                later.numbers[i] = Int32(0)
