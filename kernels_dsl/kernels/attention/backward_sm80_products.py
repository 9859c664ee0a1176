"""Products of the SM80-class attention backward, and what becomes of scores and of dQ."""

from collections.abc import Callable, Iterator
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.mask import column_offset
from kernels_dsl.blocks.attention.mask_gradient import store_mask_gradient
from kernels_dsl.blocks.attention.probabilities import ScoreStep, weigh
from kernels_dsl.blocks.hw.grid_barrier import await_count
from kernels_dsl.blocks.hw.mma_sync import make_tiled_mma, warp_accumulators, warp_operand_a, warp_product
from kernels_dsl.blocks.hw.swizzled_rows import MatrixReader, RowsTile, shared_pointer

from .backward_sm80_copies import Memory, Site, Step, ds_of, number_of, preceding, query_of
from .backward_sm80_spec import BackwardSpec
from .backward_work import SHARE_THREADS, VECTOR, BackwardWork, add_vector, score_step, turn_of

OperandA = Callable[[int], cute.Tensor]
"""A K step's number -> fragments ((2, 2, 2), M) of it."""


def compute_probabilities(
    spec: BackwardSpec,
    memory: Memory,
    work: BackwardWork,
    site: Site,
    now: Step,
    probs: cute.Tensor,
    queries: range,
) -> cute.Tensor:
    """P of this warp's keys and `queries` of a step, as float32 accumulators. `probs`: see `weigh`."""
    config, readers = spec.config, memory.readers
    stage = now.number % config.q_stages
    q = memory.base + spec.q_offset + stage * spec.q_tile.bytes + spec.q_tile.row_offset(queries.start, 0)
    scores = warp_accumulators(spec.warp_keys, len(queries))
    scores.fill(0.0)
    operand_a = from_shared(spec, readers.s_k, memory.base, spec.warp_keys)
    multiply(spec, scores, operand_a, readers.s_q, q, config.dim // 16)
    at = scores_of(spec, work, site, now, queries)
    rows = first_row(spec, memory.base + spec.lse_offset + stage * spec.rows_bytes, site, queries)
    weigh(spec.variant, scores, partial(row_values, rows), at, probs)
    return scores


def scores_of(spec: BackwardSpec, work: BackwardWork, site: Site, now: Step, queries: range) -> ScoreStep:
    """This thread's scores of the warp's `queries` of a step."""
    first_key = site.job.at.n * spec.tile_k + site.key_warp * spec.warp_keys + site.lane // 4
    first_query = now.block * spec.tile_q + site.query_warp * spec.warp_queries + site.lane % 4 * 2
    first_query += queries.start
    return score_step(work, site.job, query_of(work, site.job, now), (first_query, first_key))


def compute_d_probs(
    spec: BackwardSpec, memory: Memory, site: Site, now: Step, d_probs: cute.Tensor, queries: range
) -> None:
    """dP of this warp's keys and `queries` of a step, less the row sums, to float32 accumulators."""
    config, readers = spec.config, memory.readers
    stage = now.number % config.do_stages
    do = memory.base + spec.do_offset + stage * spec.do_tile.bytes + spec.do_tile.row_offset(queries.start, 0)
    view = softmax.rows_and_columns(d_probs)
    rows = first_row(spec, memory.base + spec.row_sums_offset + stage * spec.rows_bytes, site, queries)
    columns = row_values(rows, 0, len(queries) // 4)
    for c in range(cute.size(view, mode=[1])):
        for r in range(cute.size(view, mode=[0])):
            view[r, c] = -columns[c]
    operand_a = from_shared(spec, readers.dp_v, memory.base + spec.v_offset, spec.warp_keys)
    multiply(spec, d_probs, operand_a, readers.dp_do, do, config.dim_v // 16)


def slope(d_probs: cute.Tensor, probs: cute.Tensor) -> None:
    """d_probs *= probs, which may have 16 bits: accumulators."""
    view, d_view = softmax.rows_and_columns(probs), softmax.rows_and_columns(d_probs)
    for c in range(cute.size(view, mode=[1])):
        for r in range(cute.size(view, mode=[0])):
            d_view[r, c] = d_view[r, c] * view[r, c].to(Float32)


def give_mask_gradient(
    spec: BackwardSpec,
    work: BackwardWork,
    site: Site,
    now: Step,
    slopes: cute.Tensor,
    probs: cute.Tensor | None,
    queries: range,
) -> None:
    """Stores the gradient of the mask, `slopes` times `probs` where given, where it is asked for."""
    if work.d_mask is not None:
        store_mask_gradient(work.d_mask, scores_of(spec, work, site, now, queries), slopes, probs, None)


def from_shared(spec: BackwardSpec, reader: MatrixReader, address: Int32, rows: int) -> OperandA:
    """Operand A of `multiply`, read when it is first asked for. Of a transposed tile rows are columns."""
    fragments: dict[int, cute.Tensor] = {}

    def fragment(k: int) -> cute.Tensor:
        if k not in fragments:
            fragments[k] = warp_operand_a(rows, 16, spec.dtype)[None, None, 0]
            for m in range(rows // 16):
                row, column = (16 * k, 16 * m) if reader.transposed else (16 * m, 16 * k)
                reader.read(address, row, column, fragments[k][None, m])
        return fragments[k]

    return fragment


def in_registers(operand: cute.Tensor) -> OperandA:
    """Operand A of `multiply`, ((2, 2, 2), M, K)."""
    return lambda k: operand[None, None, k]


def multiply(
    spec: BackwardSpec,
    acc: cute.Tensor,
    operand_a: OperandA,
    reader: MatrixReader,
    address: Int32,
    k_steps: int,
    stride: int = 1,
) -> None:
    """acc += A @ B.T of one warp. B is read from the tile at `address`, every `stride`-th 16 of its N."""

    def read_b(k: int, n: int, into: cute.Tensor) -> None:
        operand_a(k)  # is read before the fragments of B of the same step
        row, column = (16 * k, 16 * n * stride) if reader.transposed else (16 * n * stride, 16 * k)
        reader.read(address, row, column, into)

    steps = (k_steps, cute.size(acc, mode=[2]) // 2)
    mma = make_tiled_mma(spec.dtype, 1, 1)
    warp_product(mma, acc, operand_a, read_b, steps, spec.config.ahead, spec.dtype)


def first_row(spec: BackwardSpec, address: Int32, site: Site, queries: range) -> Int32:
    """Address of the number of this thread's first of `queries`, of those of a step at `address`."""
    return address + (site.query_warp * spec.warp_queries + site.lane % 4 * 2) * 4 + 4 * queries.start


def row_values(address: Int32, first: int, count: int) -> cute.Tensor:
    """One float32 of each of `count` of this thread's queries, from number `first` on, out of shared memory,
    where that of the first lies at `address`."""
    found = cute.make_rmem_tensor(count, Float32)
    for i in range(0, count, 2):
        source = shared_pointer(Float32, address + 4 * column_offset(first + i), 8)
        target = cute.make_tensor(found.iterator + i, cute.make_layout(2))
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), target)
    return found


def pairs_of_scores(
    spec: BackwardSpec, address: Int32, site: Site, queries: range
) -> Iterator[tuple[int, cute.Tensor]]:
    """Numbers of the accumulators of a warp's `queries`, the first of two queries each, and the places of
    both as 16-bit scores in the (keys, queries) at `address`."""
    tile: RowsTile = spec.ds_tile
    row = site.key_warp * spec.warp_keys + site.lane // 4
    chunk = site.query_warp * (spec.warp_queries // 8) + queries.start // 8
    first = address + tile.chunk_offset(row, chunk) + site.lane % 4 * 4
    columns = len(queries) // 8
    for r in range(spec.warp_keys // 8):
        for n in range(columns):
            place = (first ^ tile.flip(8 * n)) + tile.row_offset(8 * r, 8 * n)
            number = 4 * (r // 2 * columns + n) + r % 2 * 2
            yield number, cute.make_tensor(shared_pointer(spec.dtype, place, 4), cute.make_layout(2))


def pair_at(values: cute.Tensor, number: int) -> cute.Tensor:
    """Two registers from `number` on."""
    return cute.make_tensor(values.iterator + number, cute.make_layout(2))


def store_scores(
    spec: BackwardSpec, operand: cute.Tensor, address: Int32, site: Site, queries: range
) -> None:
    """P or dS of this warp's keys and `queries` to shared memory."""
    for number, place in pairs_of_scores(spec, address, site, queries):
        cute.autovec_copy(pair_at(operand, number), place)


def load_scores(spec: BackwardSpec, layout: cute.Layout, address: Int32, site: Site) -> cute.Tensor:
    """Loads the tile that `store_scores` stored, to registers of the `layout` of accumulators."""
    values = cute.make_rmem_tensor(layout, spec.dtype)
    for number, place in pairs_of_scores(spec, address, site, spec.all_queries):
        cute.autovec_copy(place, pair_at(values, number))
    return values


def slope_in_shared(
    spec: BackwardSpec, d_probs: cute.Tensor, factors: Int32, address: Int32, site: Site
) -> None:
    """d_probs *= the scores that another warp stored at `factors`, and to shared memory at `address`, two at
    a time: no more of them are in registers."""
    places = (pairs_of_scores(spec, start, site, spec.all_queries) for start in (factors, address))
    for (number, factor), (_, place) in zip(*places):
        pair, stored = pair_at(d_probs, number), cute.make_rmem_tensor(2, spec.dtype)
        cute.autovec_copy(factor, stored)
        pair.store(pair.load() * stored.load().to(Float32))
        stored.store(pair.load().to(spec.dtype))
        cute.autovec_copy(stored, place)


def give_dq(spec: BackwardSpec, memory: Memory, work: BackwardWork, site: Site, at: Step) -> None:
    """This warp's part of dQ of one query block, from dS of all keys, to the sums in global memory."""
    dq = warp_accumulators(spec.dq_rows, spec.dq_columns)
    dq.fill(0.0)
    operand_a = from_shared(spec, memory.readers.dq_ds, ds_of(spec, memory, at.number), spec.dq_rows)
    steps, stride = spec.tile_k // 16, spec.dq_column_warps
    multiply(spec, dq, operand_a, memory.readers.dq_k, memory.base, steps, stride)
    add_dq(spec, work, site, at, dq)


@cute.jit
def give_last_dq(spec: cutlass.Constexpr, memory: Memory, work: BackwardWork, site: Site, now: Step):
    """The same of the block before, if there is one."""
    if now.number > 0:
        give_dq(spec, memory, work, site, preceding(work, site.job, now))


@cute.jit
def add_dq(spec: cutlass.Constexpr, work: BackwardWork, site: Site, now: Step, dq: cute.Tensor):
    """Adds this warp's part of dQ of one query block to the sums in global memory.

    A warp adds 128 bytes at a time, or 512 by vectors: sums lie as the accumulators do, and `backward_finish`
    brings them into order.
    """
    number = number_of(spec, work, site, now)
    order, parts = spec.sums, spec.row_parts
    if cutlass.const_expr(spec.config.deterministic):
        turn = work.sums.turns.iterator + 2 // parts * number
        if site.thread == 0:
            await_count(turn, turn_of(spec, work, site.job, query_of(work, site.job, now)))
        cute.arch.sync_threads()
    rows_of_share = site.dq_row // 16 * 32 + site.lane
    if cutlass.const_expr(parts > 1):
        rows_of_share += number % parts * (SHARE_THREADS // parts)
        number = number // parts
    first = (
        work.sums.dq.iterator
        + Int64(number) * order.size
        + (site.dq_column_warp * (2 * VECTOR * SHARE_THREADS) + rows_of_share * order.vector)
    )
    for n in cutlass.range_constexpr(cute.size(dq, mode=[2])):
        eight = n // 2 * 2 * spec.dq_column_warps + n % 2
        for m in cutlass.range_constexpr(cute.size(dq, mode=[1])):
            for i in cutlass.range_constexpr(0, VECTOR, order.vector):
                values = [dq[(j % 2, j // 2), m, n] for j in range(i, i + order.vector)]
                offset = (eight * VECTOR + i) * SHARE_THREADS + 32 * m * order.vector
                add_vector(first + offset, values)
    if cutlass.const_expr(spec.config.deterministic):
        cute.arch.sync_threads()
        if site.thread == 0:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.atomic_add(turn, Int32(1), sem="release", scope="gpu")
