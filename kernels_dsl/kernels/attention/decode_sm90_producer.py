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
    first_pages,
    pages_at,
)
from kernels_dsl.blocks.attention.splits import Queries, Splits
from kernels_dsl.blocks.hw.cp_async import arrive_with_copies
from kernels_dsl.blocks.hw.pipeline import producer_state, put

from .decode_spec import DecodeSpec, Spec
from .decode_tile import DecodeWork, Item, find_keys, item_at, start_queries

ITEM_WORDS = 10
"""Words that describe an item."""
END = -1
"""Sequence that is sent after the last item."""


class Mail(NamedTuple):
    """The way of items from the producer to the warps that compute; Q comes with it."""

    ring: pipeline.PipelineAsync
    words: cute.Tensor


class Shared(NamedTuple):
    """Shared memory of a CTA, from address `base` on."""

    base: Int32
    boxes: cute.Tensor
    """(rows, width, column blocks, boxes of all stages)"""
    ring: pipeline.PipelineTmaAsync
    mail: Mail


class Position(NamedTuple):
    """Positions in the ring and in the mail."""

    ring: PipelineState
    mail: PipelineState


@cute.jit
def produce(spec: Spec, work: DecodeWork, loads: cutlass.Constexpr, shared: Shared, ctas: Int32):
    """Loads every n-th item, of `ctas` CTAs."""
    position = Position(producer_state(spec.config.stages), producer_state(1))
    ring_state, mail_state = position
    index = cute.arch.block_idx()[0]
    found = item_at(spec, work, index)
    while found.batch < work.lengths.batch:
        item = find_keys(spec, work, found.batch, found.number)
        ring_state, mail_state = load_item(spec, work, loads, shared, item, Position(ring_state, mail_state))
        index = index + ctas
        found = item_at(spec, work, index, found.cursor)
    shared.mail.ring.producer_acquire(mail_state)
    if cute.arch.lane_idx() == 0:
        shared.mail.words[0] = Int32(END)
    shared.mail.ring.producer_commit(mail_state)


@cute.jit
def load_item(
    spec: Spec,
    work: DecodeWork,
    loads: cutlass.Constexpr,
    shared: Shared,
    item: Item,
    position: Position,
) -> Position:
    """Loads one item. Q comes after the first K, which need not wait until the item before has begun."""
    config, box = spec.config, spec.config.box
    ring_state, mail_state = position
    load_k, load_v = (
        box_loader(load, spec.kv_tile, shared.boxes, item.head, config.evict_first) for load in loads
    )
    source = BoxSource(work.table, work.page, Int32(work.k.shape[0]))
    wanted = BoxRange(item.batch, item.begin, item.first, item.end)
    pages = first_pages(source, wanted, box)
    steps = (item.end - item.begin + config.tile_n - 1) // config.tile_n
    for step in cutlass.range(steps, unroll=1):
        number = step * spec.boxes
        pages = pages_at(source, wanted, box, number, pages)
        block = partial(load_block, spec, work, wanted, pages, number)
        ring_state = put(shared.ring, ring_state, partial(block, load_k))
        if step == 0:
            send_item(spec, work, shared, item, mail_state)
        ring_state = put(shared.ring, ring_state, partial(block, load_v))
    if steps <= 0:
        send_item(spec, work, shared, item, mail_state)
    mail_state.advance()
    return Position(ring_state, mail_state)


def load_block(
    spec: DecodeSpec,
    work: DecodeWork,
    wanted: BoxRange,
    pages: BoxPages,
    number: Int32,
    load: LoadBox,
    stage: Int32,
    barrier: cute.Pointer,
) -> None:
    """Loads a block of K or V, from box `number` of the item on, to a stage."""
    for i in range(spec.boxes):
        key = wanted.begin + (number + i) * spec.config.box
        of_page = key
        if spec.paged:
            _, of_page = divmod(key, work.page)
        page = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(pages.now, (number + i) % 32))
        load(page, of_page // spec.config.box, stage * spec.boxes + i, barrier)


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
        item.batch, item.head, item.part, item.row, item.rows, item.first, item.begin, item.end,
        queries.length, k_len,
    )  # fmt: skip


def item_of(words: tuple[Int32, ...]) -> Item:
    """The item of `words_of`; what they leave out is 0."""
    batch, head, part, row, rows, first, begin, end, queries, k_len = words
    nothing = Int32(0)
    splits = Splits(Queries(nothing, queries, nothing), k_len, nothing, nothing, nothing, nothing)
    return Item(batch, head, splits, part, row, rows, first, begin, end)
