"""Requests to L2 for whole pages of keys, ahead of the loads: memory then sees long runs of neighbours.

A box of keys of one head is 256 bytes of each key where D is 128, and the other heads' are other CTAs' to
load. Here 16 keys of all heads are one request. The CTAs of a sequence's KV heads each make every n-th.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_dsl.blocks.attention.page_boxes import LANES, BoxRange, BoxSource
from kernels_dsl.blocks.attention.pages import page_of
from kernels_dsl.blocks.hw.bulk_prefetch import prefetch_to_l2

REQUEST = 16
"""Keys of a request: no page has fewer."""


@cute.jit
def request_keys(
    source: BoxSource,
    boxes: BoxRange,
    caches: cutlass.Constexpr[tuple[cute.Tensor, cute.Tensor]],
    head: Int32,
    start: Int32,
    count: cutlass.Constexpr[int],
):
    """This CTA's share of `count` keys of K and of V from key `start` on, at most 256: of those in range.

    Caches (pages, keys, heads, D), the heads of a key neighbours in memory, and then the keys of a page.
    """
    of_cache = cutlass.const_expr(count // REQUEST)
    lane = cute.arch.lane_idx()
    key = start + lane % of_cache * REQUEST
    heads = caches[0].shape[2]
    wanted = (lane < 2 * of_cache) & (key // REQUEST % heads == head)
    if wanted & (key < boxes.end) & (key + REQUEST > boxes.first):
        number, place = divmod(key, source.page)
        page = page_of(source.table, boxes.sequence, number, source.count)
        for n, cache in enumerate(caches):
            if lane // of_cache == n:
                element = Int64(page) * cache.stride[0] + Int64(place) * cache.stride[1]
                count_of = (REQUEST - 1) * cache.stride[1] + heads * cache.stride[2]
                size = Int32(count_of) * (cache.element_type.width // 8)
                prefetch_to_l2((cache.iterator + element).toint(), size)


assert 2 * 256 // REQUEST == LANES
