"""Producer warp of the decoding kernel of Hopper: finds the items of its CTA, and loads their Q, K and V."""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.pipeline import PipelineState

from kernels_dsl.blocks.attention.page_boxes import (
    BoxPages,
    BoxRange,
    BoxSource,
    LoadBox,
    box_loader,
    pages_at,
)
from kernels_dsl.blocks.attention.splits import Queries, Splits
from kernels_dsl.blocks.attention.tile_queue import ask_number
from kernels_dsl.blocks.hw.cp_async import arrive_with_copies
from kernels_dsl.blocks.hw.pipeline import producer_state, put
from kernels_dsl.blocks.hw.swizzled_rows import shared_pointer
from kernels_dsl.blocks.hw.tma import TmaCopy
from kernels_dsl.config.decode import ASKED_AHEAD

from .decode_sm90_first import first_item, keys_of_item, look_up, pages_of_cache
from .decode_spec import DecodeSpec, Spec
from .decode_tile import DecodeWork, Item, item_at, start_queries, steps_of

ITEM_WORDS = 13
"""Words that describe an item."""
END = -1
"""Sequence that is sent after the last item."""


class Loads(NamedTuple):
    """TMA loads of boxes of K and of V."""

    k: TmaCopy
    v: TmaCopy


class Mail(NamedTuple):
    """The way of items from the producer to the warps that compute; Q comes with it."""

    ring: pipeline.PipelineAsync
    words: cute.Tensor


class Shared(NamedTuple):
    """Shared memory of a CTA, from address `base` on."""

    base: Int32
    boxes: cute.Tensor
    """(rows, width, column blocks, boxes of all stages)"""
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    """Its stages follow those of K's."""
    mail: Mail


class Position(NamedTuple):
    """Positions in the rings of K and V, and in the mail."""

    k: PipelineState
    v: PipelineState
    mail: PipelineState


@cute.jit
def produce(spec: Spec, work: DecodeWork, loads: cutlass.Constexpr, shared: Shared, ctas: Int32):
    """Loads every n-th item, of `ctas` CTAs. Waits for the kernel before."""
    stages = spec.ring_stages
    k_state, v_state, mail_state = producer_state(stages), producer_state(stages), producer_state(1)
    index = cute.arch.block_idx()[0]
    scratch = shared_pointer(Int32, shared.base + spec.config.outputs_offset, 16)
    found, item, pages = first_item(spec, work, scratch, index)
    while found.batch < work.lengths.batch:
        position = Position(k_state, v_state, mail_state)
        position, asked = load_item(spec, work, loads, shared, item, pages, position)
        k_state, v_state, mail_state = position
        if cutlass.const_expr(spec.config.queued):
            index = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(asked, 0)) + ctas
        else:
            index = index + ctas
        found = item_at(spec, work, index, found.cursor)
        if found.batch < work.lengths.batch:
            item, pages = look_up(spec, work, found)
        elif cutlass.const_expr(spec.config.queued):
            # Where there is no item left, all have been counted: of all CTAs one has the last number.
            if index - ctas == found.cursor.before - 1:
                if cute.arch.lane_idx() == 0:
                    queue_of(work)[0] = Int32(0)
    shared.mail.ring.producer_acquire(mail_state)
    if cute.arch.lane_idx() == 0:
        shared.mail.words[0] = Int32(END)
    shared.mail.ring.producer_commit(mail_state)


