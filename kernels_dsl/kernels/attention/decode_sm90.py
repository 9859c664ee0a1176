"""The decoding kernel of Hopper: a warp that loads keys and values by TMA, and warps that compute.

    producer   item 0: K | Q | K | V | K | V ...  item 1: ...     as far as stages of the rings are empty
    others     wait for Q | wait for K, scores, softmax | wait for V, P V | ... | merge, store

K and V have a ring each, which goes on from item to item, so keys are on their way while an item's lengths
and pages are looked up, its Q is loaded and its outputs are merged. A stage has a block of K or of V; each
warp of those that compute waits for it and releases it by itself. Q and the description of an item come
through the mail, a ring of one stage. Arrivals: full of a stage 1 and TMA's bytes, empty one of each warp;
full of the mail the 32 lanes of the producer after their cp.async, empty all threads that compute.

Values past the end of a sequence, which may be NaN, come along in the last page that it has. The warp whose
keys they are makes them zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync

from kernels_dsl.blocks.attention.page_boxes import box_atom, boxes_layout
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.pipeline import make_tma_ring, sync_after_init
from kernels_dsl.blocks.hw.swizzled_rows import ALIGN, shared_pointer

from .decode_sm90_consumer import consume
from .decode_sm90_first import wait_for_kernel_before
from .decode_sm90_hints import hint_first_item
from .decode_sm90_producer import ITEM_WORDS, Loads, Mail, Shared, produce
from .decode_spec import DecodeSpec, Spec
from .decode_tile import DecodeWork


def make_loads(spec: DecodeSpec, work: DecodeWork) -> Loads:
    """Tensor maps of the caches."""
    layout = layout_of_ring(spec)
    return Loads(box_atom(work.k, spec.kv_tile, layout), box_atom(work.v, spec.kv_tile, layout))


def layout_of_ring(spec: DecodeSpec) -> cute.ComposedLayout:
    """Layout of the boxes of all stages."""
    return boxes_layout(spec.kv_tile, spec.config.stages * spec.boxes)


@entry_name("attention_decode_sm90")
@cute.kernel
def decode_sm90_kernel(spec: Spec, work: DecodeWork, loads: Loads, ctas: Int32):
    """Sets up shared memory and mbarriers; then each warp takes its role."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    computing = cutlass.const_expr(spec.config.computing_threads // 32)
    if warp == computing:
        cpasync.prefetch_descriptor(loads.k.atom)
        cpasync.prefetch_descriptor(loads.v.atom)
    smem = cutlass.memory.SmemAllocator().allocate(spec.config.smem_bytes, byte_alignment=ALIGN)
    shared = set_up(spec, smem.toint())
    sync_after_init((1, 1))
    if cutlass.const_expr(spec.config.hints and work.lengths.starts is None):
        if warp == 0:  # the one that loads must be ready when the wait ends
            hint_first_item(spec, work, loads, shared)
    # All of the above runs beside the tail of the kernel before this one.
    if warp == computing:
        produce(spec, work, loads, shared, ctas)
    else:
        wait_for_kernel_before()
        consume(spec, work, shared)


def set_up(spec: DecodeSpec, base: Int32) -> Shared:
    """Initialises the mbarriers. The caller syncs."""
    config, layout = spec.config, layout_of_ring(spec)
    boxes = shared_pointer(spec.dtype, base + config.q_bytes, ALIGN)
    boxes = cute.recast_ptr(boxes, layout.inner, dtype=spec.dtype)
    barriers = shared_pointer(Int64, base + config.barriers_offset, 8)
    stages, warps = spec.ring_stages, config.computing_threads // 32
    rings = [
        make_tma_ring(barriers + 2 * stages * n, stages, config.stage_bytes, warps, (1, 1)) for n in range(2)
    ]
    mail = pipeline.PipelineAsync.create(
        barrier_storage=barriers + 2 * config.stages,
        num_stages=1,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, config.computing_threads),
        defer_sync=True,
    )
    words = shared_pointer(Int32, base + config.mail_offset, 16)
    slot = cute.make_tensor(words, cute.make_layout(ITEM_WORDS))
    boxes = cute.make_tensor(boxes, layout.outer)
    return Shared(base, boxes, rings[0], rings[1], Mail(mail, slot))
