"""Device side of the SM90 attention: the kernel that sets up shared memory and hands out roles."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.attention import tile_queue
from kernels_dsl.blocks.attention.tile_queue import make_slots, make_tile_ring
from kernels_dsl.blocks.attention.work import Work
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import make_tma_ring, sync_after_init

from . import forward_sm90_transpose as turning
from .forward_sm90_consumer import consume
from .forward_sm90_deferred import turn_later
from .forward_sm90_producer import produce


@entry_name("attention_sm90")
@cute.kernel
def attention_kernel(
    spec: cutlass.Constexpr,
    mmas: tuple,  # TiledMma of Q K^T, of P V, and of an output subtile
    smem_layouts: tuple,  # of Q, K, V, the output's staging, and of V as it is loaded or None
    loads: tuple,  # (atom, coordinates) of Q (Sq, D, H, B), K (Sk, D, Hk, B), V (Dv, Sk, Hk, B)
    output: tuple,  # (atom or None, coordinates, O (Sq, Dv, (H, B)))
    work: Work,
):
    """Sets up shared memory and mbarriers, then each warpgroup goes its way."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        for atom, _ in loads:
            cpasync.prefetch_descriptor(atom)
        if cutlass.const_expr(output[0] is not None):
            cpasync.prefetch_descriptor(output[0])

    barriers, slots, (sQ, sK, sV, sO, raw), later_buffers = allocate(spec, smem_layouts)
    consumer_warps = spec.consumers * 4
    q_ring = make_tma_ring(barriers, spec.q_stages, spec.q_bytes, consumer_warps, (1, 1))
    barriers += 2 * spec.q_stages
    k_ring = make_tma_ring(barriers, spec.stages, spec.k_bytes, consumer_warps, (1, 1))
    barriers += 2 * spec.stages
    more = turning.WARPS - 1 if spec.raw_stages else 0
    v_ring = make_tma_ring(barriers, spec.stages, spec.v_bytes, consumer_warps, (1, 1), more)
    barriers += 2 * spec.stages
    rings = (q_ring, k_ring, v_ring)
    loaded = rings, (sQ, sK, sV)
    if cutlass.const_expr(spec.raw_stages):
        raw_ring = make_tma_ring(barriers, spec.raw_stages, spec.v_bytes, turning.WARPS, (1, 1))
        barriers += 2 * spec.raw_stages
        loaded = (q_ring, k_ring, raw_ring), (sQ, sK, raw)
    later_ring = None
    if cutlass.const_expr(spec.later_v):
        later_ring = make_tma_ring(barriers, turning.WARPS, spec.later_keys * spec.dim_v, 1, (1, 1))
        barriers += 2 * turning.WARPS
        if warp == spec.consumers * 4:
            cpasync.prefetch_descriptor(work.later.load[0])
            cpasync.prefetch_descriptor(work.later.store[0])
    queue = None
    if cutlass.const_expr(work.counter is not None):
        listeners = spec.consumers * WARPGROUP_THREADS + (turning.THREADS if spec.raw_stages else 0)
        queue = (make_tile_ring(barriers, listeners), slots)
    sync_after_init((1, 1))
    # Programmatic dependent launch: all of the above ran beside the tail of the kernel before this one.
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(not spec.later_v):
        cute.arch.griddepcontrol_wait()

    group = cute.arch.make_warp_uniform(warp // 4)
    if group == spec.consumers:
        cute.arch.setmaxregister_decrease(spec.registers[0])
        if warp == spec.consumers * 4:
            produce(spec, loaded[0], loads, loaded[1], work, queue)
        elif cutlass.const_expr(spec.raw_stages):
            turning.turn_values(spec, (loaded[0][2], v_ring), (raw, sV), (work, queue))
        elif cutlass.const_expr(spec.later_v):
            turn_later(spec, work.later, later_ring, later_buffers, warp - (spec.consumers * 4 + 1))
    else:
        cute.arch.setmaxregister_increase(spec.registers[1])
        consume(spec, rings, mmas, (sQ, sK, sV, sO), output, (work, queue), group)


def allocate(spec: cutlass.Constexpr, layouts: tuple) -> tuple:
    """mbarriers, slots of the queue, Q (M, D, stages), K (N, D, stages), V (Dv, N, stages), the staging of
    O, and V on its way to be transposed (N, Dv, stages) or None.

    Each consumer warpgroup has staging buffers of its own: (64, epi_n, stages, consumers). With
    `stage_in_q` they lie in the first columns of the warpgroup's own rows of Q.
    """
    slots = tile_queue.WORDS * tile_queue.STAGES
    later = turning.WARPS if spec.later_v else 0
    words = 2 * (spec.q_stages + 2 * spec.stages + spec.raw_stages + later + tile_queue.STAGES)
    later_size = later * spec.later_keys * spec.dim_v
    raw_size = spec.raw_stages * spec.v_bytes
    o_size = 0 if spec.stage_in_q else cute.cosize(layouts[3]) * spec.consumers

    @cute.struct
    class SharedStorage:
        barriers: cute.struct.MemRange[cutlass.Int64, words]
        tiles: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, slots], 16]
        q: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts[0])], 1024]
        k: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts[1])], 1024]
        v: cute.struct.Align[cute.struct.MemRange[spec.dtype, cute.cosize(layouts[2])], 1024]
        o: cute.struct.Align[cute.struct.MemRange[spec.out_dtype, o_size], 1024]
        raw: cute.struct.Align[cute.struct.MemRange[spec.dtype, raw_size], 1024]
        given: cute.struct.Align[cute.struct.MemRange[spec.dtype, later_size], 1024]
        turned: cute.struct.Align[cute.struct.MemRange[spec.dtype, later_size], 1024]

    storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
    q_layout, k_layout, v_layout, o_layout, raw_layout, later_layouts = layouts
    buffers = None
    if later_layouts is not None:
        given, turned = later_layouts
        buffers = (
            storage.given.get_tensor(given.outer, swizzle=given.inner),
            storage.turned.get_tensor(turned.outer, swizzle=turned.inner),
        )
    raw = None
    if raw_layout is not None:
        raw = storage.raw.get_tensor(raw_layout.outer, swizzle=raw_layout.inner)
    sO = storage.q if spec.stage_in_q else storage.o
    staging = cute.append(o_layout.outer, cute.make_layout(spec.consumers, stride=cute.cosize(o_layout)))
    return (
        storage.barriers.data_ptr(),
        make_slots(storage.tiles.data_ptr()),
        (
            storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            sO.get_tensor(staging, swizzle=o_layout.inner),
            raw,
        ),
        buffers,
    )
