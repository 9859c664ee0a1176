"""One item of decoding attention: a tile of query rows of a KV head against one split of a sequence's keys.

Shared memory holds Q, a ring of blocks of K and V, and the warps' row maxima and sums. At the end the warps'
outputs lie over Q and the ring. See `decode` for the timeline.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import (
    ScoreOperands,
    ScoreOrigin,
    change_scores,
    mask_range,
    score_unit,
)
from kernels_dsl.blocks.attention.pages import page_of
from kernels_dsl.blocks.attention.score_tile import to_operand
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.attention.splits import (
    Cursor,
    Found,
    Lengths,
    PartRoom,
    Splits,
    find_item,
    first_part,
    splits_of,
    tiles_of,
)
from kernels_dsl.blocks.hw.barriers import NamedBarrier
from kernels_dsl.blocks.hw.dsl import choose
from kernels_dsl.blocks.hw.mma_sync import (
    make_tiled_mma,
    mma_k,
    warp_accumulators,
    warp_operand_a,
    warp_product,
)
from kernels_dsl.blocks.hw.swizzled_rows import (
    copy_row,
    opaque,
    reader_a,
    reader_b,
    reader_b_transposed,
    shared_pointer,
)
from kernels_dsl.config.decode import FACTORS_OFFSET

from . import decode_fp8
from .decode_merge import MergeWork
from .decode_spec import DecodeSpec, Spec


class Parts(NamedTuple):
    """Partial results: rows (rows, padded D) and their log-sum-exps (rows,) with base 2, float32."""

    rows: cute.Pointer
    lse: cute.Tensor


class DecodeWork(NamedTuple):
    """The problem; see `decode.attention_decode`."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    table: cute.Tensor | None
    parts: cute.Pointer
    part_lse: cute.Tensor
    room: PartRoom
    lengths: Lengths
    window: Window
    scores: ScoreOperands
    k_scale: cute.Tensor | None
    v_scale: cute.Tensor | None
    kv_heads: Int32
    page: cute.FastDivmodDivisorV2
    dim: Int32
    counters: Int64
    merge: MergeWork


class Item(NamedTuple):
    """One split of a sequence's keys, for a tile of query rows of a KV head."""

    batch: Int32
    head: Int32
    splits: Splits
    part: Int32
    """Number of the tile's first row among the partial results."""
    first_part: Int32
    """The same of the first split."""
    row: Int32
    """The tile's first row; row r is query r // pack of the KV head's query head r % pack."""
    rows: Int32
    """Rows of the tile whose results are wanted."""
    first: Int32
    """The first key that some query sees."""
    begin: Int32
    """Beginning of the steps, a multiple of a step's keys from the split's first key."""
    end: Int32


class Rows(NamedTuple):
    """Pages of the rows of a block that this thread copies, and their places in them."""

    pages: cute.Tensor
    places: cute.Tensor


class State(NamedTuple):
    """A warp's softmax and output."""

    q: cute.Tensor | None
    out: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    correction: cute.Tensor
    factors: cute.Tensor | None
    """Of the rows' scores: K's scale, and what Q's rows were divided by. None: 1."""


class Site(NamedTuple):
    """This thread's place: in its CTA, and in the tiles."""

    base: Int32
    thread: Int32
    lane: Int32
    warp_m: Int32
    warp_n: Int32


def item_at(spec: DecodeSpec, work: DecodeWork, index: Int32, cursor: Cursor | None = None) -> Found:
    """Item number `index` of all. `cursor`: where the search for one before it ended."""
    if cursor is None:
        cursor = Cursor(Int32(0), Int32(0))
    return find_item(spec.config, spec.variant, index, work.lengths, work.window.left, work.kv_heads, cursor)


def steps_of(spec: DecodeSpec, item: Item) -> Int32:
    """Blocks of keys of an item."""
    return (item.end - item.begin + spec.config.tile_n - 1) // spec.config.tile_n