def queue_of(work: DecodeWork) -> cute.Tensor:
    """The counter that hands out items."""
    place = cute.make_ptr(Int32, work.counters, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(place, cute.make_layout(1))


@cute.jit
def load_item(
    spec: Spec,
    work: DecodeWork,
    loads: cutlass.Constexpr,
    shared: Shared,
    item: Item,
    pages: BoxPages,
    position: Position,
) -> tuple[Position, Int32]:
    """Loads one item, each V after `k_ahead` blocks of K past its own. Q comes after the first K, which need
    not wait until the item before has begun. Asks for the next item's number shortly before the end, so that
    the last items go to CTAs that are free: the queue's answer comes with the position."""
    box, ahead = spec.config.box, spec.config.k_ahead
    k_state, v_state, mail_state = position
    walk = start_walk(spec, work, loads, shared, item)
    k_pages = v_pages = pages
    steps, asked = steps_of(spec, item), Int32(0)
    asks_at = cutlass.max(steps - ASKED_AHEAD, 0)
    for step in cutlass.range(cutlass.min(ahead, steps), unroll=1):
        k_pages = pages_at(walk.source, walk.wanted, box, step * spec.boxes, k_pages)
        block = partial(load_block, spec, work, walk.wanted, k_pages, step * spec.boxes)
        k_state = put(shared.k, k_state, partial(block, walk.load_k))
        if step == 0:
            send_item(spec, work, shared, item, mail_state)
    for step in cutlass.range(steps, unroll=1):
        if cutlass.const_expr(spec.config.queued):
            if step == asks_at:
                asked = ask_number(queue_of(work))
        later = step + ahead
        if later < steps:
            k_pages = pages_at(walk.source, walk.wanted, box, later * spec.boxes, k_pages)
            block = partial(load_block, spec, work, walk.wanted, k_pages, later * spec.boxes)
            k_state = put(shared.k, k_state, partial(block, walk.load_k))
        v_pages = pages_at(walk.source, walk.wanted, box, step * spec.boxes, v_pages)
        block = partial(load_block, spec, work, walk.wanted, v_pages, step * spec.boxes)
        v_state = put(shared.v, v_state, partial(block, walk.load_v, first=spec.ring_stages))
    if steps <= 0:
        send_item(spec, work, shared, item, mail_state)
        if cutlass.const_expr(spec.config.queued):
            asked = ask_number(queue_of(work))
    mail_state.advance()
    return Position(k_state, v_state, mail_state), asked


class Walk(NamedTuple):
    """Loads of an item: its boxes of K and of V, pages and keys."""

    load_k: LoadBox
    load_v: LoadBox
    source: BoxSource
    wanted: BoxRange


def start_walk(spec: DecodeSpec, work: DecodeWork, loads: Loads, shared: Shared, item: Item) -> Walk:
    """The loads of an item."""
    config = spec.config
    load_k, load_v = (
        box_loader(load, spec.kv_tile, shared.boxes, item.head, config.evict_first) for load in loads
    )
    return Walk(load_k, load_v, pages_of_cache(work), keys_of_item(item))


def load_block(
    spec: DecodeSpec,
    work: DecodeWork,
    wanted: BoxRange,
    pages: BoxPages,
    number: Int32,
    load: LoadBox,
    stage: Int32,
    barrier: cute.Pointer,
    first: int = 0,
) -> None:
    """Loads a block of K or V, from box `number` of the item on, to a stage of the ring from stage `first`
    on."""
    for i in range(spec.boxes):
        page, in_page = place_of_box(spec, work, wanted, pages.now, number + i)
        load(page, in_page, (stage + first) * spec.boxes + i, barrier)


def place_of_box(
    spec: DecodeSpec, work: DecodeWork, wanted: BoxRange, pages: Int32, number: Int32
) -> tuple[Int32, Int32]:
    """Page of box `number` of an item, and its number there; lanes have the `pages` of 32 boxes."""
    key = wanted.begin + number * spec.config.box
    of_page = key
    if spec.paged:
        _, of_page = divmod(key, work.page)
    page = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(pages, number % 32))
    return page, of_page // spec.config.box


@cute.jit
def send_item(spec: Spec, work: DecodeWork, shared: Shared, item: Item, state: PipelineState):
    """Passes an item on, and starts the copies of its Q; blocks until that of the item before is read."""
    lane = cute.arch.lane_idx()
    shared.mail.ring.producer_acquire(state)
    start_queries(spec, work, item, shared.base, lane, 32)
    if lane == 0:
        for i, word in enumerate(words_of(item)):
            shared.mail.words[i] = word
    arrive_with_copies(shared.mail.ring.sync_object_full.get_barrier(state.index))
    shared.mail.ring.producer_commit(state)


def words_of(item: Item) -> tuple[Int32, ...]:
    """Words for those who compute: all that they need to know of an item."""
    queries, k_len = item.splits.queries, item.splits.k_len
    return (
        item.batch, item.head, item.part, item.first_part, item.row, item.rows, item.first, item.begin,
        item.end, queries.length, queries.rows, k_len, item.splits.count,
    )  # fmt: skip


def item_of(words: tuple[Int32, ...]) -> Item:
    """The item of `words_of`; what they leave out is 0."""
    batch, head, part, first_part, row, rows, first, begin, end, queries, of_head, k_len, count = words
    nothing = Int32(0)
    splits = Splits(Queries(nothing, queries, of_head), k_len, nothing, nothing, nothing, count)
    return Item(batch, head, splits, part, first_part, row, rows, first, begin, end)
