"""Deferred transpose of V beside the SM90 forward kernel with fp8 operands, for launches of many tiles.

fp8 WGMMA reads V along the keys. A kernel before the attention transposes V of the first heads, whose tiles
come first. The three warps of each producer warpgroup that issue no TMA share the transpose of the others
meanwhile: a warp has TMA load a segment of the keys of a head, transposes it from one buffer in shared memory
to another, has TMA store it, and counts it in global memory. A producer whose tile is of these heads waits,
once in a launch, until all segments are counted:

    kernel before     | V of the first heads |
    transposing warps                        | segments of the other heads ...            | leave
    TMA, consumers                           | tiles of the first heads ... | wait for all | other tiles ...

Segments are claimed one by one, so that CTAs need not all run at the same time. Counters are 0 before the
launch and after it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.barriers import fence_for_async_readers
from kernels_dsl.blocks.hw.layouts import staged_smem_layout
from kernels_dsl.blocks.hw.tma import TmaCopy
from kernels_dsl.config.attention import LATER_NUMBERS, LATER_SHARES, TRANSPOSING_WARPS

from .forward_sm90_records import SegmentLayouts, Shared
from .forward_sm90_spec import ForwardSpec, Spec
from .forward_sm90_transpose import BlockShape, transpose_block

ROLES = TRANSPOSING_WARPS + 1
"""Warps of a CTA that leave at the end."""
CLAIMED, DONE, LEFT = range(3)
"""Counters: segments that are claimed, segments that are transposed, warps that have left."""


class DeferredValues(NamedTuple):
    """Tensors in global memory for a deferred transpose."""

    values: cute.Tensor
    """V (keys, Dv, Hk, B), contiguous along Dv."""
    counters: cute.Tensor
    """int32 (LATER_NUMBERS,), 0."""


class Deferred(NamedTuple):
    """V and its transpose in global memory, and the progress of the one to the other."""

    load: TmaCopy
    """Coordinates (keys, Dv, Hk, B) of V."""
    store: TmaCopy
    """Coordinates (Dv, keys, Hk, B) of V transposed."""
    counters: cute.Tensor
    """int32 (LATER_NUMBERS,)."""
    heads: Int32
    """Heads of a sequence."""
    first: Int32
    """Heads, of all sequences, that are transposed before."""
    segments: Int32
    """Segments of a head."""
    size: Int32
    """Segments in all."""


class Segment(NamedTuple):
    """Some keys of one head of V."""

    head: Int32
    batch: Int32
    number: Int32
    """Of the segment in its head."""


def first_heads(kv_heads: Int32, shares: int) -> Int32:
    """Heads of V of all sequences that are transposed before: so many LATER_SHARES-ths."""
    return (kv_heads * shares + LATER_SHARES - 1) // LATER_SHARES


def segment_layouts(spec: ForwardSpec) -> SegmentLayouts:
    """Layouts in shared memory of segments, one a warp."""
    shapes = (spec.deferred_keys, spec.dim_v), (spec.dim_v, spec.deferred_keys)
    return SegmentLayouts(
        *(staged_smem_layout(spec.dtype, shape, TRANSPOSING_WARPS, OperandMajorMode.K) for shape in shapes)
    )


def describe_deferred(
    spec: ForwardSpec,
    raw: DeferredValues,
    transposed: cute.Tensor,  # (Dv, keys, Hk, B)
    layouts: SegmentLayouts,
) -> Deferred:
    """The deferred part of the transpose of V."""
    keys, _, heads, batch = raw.values.shape
    first, segments = (
        first_heads(heads * batch, spec.deferred_shares),
        cute.ceil_div(keys, spec.deferred_keys),
    )
    return Deferred(
        tma.make_load_atom(raw.values, layouts.raw, (spec.deferred_keys, spec.dim_v)),
        tma.make_store_atom(transposed, layouts.transposed, (spec.dim_v, spec.deferred_keys)),
        raw.counters,
        heads,
        first,
        segments,
        (heads * batch - first) * segments,
    )


@cute.jit
def transpose_segments(spec: Spec, deferred: Deferred, shared: Shared, warp: Int32):
    """Transposes segments as long as there are some; `warp` is the number among those that transpose."""
    ring, buffers = shared.rings.segments, shared.tiles.segments
    lane = cute.arch.lane_idx()
    shape = cutlass.const_expr(BlockShape(spec.deferred_keys, spec.dim_v))
    source, target = (buffer.iterator.toint() + warp * (shape.keys * shape.columns) for buffer in buffers)
    state = pipeline.PipelineState(TRANSPOSING_WARPS, Int32(0), warp, Int32(0))
    item = claim(deferred)
    while item < deferred.size:
        number = item // deferred.segments
        segment = item - number * deferred.segments
        number = number + deferred.first
        batch = number // deferred.heads
        at = Segment(number - batch * deferred.heads, batch, segment)
        ring.sync_object_full.arrive(state.index, None)
        load_segment(spec, deferred, buffers.raw, at, warp, ring.producer_get_barrier(state))
        item = claim(deferred)  # while that one arrives
        ring.consumer_wait(state)
        transpose_block(shape, source, target, lane, 32)
        fence_for_async_readers()
        cute.arch.sync_warp()
        store_segment(spec, deferred, buffers.transposed, at, warp)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")  # TMA of other CTAs will read what this one's has written
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.atomic_add(deferred.counters.iterator + DONE, Int32(1), sem="release", scope="gpu")
        state = pipeline.PipelineState(TRANSPOSING_WARPS, state.count, state.index, state.phase ^ 1)
    leave(deferred)


def load_segment(
    spec: ForwardSpec,
    deferred: Deferred,
    buffers: cute.Tensor,
    at: Segment,
    warp: Int32,
    barrier: cute.Pointer,
) -> None:
    """Has TMA load a segment to the buffer of `warp`."""
    atom, values = deferred.load
    tiles = cute.local_tile(
        values[None, None, at.head, at.batch], (spec.deferred_keys, spec.dim_v), (None, 0)
    )
    t_s, t_g = tma.load_partition(atom, tiles, buffers, cute.make_layout(1), Int32(0))
    tma.tile_loader(atom, t_g, t_s, None)(at.number, warp, barrier)


def store_segment(
    spec: ForwardSpec, deferred: Deferred, buffers: cute.Tensor, at: Segment, warp: Int32
) -> None:
    """Has TMA store a transposed segment from the buffer of `warp`."""
    atom, transposed = deferred.store
    tiles = cute.local_tile(
        transposed[None, None, at.head, at.batch], (spec.dim_v, spec.deferred_keys), (0, None)
    )
    t_s, t_g = tma.load_partition(atom, tiles, buffers, cute.make_layout(1), Int32(0))
    cute.copy(atom, t_s[None, warp], t_g[None, at.number])


@cute.jit
def claim(deferred: Deferred) -> Int32:
    """The next segment, the same in all lanes."""
    item = Int32(0)
    if cute.arch.lane_idx() == 0:
        item = cute.arch.atomic_add(
            deferred.counters.iterator + CLAIMED, Int32(1), sem="relaxed", scope="gpu"
        )
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(item, 0))


@cute.jit
def await_values(deferred: Deferred, head: Int32, batch: Int32, all_done: Boolean) -> Boolean:
    """Returns once V of this head is transposed. One warp, all lanes.

    `all_done`, and the result: V of all heads is transposed, and this warp has seen it.
    """
    if not all_done and batch * deferred.heads + head >= deferred.first:
        count = deferred.counters.iterator + DONE
        while cute.arch.load(count, Int32, sem="acquire", scope="gpu") < deferred.size:
            pass
        cute.arch.fence_proxy("async.global")
        all_done = cutlass.Boolean(True)
    return all_done


@cute.jit
def leave(deferred: Deferred):
    """Counts a warp of ROLES that is done with the counters; the last one of all CTAs clears them."""
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(deferred.counters.iterator + LEFT, Int32(1), sem="acq_rel", scope="gpu")
        if before == ROLES * cute.arch.grid_dim()[0] - 1:
            for i in cutlass.range_constexpr(LATER_NUMBERS):
                deferred.counters[i] = Int32(0)