def make_site(spec: DecodeSpec, base: Int32) -> Site:
    """The place of this thread, where the CTA's shared memory begins at `base`."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(thread // 32)
    return Site(base, thread, thread % 32, warp % spec.config.warps_m, warp // spec.config.warps_m)


@cute.jit
def work_item(spec: Spec, base: Int32, work: DecodeWork, item: Item):
    """All of one item; leaves shared memory free."""
    site = make_site(spec, base)
    start_queries(spec, work, item, base, site.thread, spec.config.threads)
    state = make_state(spec, work)
    attend(spec, work, item, site, state)
    finish(spec, work, item, site, state)


@cute.jit
def find_keys(spec: Spec, work: DecodeWork, batch: Int32, number: Int32) -> Item:
    """Item `number` of a sequence: its rows, and those of its split's keys that they see."""
    config, window = spec.config, work.window
    splits = splits_of(config, spec.variant, work.lengths, batch, window.left)
    queries, row, of_split = splits.queries, Int32(0), number
    if cutlass.const_expr(config.tiled):
        tiles = tiles_of(config, work.lengths, queries)
        of_split = number // tiles
        row = (number - of_split * tiles) * config.rows
    split = of_split // work.kv_heads
    head = of_split - split * work.kv_heads
    rows = cutlass.min(queries.rows - row, Int32(config.rows))
    part = first_part(work.room, queries, batch, work.kv_heads, config.pack)
    of_first = part + head * splits.count * queries.rows + row
    part = of_first + split * queries.rows
    begin = splits.begin + split * splits.keys
    end = cutlass.min(begin + splits.keys, splits.k_len)
    first = cutlass.max(begin, splits.visible)
    if cutlass.const_expr(config.tiled):
        shift = splits.k_len - queries.length
        if cutlass.const_expr(spec.variant.right):
            end = cutlass.min(end, shift + (row + rows - 1) // config.pack + window.right + 1)
        if cutlass.const_expr(spec.variant.left):
            first = cutlass.max(first, shift + row // config.pack - window.left)
            begin = begin + (first - begin) // config.tile_n * config.tile_n
    return Item(batch, head, splits, part, of_first, row, rows, first, begin, end)


def make_state(spec: DecodeSpec, work: DecodeWork) -> State:
    """The state before the first key."""
    q = warp_operand_a(16, spec.config.dim, spec.dtype) if spec.q_registers else None
    out = warp_accumulators(16, spec.config.dim)
    row_max, row_sum, correction = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    out.fill(0.0)
    row_max.fill(-math.inf)
    row_sum.fill(0.0)
    has_factors = spec.scales_rows or work.k_scale is not None
    factors = cute.make_rmem_tensor(2, Float32) if has_factors else None
    return State(q, out, row_max, row_sum, correction, factors)


@cute.jit
def start_queries(
    spec: Spec, work: DecodeWork, item: Item, base: Int32, thread: Int32, threads: cutlass.Constexpr
):
    """Starts the copies of the item's rows of Q to `base`, as one of `threads` threads."""
    tile, pack = spec.q_tile, spec.config.pack
    rows_at_once = threads // tile.chunks
    chunk, q = thread % tile.chunks, work.q
    sequence, before = item.batch, Int32(0)
    if cutlass.const_expr(work.lengths.starts is not None):
        sequence, before = Int32(0), item.splits.queries.start
    for first in cutlass.range_constexpr(0, tile.rows, rows_at_once):
        row = thread // tile.chunks + first
        if row < tile.rows:
            of_head = item.row + row
            at = Int64(sequence) * q.stride[0] + Int64(before + of_head // pack) * q.stride[1]
            at = at + Int64(item.head * pack + of_head % pack) * q.stride[2]
            target = base + tile.chunk_offset(row, chunk)
            source = q.iterator.toint() + 2 * at
            copy_row(tile, spec.dtype, work.dim, source, chunk, target, row < item.rows)


@cute.jit
def find_rows(spec: Spec, work: DecodeWork, item: Item, site: Site, step: Int32, rows: Rows):
    """Looks up the pages of the rows that this thread copies in a step; of none that no query sees."""
    tile = spec.kv_tile
    rows_at_once = tile.check_threads(spec.config.threads)
    for i in cutlass.range_constexpr(spec.copied_rows):
        key = item.begin + step * tile.rows + site.thread // tile.chunks + i * rows_at_once
        rows.pages[i], rows.places[i] = item.batch, key
        if cutlass.const_expr(spec.paged):
            page, place = divmod(key, work.page)
            rows.pages[i], rows.places[i] = Int32(0), place
            if (key >= item.first) & (key < item.end):
                rows.pages[i] = page_of(work.table, item.batch, page, work.k.shape[0])


def start_block(spec: DecodeSpec, work: DecodeWork, item: Item, site: Site, step: Int32, rows: Rows) -> None:
    """Starts the copies of a step's block of K and of V."""
    tile = spec.kv_tile
    rows_at_once = tile.check_threads(spec.config.threads)
    chunk, buffer = site.thread % tile.chunks, stage_address(spec, site, step)
    size = spec.config.kv_bytes
    columns = work.dim if size == 2 else work.dim // 2
    for i in range(spec.copied_rows):
        row = site.thread // tile.chunks + i * rows_at_once
        key = item.begin + step * tile.rows + row
        valid = (key >= item.first) & (key < item.end)
        for n, x in enumerate((work.k, work.v)):
            at = Int64(rows.pages[i]) * x.stride[0] + Int64(rows.places[i]) * x.stride[1]
            at = at + Int64(item.head) * x.stride[2]
            target = buffer + n * tile.bytes + tile.chunk_offset(row, chunk)
            copy_row(tile, spec.dtype, columns, x.iterator.toint() + size * at, chunk, target, valid)


def stage_address(spec: DecodeSpec, site: Site, step: Int32) -> Int32:
    """Address of the buffers of a step."""
    return site.base + spec.config.q_bytes + step % spec.config.stages * spec.config.stage_bytes


@cute.jit
def attend(spec: Spec, work: DecodeWork, item: Item, site: Site, state: State):
    """Each warp's unnormalised output over its keys of the split, by blocks in their order."""
    stages = spec.config.stages
    steps = steps_of(spec, item)
    layout = cute.make_layout(spec.copied_rows)
    rows = Rows(cute.make_rmem_tensor(layout, Int32), cute.make_rmem_tensor(layout, Int32))
    find_rows(spec, work, item, site, Int32(0), rows)
    for s in cutlass.range_constexpr(stages - 1):
        if s < steps:
            start_block(spec, work, item, site, Int32(s), rows)
        cute.arch.cp_async_commit_group()
        find_rows(spec, work, item, site, Int32(s + 1), rows)
    if cutlass.const_expr(spec.q_registers or spec.fp8):
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        if cutlass.const_expr(spec.fp8):
            take_factors(spec, work, item, site, state)
        if cutlass.const_expr(spec.q_registers):
            for k in cutlass.range_constexpr(spec.config.dim // 16):
                read_queries(spec, site, k, state.q[None, 0, k])
    for step in cutlass.range(steps, unroll=1):
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        ahead = step + (stages - 1)
        if ahead < steps:
            start_block(spec, work, item, site, ahead, rows)
        cute.arch.cp_async_commit_group()
        find_rows(spec, work, item, site, ahead + 1, rows)
        take_block(spec, work, item, site, state, step)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()


@cute.jit
def take_factors(spec: Spec, work: DecodeWork, item: Item, site: Site, state: State):
    """Makes Q fp16 and finds the factors of this thread's rows of scores."""
    if cutlass.const_expr(spec.scales_rows):
        pointer = shared_pointer(Float32, site.base + spec.config.stats_offset + FACTORS_OFFSET, 16)
        shared = cute.make_tensor(pointer, cute.make_layout(spec.config.rows))
        decode_fp8.queries_to_fp16(spec, site.base, shared, site.thread)
        sync_computing(spec)
        for r in cutlass.range_constexpr(2):
            state.factors[r] = shared[site.warp_m * 16 + site.lane // 4 + 8 * r]
    elif cutlass.const_expr(state.factors is not None):
        state.factors.fill(1.0)
    if cutlass.const_expr(work.k_scale is not None):
        for r in cutlass.range_constexpr(2):
            state.factors[r] = state.factors[r] * work.k_scale[item.batch, item.head]


def read_queries(spec: DecodeSpec, site: Site, k: int, into: cute.Tensor) -> None:
    """Reads columns 16 k and on of this warp's rows of Q: into (2, 2, 2)."""
    if spec.fp8:
        row = site.warp_m * 16 + site.lane // 4
        decode_fp8.read_queries(spec, site.base, row, site.lane, k, into)
    else:
        reader = reader_a(spec.q_tile, spec.dtype, site.lane, site.warp_m * 16)
        reader.read(site.base, 0, 16 * k, into)


@cute.jit
def take_block(spec: Spec, work: DecodeWork, item: Item, site: Site, state: State, step: Int32):
    """Takes this warp's keys of a block into its softmax and output."""
    k_address = stage_address(spec, site, step) + spec.warp_offset(site.warp_n)
    start = item.begin + step * spec.config.tile_n + site.warp_n * spec.warp_keys
    p = take_keys(spec, work, item, site, state, k_address, start)
    add_output(spec, site, state, p, k_address + spec.config.block_bytes)


@cute.jit
def take_keys(
    spec: Spec, work: DecodeWork, item: Item, site: Site, state: State, k_address: Int32, start: Int32
) -> cute.Tensor:
    """Takes the scores of this warp's keys, from key `start` on, into its softmax. Returns P."""
    keys = spec.warp_keys
    scores = warp_accumulators(16, keys)
    scores.fill(0.0)
    add_scores(spec, site, state, scores, k_address)
    view = softmax.rows_and_columns(scores)
    if cutlass.const_expr(state.factors is not None):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(view, mode=[1])):
                view[r, c] = view[r, c] * state.factors[r]
    row = item.row + site.warp_m * 16 + site.lane // 4
    origin = ScoreOrigin(row, start + site.lane % 4 * 2, item.head, item.batch)
    seq = SeqInfo(Int32(0), Int32(0), item.splits.queries.length, item.splits.k_len)
    scale_log2 = score_unit(spec.variant, work.scores) * softmax.LOG2_E
    if cutlass.const_expr(spec.variant.changes_scores):
        change_scores(spec.variant, view, origin, seq, work.scores)
    if needs_mask(spec, work, item, start):
        mask_range(spec.variant, view, origin, seq, item.end, work.window, spec.config.pack)
    softmax.online_step(view, state.row_max, state.row_sum, state.correction, scale_log2, True)
    softmax.rescale(softmax.rows_and_columns(state.out), state.correction)
    p = warp_operand_a(16, keys, spec.dtype)
    to_operand(scores, p)
    return p


def needs_mask(spec: DecodeSpec, work: DecodeWork, item: Item, start: Int32) -> Boolean:
    """True where some query of the item does not see all of a warp's keys from `start` on."""
    shift, pack = item.splits.k_len - item.splits.queries.length, spec.config.pack
    safe_end = item.end
    if spec.variant.right:
        safe_end = cutlass.min(safe_end, shift + item.row // pack + work.window.right + 1)
    masked = start + spec.warp_keys > safe_end
    if spec.variant.left:
        masked = masked | (start < shift + (item.row + item.rows - 1) // pack - work.window.left)
    return masked


def add_scores(spec: DecodeSpec, site: Site, state: State, scores: cute.Tensor, address: Int32) -> None:
    """scores += Q K^T for the warp's keys at `address`."""
    reader = reader_b(spec.kv_tile, spec.dtype, site.lane)
    fp8 = decode_fp8.k_reader(spec, site.lane) if spec.fp8 else None
    read: dict[int, cute.Tensor] = {}

    def operand_a(k: int) -> cute.Tensor:
        if state.q is not None:
            return state.q[None, None, k]
        if k not in read:
            read[k] = warp_operand_a(16, mma_k(spec.dtype), spec.dtype)[None, None, 0]
            read_queries(spec, site, k, read[k][None, 0])
        return read[k]

    def read_k(k: int, n: int, into: cute.Tensor) -> None:
        if fp8 is not None:
            fp8.read(address, k, n, into)
        else:
            reader.read(address + spec.box_offset(16 * n), 16 * n % spec.kv_tile.rows, 16 * k, into)

    steps = (spec.config.dim // 16, spec.warp_keys // 16)
    mma = make_tiled_mma(spec.dtype, 1, 1)
    warp_product(mma, scores, operand_a, read_k, steps, 2, spec.dtype)


def add_output(spec: DecodeSpec, site: Site, state: State, p: cute.Tensor, address: Int32) -> None:
    """out += P V for the warp's keys at `address`."""
    reader = reader_b_transposed(spec.kv_tile, spec.dtype, site.lane)
    fp8 = decode_fp8.v_reader(spec, site.lane) if spec.fp8 else None

    def read_v(k: int, n: int, into: cute.Tensor) -> None:
        if fp8 is not None:
            fp8.read(address, k, n, into)
        else:
            reader.read(address + spec.box_offset(16 * k), 16 * k % spec.kv_tile.rows, 16 * n, into)

    steps = (spec.warp_keys // 16, spec.config.dim // 16)
    mma = make_tiled_mma(spec.dtype, 1, 1)
    warp_product(mma, state.out, lambda k: p[None, None, k], read_v, steps, 2, spec.dtype)


@cute.jit
def finish(spec: Spec, work: DecodeWork, item: Item, site: Site, state: State):
    """Merges the warps' results in their order and stores them; log-sum-exps with base 2."""
    config = spec.config
    row = site.warp_m * 16 + site.lane // 4
    shape = (config.warps_n, config.rows)
    stats = shared_pointer(Float32, site.base + config.stats_offset, 16)
    maxima = cute.make_tensor(stats, cute.make_layout(shape, stride=(config.rows, 1)))
    sums = cute.make_tensor(stats + config.warps_n * config.rows, maxima.layout)
    scale_log2 = score_unit(spec.variant, work.scores) * softmax.LOG2_E
    for r in cutlass.range_constexpr(2):
        total = softmax.quad_sum(state.row_sum[r])
        if site.lane % 4 == 0:
            maxima[site.warp_n, row + 8 * r] = state.row_max[r]
            sums[site.warp_n, row + 8 * r] = total
    sync_computing(spec)
    out = softmax.rows_and_columns(state.out)
    for r in cutlass.range_constexpr(2):
        highest = maxima[0, row + 8 * r]
        for n in cutlass.range_constexpr(1, config.warps_n):
            highest = cute.arch.fmax(highest, maxima[n, row + 8 * r])
        base = softmax.finite_or_zero(highest)
        total = Float32(0.0)
        for n in cutlass.range_constexpr(config.warps_n):
            weight = cute.math.exp2((maxima[n, row + 8 * r] - base) * scale_log2, fastmath=True)
            total = total + weight * sums[n, row + 8 * r]
        empty = total == Float32(0.0)
        factor = cute.math.exp2((state.row_max[r] - base) * scale_log2, fastmath=True) / total
        if cutlass.const_expr(work.v_scale is not None):
            factor = factor * work.v_scale[item.batch, item.head]
        for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
            out[r, c] = choose(empty, Float32(0.0), out[r, c] * factor)
        lse = highest * scale_log2 + cute.math.log2(total, fastmath=True)
        if (site.lane % 4 == 0) & (site.warp_n == 0) & (row + 8 * r < item.rows):
            lse = choose(empty, Float32(-math.inf), lse)
            work.part_lse[item.part + row + 8 * r] = lse
    store_outputs(spec, work, item, site, out, row)


@cute.jit
def store_outputs(spec: Spec, work: DecodeWork, item: Item, site: Site, out: cute.Tensor, row: Int32):
    """Adds the warps' outputs in their order, by way of shared memory, and stores the sums."""
    config = spec.config
    of_warp, columns = config.rows * spec.pitch, config.merged_columns
    base = site.base + config.outputs_offset
    vectors = columns // 4
    for first in cutlass.range_constexpr(0, config.dim, columns):
        store_rows(spec, out, base + (site.warp_n * of_warp + row * spec.pitch) * 4, site.lane, first)
        sync_computing(spec)
        for i in cutlass.range_constexpr(config.rows * vectors // config.computing_threads):
            # Opaque, or the compiler keeps the addresses of all iterations beyond the item, and spills.
            number = opaque(site.thread) + i * config.computing_threads
            of_row, vector = number // vectors, number % vectors
            if of_row < item.rows:
                total = cute.make_rmem_tensor(4, Float32)
                for n in cutlass.range_constexpr(config.warps_n):
                    place = base + (n * of_warp + of_row * spec.pitch + vector * 4) * 4
                    found = cute.make_tensor(shared_pointer(Float32, place, 16), cute.make_layout(4)).load()
                    total.store(found if n == 0 else total.load() + found)
                column = first + vector * 4
                place = work.parts.toint() + (Int64(item.part + of_row) * config.dim + column) * 4
                target = cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(total, cute.make_tensor(target, cute.make_layout(4)))
        sync_computing(spec)


def sync_computing(spec: DecodeSpec) -> None:
    """Barrier among the warps that compute."""
    if spec.config.box:
        cute.arch.barrier(
            barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=spec.config.computing_threads
        )
    else:
        cute.arch.sync_threads()


def store_rows(spec: DecodeSpec, out: cute.Tensor, address: Int32, lane: Int32, first: int) -> None:
    """Stores a thread's outputs from column `first` on to float32 in shared memory: pairs of eight columns,
    with fp8 caches four of sixteen, of which each instruction had every other."""
    count = 4 if spec.fp8 else 2
    order = (0, 2, 1, 3) if spec.fp8 else (0, 1)
    own = address + lane % 4 * (4 * count)
    for r in range(2):
        for n in range(spec.config.merged_columns // (4 * count)):
            place = own + (8 * r * spec.pitch + 4 * count * n) * 4
            vector = cute.make_tensor(shared_pointer(Float32, place, 4 * count), cute.make_layout(count))
            for i in range(count):
                vector[i] = out[r, first // 4 + count * n + order[i]]
