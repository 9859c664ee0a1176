"""The warps of the decoding kernel of Hopper that compute, in the order of arithmetic of `decode_tile`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from kernels_dsl.blocks.hw.barriers import NamedBarrier, fence_for_async_readers
from kernels_dsl.blocks.hw.pipeline import consumer_state
from kernels_dsl.blocks.hw.swizzled_rows import shared_pointer

from .decode_last import merge_if_last
from .decode_sm90_producer import ITEM_WORDS, Shared, item_of
from .decode_spec import Spec
from .decode_tile import (
    DecodeWork,
    Item,
    Site,
    State,
    add_output,
    finish,
    make_site,
    make_state,
    read_queries,
    steps_of,
    take_factors,
    take_keys,
)


@cute.jit
def consume(spec: Spec, work: DecodeWork, shared: Shared):
    """Takes the items of this CTA."""
    site = make_site(spec, shared.base)
    state, mail_state = consumer_state(spec.ring_stages), consumer_state(1)
    mail = shared.mail
    mail.ring.consumer_wait(mail_state)
    while mail.words[0] >= 0:
        item = item_of(tuple(cute.arch.make_warp_uniform(mail.words[i]) for i in range(ITEM_WORDS)))
        own = make_state(spec, work)
        if cutlass.const_expr(spec.fp8):
            take_factors(spec, work, item, site, own)
        for k in cutlass.range_constexpr(spec.config.dim // 16):
            read_queries(spec, site, k, own.q[None, 0, k])
        mail.ring.consumer_release(mail_state)
        mail_state.advance()
        state = attend(spec, work, shared, item, site, own, state)
        finish(spec, work, item, site, own)
        if cutlass.const_expr(spec.config.merges):
            merge_if_last(spec, work, item, site)
        mail.ring.consumer_wait(mail_state)


@cute.jit
def attend(
    spec: Spec, work: DecodeWork, shared: Shared, item: Item, site: Site, own: State, state: PipelineState
) -> PipelineState:
    """This warp's unnormalised output over its keys of the split, by blocks in their order."""
    config = spec.config
    blocks = site.base + config.q_bytes + spec.warp_offset(site.warp_n)
    values = blocks + spec.ring_stages * config.stage_bytes
    steps = steps_of(spec, item)
    for step in cutlass.range(steps, unroll=1):
        start = item.begin + step * config.tile_n + site.warp_n * spec.warp_keys
        shared.k.consumer_wait(state)
        p = take_keys(spec, work, item, site, own, blocks + state.index * config.stage_bytes, start)
        cute.arch.sync_warp()
        shared.k.consumer_release(state)
        shared.v.consumer_wait(state)
        address = values + state.index * config.stage_bytes
        clear_values(spec, item, site, address, start)
        add_output(spec, site, own, p, address)
        cute.arch.sync_warp()
        shared.v.consumer_release(state)
        state.advance()
    return state


@cute.jit
def clear_values(spec: Spec, item: Item, site: Site, address: Int32, start: Int32):
    """Makes values zeros that no query sees: NaN times a weight of 0 would be NaN. One does it of the warps
    that share the keys."""
    if (start < item.first) | (start + spec.warp_keys > item.end):
        if site.warp_m == 0:
            clear_rows(spec, item, site.lane, address, start)
            # TMA writes to the stage later.
            fence_for_async_readers()
        if cutlass.const_expr(spec.config.warps_m > 1):
            sharing = int(NamedBarrier.EPILOGUE) + site.warp_n
            cute.arch.barrier(barrier_id=sharing, number_of_threads=32 * spec.config.warps_m)
        else:
            cute.arch.sync_warp()


@cute.jit
def clear_rows(spec: Spec, item: Item, lane: Int32, address: Int32, start: Int32):
    """Zeros in the rows at `address`, from key `start` on, that lie outside of the item."""
    tile = spec.kv_tile
    at_once = cutlass.const_expr(32 // tile.chunks)
    for step in cutlass.range_constexpr(0, spec.warp_keys, at_once):
        key = start + step + lane // tile.chunks
        if (key < item.first) | (key >= item.end):
            of_box = step % tile.rows + lane // tile.chunks
            own = address + spec.box_offset(step) + of_box * (2 * tile.width) + lane % tile.chunks * 16
            for block in cutlass.range_constexpr(tile.blocks):
                place = own + tile.row_offset(0, block * tile.width)
                vector = cute.make_tensor(shared_pointer(Int32, place, 16), cute.make_layout(4))
                vector.fill(0)
