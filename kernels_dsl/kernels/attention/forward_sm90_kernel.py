"""Device side of the SM90 forward pass: the kernel that sets up shared memory and hands out roles."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.attention import tile_queue
from kernels_dsl.blocks.attention.work import Work
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import make_tma_ring, sync_after_init
from kernels_dsl.config.attention import TRANSPOSING_WARPS

from .forward_sm90_consumer import consume
from .forward_sm90_deferred import Deferred, transpose_segments
from .forward_sm90_producer import produce
from .forward_sm90_records import Layouts, Loads, Mmas, Output, Rings, Segments, Shared, SharedTiles
from .forward_sm90_spec import ForwardSpec, Spec
from .forward_sm90_transpose import THREADS as TRANSPOSING_THREADS
from .forward_sm90_transpose import transpose_values


@entry_name("attention_sm90")
@cute.kernel
def attention_kernel(
    spec: Spec,
    mmas: Mmas,
    layouts: Layouts,
    loads: Loads,
    output: Output,
    work: Work,
    deferred: Deferred | None,
):
    """Sets up shared memory and mbarriers; then each warpgroup takes its role."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for load in loads:
            cpasync.prefetch_descriptor(load.atom)
        if cutlass.const_expr(output.atom is not None):
            cpasync.prefetch_descriptor(output.atom)
    storage = allocate(spec, layouts)
    rings = make_rings(spec, storage.barriers)
    if cutlass.const_expr(deferred is not None):
        if warp == spec.consumers * 4:
            cpasync.prefetch_descriptor(deferred.load.atom)
            cpasync.prefetch_descriptor(deferred.store.atom)
    queue = None
    if cutlass.const_expr(work.counter is not None):
        listeners = spec.consumers * WARPGROUP_THREADS + (TRANSPOSING_THREADS if spec.raw_stages else 0)
        queue = tile_queue.make_tile_queue(storage.barriers + ring_words(spec), storage.slots, listeners)
    shared = Shared(rings, storage.tiles, queue)
    sync_after_init((1, 1))
    # Programmatic dependent launch: all of the above ran beside the tail of the kernel before this one.
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(deferred is None):
        cute.arch.griddepcontrol_wait()

    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers.producer)
        if warp == spec.consumers * 4:
            produce(spec, shared, loads, work, deferred)
        elif cutlass.const_expr(spec.raw_stages):
            transpose_values(spec, shared, work)
        elif cutlass.const_expr(deferred is not None):
            transpose_segments(spec, deferred, shared, warp - (spec.consumers * 4 + 1))
    else:
        cute.arch.setmaxregister_increase(spec.registers.consumer)
        consume(spec, shared, mmas, output, work, group)


def make_rings(spec: ForwardSpec, barriers: cute.Pointer) -> Rings:
    """Initialises the mbarriers of all rings. The caller syncs."""
    consumer_warps = spec.consumers * 4

    def ring(stages: int, stage_bytes: int, releasing_warps: int, arrivals: int = 0):
        nonlocal barriers
        made = make_tma_ring(barriers, stages, stage_bytes, releasing_warps, (1, 1), arrivals)
        barriers += 2 * stages
        return made

    return Rings(
        q=ring(spec.q_stages, spec.q_bytes, consumer_warps),
        k=ring(spec.stages, spec.k_bytes, consumer_warps),
        v=ring(spec.stages, spec.v_bytes, consumer_warps, TRANSPOSING_WARPS - 1 if spec.raw_stages else 0),
        raw_v=ring(spec.raw_stages, spec.v_bytes, TRANSPOSING_WARPS) if spec.raw_stages else None,
        segments=ring(TRANSPOSING_WARPS, spec.deferred_keys * spec.dim_v, 1)
        if spec.deferred_shares
        else None,
    )


def ring_words(spec: ForwardSpec) -> int:
    """8-byte words for mbarriers of `make_rings`."""
    segments = TRANSPOSING_WARPS if spec.deferred_shares else 0
    return 2 * (spec.q_stages + 2 * spec.stages + spec.raw_stages + segments)


class Storage(NamedTuple):
    """Shared memory of a CTA."""

    barriers: cute.Pointer
    """8-byte words for mbarriers: those of the rings of TMA, then those of the tile queue."""
    slots: cute.Pointer
    """Slots of the tile queue."""
    tiles: SharedTiles


def allocate(spec: ForwardSpec, layouts: Layouts) -> Storage:
    """Allocates shared memory.

    With `stage_in_q` a warpgroup's output is staged in the first columns of its own rows of Q.
    """
    tile_slots = tile_queue.WORDS * tile_queue.STAGES
    warps = TRANSPOSING_WARPS if spec.deferred_shares else 0
    words = ring_words(spec) + 2 * tile_queue.STAGES
    segment_size = warps * spec.deferred_keys * spec.dim_v
    raw_size = spec.raw_stages * spec.v_bytes
    o_size = 0 if spec.stage_in_q else cute.cosize(layouts.o) * spec.consumers

    @cute.struct
    class SharedStorage:
        barriers: cute.struct.MemRange[cutlass.Int64, words]
        slots: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, tile_slots], 16]
        q: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.q)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.k)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts.v)], 1024]
        o: cute.struct.Align[cute.struct.MemRange[spec.out_dtype, o_size], 1024]
        raw_v: cute.struct.Align[cute.struct.MemRange[spec.dtype, raw_size], 1024]
        raw_segments: cute.struct.Align[cute.struct.MemRange[spec.dtype, segment_size], 1024]
        transposed: cute.struct.Align[cute.struct.MemRange[spec.dtype, segment_size], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)

    def tensor(memory, layout: cute.ComposedLayout) -> cute.Tensor:
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    segments = None
    if layouts.segments is not None:
        segments = Segments(
            tensor(storage.raw_segments, layouts.segments.raw),
            tensor(storage.transposed, layouts.segments.transposed),
        )
    raw_v = None if layouts.raw_v is None else tensor(storage.raw_v, layouts.raw_v)
    warpgroups = cute.make_layout(spec.consumers, stride=cute.cosize(layouts.o))
    staging = cute.append(layouts.o.outer, warpgroups)
    tiles = SharedTiles(
        tensor(storage.q, layouts.q),
        tensor(storage.k, layouts.k),
        tensor(storage.v, layouts.v),
        (storage.q if spec.stage_in_q else storage.o).get_tensor(staging, swizzle=layouts.o.inner),
        raw_v,
        segments,
    )
    return Storage(storage.barriers.data_ptr(), storage.slots.data_ptr(), tiles)
