"""Hints to L2 of what a CTA of the decoding kernel of Hopper loads first, while the kernel before runs.

Lengths and pages may not have their values yet, nor may keys: what is read here only decides which lines L2
brings. It goes past L1, so that nothing of it is found there later. A CTA that begins late gives fewer.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels_dsl.blocks.attention.page_boxes import BoxRange, UnsettledSource, box_hinter, pages_of_group
from kernels_dsl.blocks.attention.splits import Unsettled
from kernels_dsl.blocks.hw.pipeline import consumer_state, is_full

from .decode_sm90_producer import Shared, place_of_box
from .decode_spec import Spec
from .decode_tile import DecodeWork, find_keys, item_at, steps_of


@cute.jit
def hint_first_item(spec: Spec, work: DecodeWork, loads: cutlass.Constexpr, shared: Shared):
    """Asks for as many blocks of K and V of this CTA's first item as the ring holds. One warp."""
    likely = work._replace(lengths=Unsettled(*work.lengths))
    found = item_at(spec, likely, cute.arch.block_idx()[0])
    if found.batch < work.lengths.batch:
        item = find_keys(spec, likely, found.batch, found.number)
        hint_k, hint_v = (box_hinter(load, spec.kv_tile, shared.boxes, item.head) for load in loads)
        source = UnsettledSource(work.table, work.page, Int32(work.k.shape[0]))
        wanted = BoxRange(item.batch, item.begin, item.first, item.end)
        pages = pages_of_group(source, wanted, spec.config.box, Int32(0))
        boxes = cutlass.const_expr(min(32, spec.config.stages // 2 * spec.boxes))
        number, count = Int32(0), cutlass.min(steps_of(spec, item) * spec.boxes, boxes)
        while number < count:
            page, in_page = place_of_box(spec, work, wanted, pages, number)
            if cute.arch.lane_idx() == 0:
                hint_k(page, in_page)
                hint_v(page, in_page)
            number = number + 1
            if has_item(shared):
                number = count


@cute.jit
def has_item(shared: Shared) -> Boolean:
    """True where the first item is there, so that who gives hints is waited for."""
    return cute.arch.vote_any_sync(is_full(shared.mail.ring, consumer_state(1)))
