"""The first item of a CTA of the decoding kernel of Hopper, looked up while the kernel before still runs.

An item follows from lengths, which that kernel may write, and pages from the item. So the item is guessed
from lengths as they are; after the wait lengths and the pages of the guess are read at the same time, and
where the lengths are what they were, so is the item.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from kernels_dsl.blocks.attention.page_boxes import BoxPages, BoxRange, BoxSource, first_pages
from kernels_dsl.blocks.attention.splits import LANES, Found, Lengths, Unsettled, length_of

from .decode_spec import Spec
from .decode_tile import DecodeWork, Item, find_keys, item_at


def pages_of_cache(work: DecodeWork) -> BoxSource:
    """The pages of all sequences."""
    return BoxSource(work.table, work.page, Int32(work.k.shape[0]))


def keys_of_item(item: Item) -> BoxRange:
    """The boxes of an item."""
    return BoxRange(item.batch, item.begin, item.first, item.end)


@cute.jit
def look_up(spec: Spec, work: DecodeWork, found: Found) -> tuple[Item, BoxPages]:
    """An item and its first pages; if there is none, one of the last sequence without keys."""
    item = find_keys(spec, work, cutlass.min(found.batch, work.lengths.batch - 1), found.number)
    return item, first_pages(pages_of_cache(work), keys_of_item(item), spec.config.box)


@cute.jit
def first_item(
    spec: Spec, work: DecodeWork, scratch: cute.Pointer, index: Int32
) -> tuple[Found, Item, BoxPages]:
    """Waits for the kernel before; item number `index`, or none, and its first pages. scratch: int32 (LANES,)
    in shared memory."""
    if cutlass.const_expr(work.lengths.starts is None):
        guess = guess_item(spec, work, scratch, index)
        known, pages = confirm(spec, work, guess)
        found, item = guess.found, guess.item
        if not known:
            found = item_at(spec, work, index)
            item, pages = look_up(spec, work, found)
    else:
        wait_for_kernel_before()
        found = item_at(spec, work, index)
        item, pages = look_up(spec, work, found)
    return found, item, pages


class Guess(NamedTuple):
    """An item by lengths that the kernel before may still write."""

    found: Found
    item: Item
    length: Int32
    """Of this lane's sequence, as it was."""


def sequences_looked_at(lengths: Lengths) -> Int32:
    """The sequences among which an item is guessed, one a lane."""
    return cutlass.min(lengths.batch, Int32(LANES))


@cute.jit
def guess_item(spec: Spec, work: DecodeWork, scratch: cute.Pointer, index: Int32) -> Guess:
    """Item number `index`, if it is one of the first sequences'."""
    lane, lengths = cute.arch.lane_idx(), work.lengths
    few = sequences_looked_at(lengths)
    own = length_of(Unsettled(*lengths), cutlass.min(lane, few - 1))
    kept = lengths._replace(batch=few)
    if cutlass.const_expr(lengths.used is not None):  # the guess has no others than those compared later
        kept = kept._replace(used=cute.make_tensor(scratch, cute.make_layout(LANES)))
        kept.used[lane] = own
        cute.arch.sync_warp()
    likely = work._replace(lengths=kept)
    found = item_at(spec, likely, index)
    item = find_keys(spec, likely, cutlass.min(found.batch, few - 1), found.number)
    return Guess(found, item, own)


@cute.jit
def confirm(spec: Spec, work: DecodeWork, guess: Guess) -> tuple[Boolean, BoxPages]:
    """Waits for the kernel before. True if the item is what it was guessed to be; its first pages."""
    lane, lengths, item = cute.arch.lane_idx(), work.lengths, guess.item
    few = sequences_looked_at(lengths)
    # Always so; else the compiler would compute the guess after the wait.
    if (item.batch | item.head | guess.length) >= 0:
        wait_for_kernel_before()
    now = length_of(lengths, cutlass.min(lane, few - 1))
    pages = first_pages(pages_of_cache(work), keys_of_item(item), spec.config.box)
    same = cute.arch.vote_all_sync(guess.length == now)
    return same & (guess.found.batch < few), pages


def wait_for_kernel_before() -> None:
    """Waits until the kernel before has ended, and lets the one after start: the merge, which reads lengths
    before it waits for this kernel."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
