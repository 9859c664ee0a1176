"""New keys and values into a cache of pages, as they are or as fp8.

A CTA has a stretch of the heads of one token, of K or of V. Where the token goes is read from memory: a slot
of the cache, or a page of its sequence. A place outside the cache, and slot -1, is not written.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.vectors import load_vector, vector_at

THREADS = 128


class Stream(NamedTuple):
    """Keys or values."""

    new: cute.Tensor  # (B, S, H, D)
    cache: cute.Tensor  # (pages, tokens of a page, H, D)
    scale: cute.Tensor | None  # float32 (H,), where the cache is fp8: what it holds times this is the value


class Token(NamedTuple):
    """A new token."""

    sequence: Int32
    number: Int32


class Places(NamedTuple):
    """Destinations of tokens: slots alone, or lengths with a table of pages or without one."""

    slots: cute.Tensor | None  # (B, S)
    lengths: cute.Tensor | None  # (B,): tokens that a sequence has
    table: cute.Tensor | None  # (B, pages of a sequence); None: a sequence has the page of its number


def append_kv(
    k: cute.Tensor,
    v: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    slots: cute.Tensor | None,
    lengths: cute.Tensor | None,
    table: cute.Tensor | None,
    k_scale: cute.Tensor | None,
    v_scale: cute.Tensor | None,
    stream,
    vector: cutlass.Constexpr[int],
    early: cutlass.Constexpr[bool],
):
    """Launch; tensors as in `Stream` and `Places`. vector, early: as in `merge_states`."""
    batch, rows, heads, columns = k.shape
    most = cutlass.max(columns, v.shape[3]) // vector * heads
    keys, values = Stream(k, k_cache, k_scale), Stream(v, v_cache, v_scale)
    append_kv_kernel(keys, values, Places(slots, lengths, table), vector, early).launch(
        grid=[batch * rows, cute.ceil_div(most, THREADS), 2],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=early,
    )


@entry_name("append_kv")
@cute.kernel
def append_kv_kernel(
    keys: Stream, values: Stream, places: Places, vector: cutlass.Constexpr, early: cutlass.Constexpr
):
    """Device side of `append_kv`."""
    if const_expr(early):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    token, group, stream_number = cute.arch.block_idx()
    number = group * THREADS + cute.arch.thread_idx()[0]
    rows = keys.new.shape[1]
    at = Token(token // rows, token % rows)
    if stream_number == 0:
        append(keys, places, at, number, vector)
    else:
        append(values, places, at, number, vector)


@cute.jit
def append(stream: Stream, places: Places, token: Token, number: Int32, vector: cutlass.Constexpr):
    """Stores vector `number` of a token, counted over its heads."""
    new, cache, scale = stream
    pages, size = cache.shape[0], cache.shape[1]
    vectors = new.shape[3] // vector
    h, column = number // vectors, number % vectors * vector
    page, row = place_of(places, token, pages, size)
    if (h < new.shape[2]) & (page >= 0) & (page < pages) & (row >= 0):
        found = load_vector(new, (*token, h, column), vector)
        stored = cute.make_rmem_tensor(vector, cache.element_type)
        if const_expr(cache.element_type is new.element_type):
            stored.store(found.load())
        else:
            floats = cute.make_rmem_tensor(vector, Float32)
            for i in range_constexpr(vector):
                floats[i] = found[i].to(Float32)
                if const_expr(scale is not None):
                    floats[i] = floats[i] / scale[h]
            stored.store(floats.load().to(cache.element_type))
        cute.autovec_copy(stored, vector_at(cache, (page, row, h, column), vector))


class Place(NamedTuple):
    """A token's place in a cache. Negative: nowhere."""

    page: Int32
    row: Int32


@cute.jit
def place_of(places: Places, token: Token, pages: Int32, size: Int32) -> Place:
    """Looks up where a token goes in a cache of `pages` pages of `size` tokens."""
    page, row = Int32(-1), Int32(-1)
    if const_expr(places.slots is not None):
        slot = Int64(places.slots[token.sequence, token.number])
        if (slot >= 0) & (slot < Int64(pages) * Int64(size)):
            page, row = Int32(slot // Int64(size)), Int32(slot % Int64(size))
    else:
        length, room = Int64(places.lengths[token.sequence]), Int64(size)
        if const_expr(places.table is not None):
            room = room * Int64(places.table.shape[1])
        # No sum that may overflow: the compiler takes one of numbers from 0 on for a number from 0 on.
        if (length >= 0) & (length < room - Int64(token.number)):
            position = length + Int64(token.number)
            if const_expr(places.table is None):
                page, row = token.sequence, Int32(position)
            else:
                page = places.table[token.sequence, Int32(position // Int64(size))]
                row = Int32(position % Int64(size))
    return Place(page, row)
