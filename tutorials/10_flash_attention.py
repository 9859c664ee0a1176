"""Step 10: attention in one kernel. An online softmax between two WGMMAs, P in registers.

    python tutorials/10_flash_attention.py

Adds:      two products chained through registers, the online softmax, softmax beside the tensor cores.
Reuses:    step 7's roles and ring, step 5's accumulator layout (A from registers), 9's turns, 6's store.
Measures:  against cuDNN, flash-attn-4, and PyTorch's separate kernels: time, memory, error.

WHY
O = softmax(scale Q K^T) V, row by row: p_j = exp(s_j - max s), o = sum p_j v_j / sum p_j. With a kernel
for each part the S x S scores go through memory several times; 16384² of them are 512 MB a head.

*Online softmax.* A tile of 128 queries walks over blocks of 128 keys and keeps for each row the largest
score so far m, the sum l and the unnormalised output O. A block with a larger maximum m' makes all older
terms too large by the same factor, so that it is enough to correct what was summed:

    c = exp(m - m')    l = c l + sum exp(s_j - m')    O = c O + exp(s - m') V    at the end: O / l

The scores of a block live and die in registers. The hardware has exp2: exp(scale s) = exp2(scale log2(e) s).

*P in registers.* S = Q K^T leaves 64 x 128 scores in a warpgroup's accumulators. In each 8 x 8 of them thread
t has row t / 4 and columns 2 (t % 4) + {0, 1} (step 5's picture). WGMMA takes operand A from registers too,
64 x 16 at a time, arranged in just this way: P needs a conversion to 16 bits and no move. The four threads
that share a row exchange maxima by shuffles; sums only once, at the end.

*Overlap.* exp2 runs on a unit that does 16 a cycle and SM, so the softmax of a block takes about half as long
as its products. A warpgroup issues the scores of the next block *before* the output of this one, and takes
the softmax of the former while the tensor cores sum up the latter:

    tensor cores  S1 = Q K1 | O += P0 V0 | S2 = Q K2 | O += P1 V1 | ...
    registers      wait S1  | P1 = exp S1, wait, c O |  P2 = exp S2, wait, c O | ...

Two warpgroups also help each other: each waits for its turn (step 9) before it issues, so that one's softmax
runs beside the other's products. A stage of the ring is K and V of one block. Which blocks a tile visits
is said by three functions (`Visit`), which step 11 is about. Here: all, the last one first, its end masked.
"""

import math
from dataclasses import dataclass
from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_dsl.blocks.attention.softmax import choose, quad_max, quad_sum, rescale, rows_and_columns
from kernels_dsl.blocks.hw.pipeline import consumer_state, producer_state, sync_after_init
from kernels_dsl.blocks.hw.wgmma import issue_product, make_warpgroup_mma
from lowering import jit
from reference.attention import Masking

step6, shared = common.load("06_gemm_simple"), common.load("shared_attention")
WARPGROUP = 128


@dataclass(frozen=True)
class Tile:
    """Keys of a block, head dimension, stages of the ring, whether softmax and products overlap, queries."""

    n: int = 128
    d: int = 128
    stages: int = 3
    overlap: bool = True
    m: int = 128  # 64 a consumer warpgroup


# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def attention_kernel(
    mmas: tuple,  # of S = Q K^T (64 x n) and of O = P V (64 x d)
    loads: tuple,  # (atom, coordinates) of Q (queries, d, L), K (keys, d, L), V (d, keys, L)
    layouts: tuple,  # swizzled: (m, d, 1), (n, d, stages), (d, n, stages)
    mO: cute.Tensor,  # (queries, d, L)
    work: tuple,  # (scale log2(e), keys, what the visit reads)
    constants: cutlass.Constexpr,  # (tile, visit)
):
    """One tile of queries of one head; L counts the heads of all sequences."""
    tile, _ = constants
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rings, s_tiles = shared.allocate(layouts, tile)
    sync_after_init((1, 1))
    group = cute.arch.make_warp_uniform(warp // 4)
    few, many = shared.registers(tile)  # of a thread: 24 and 240, as in step 7
    if group == tile.m // 64:
        cute.arch.setmaxregister_decrease(few)
        if warp == tile.m // 16:
            produce(rings, loads, s_tiles, work, constants)
    else:
        cute.arch.setmaxregister_increase(many)
        consume(rings, mmas, s_tiles, work, mO, group, constants)


@cute.jit
def produce(rings, loads: tuple, s_tiles: tuple, work: tuple, constants: cutlass.Constexpr):
    """One warp: Q, then K and V of each block of the visit, both into one stage."""
    tile, visit = constants
    m, head, _ = cute.arch.block_idx()
    at, (_, keys, extra) = (m, head), work
    q, k, v = shared.partitions(loads, s_tiles, head, tile)  # (atom, shared memory, tiles in memory)
    shared.load(rings[0], producer_state(1), (q,), m)
    state = producer_state(tile.stages)
    plan = visit.plan(at, keys, extra, tile)
    for i in cutlass.range(plan[0], unroll=1):
        state = shared.load(rings[1], state, (k, v), visit.block(i, plan, at, extra))


@cute.jit
def consume(rings, mmas, s_tiles, work: tuple, mO: cute.Tensor, group: Int32, constants: cutlass.Constexpr):
    """One warpgroup: 64 rows of the output."""
    tile, visit = constants
    m, head, _ = cute.arch.block_idx()
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    at, row = (m, head), m * tile.m + group * 64
    parts = shared.fragments(mmas, s_tiles, tile, group)  # O = 0, m = -inf, l = 0
    q, k, v, out, p, (_, row_sum, correction) = parts
    shared.first_turn(tile, group)
    plan = visit.plan(at, work[1], work[2], tile)
    place = (plan, at, row + thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2)
    state = consumer_state(tile.stages)
    behind = state.clone()  # of the block whose output comes next
    rings[0].consumer_wait(consumer_state(1))
    rings[1].consumer_wait(state)
    scores = cute.make_rmem_tensor(mmas[0].partition_shape_C((64, tile.n)), Float32)
    issue_product(mmas[0], scores, q, k[None, None, None, state.index], False)
    warpgroup.wait_group(0)
    shared.mask(scores, Int32(0), work, place, constants)
    soften(scores, parts, work[0])
    to_operand(scores, p)
    state.advance()
    one, two = cutlass.max(plan[1], 1), cutlass.max(plan[2], 1)  # block 0 is done
    for begin, end, masked in ((Int32(1), plan[1], True), (one, plan[2], False), (two, plan[0], True)):
        for i in cutlass.range(begin, end, unroll=1):
            where = (state, behind, i)
            state, behind = next_block(rings[1], mmas, parts, where, (work, place, group), constants, masked)
    issue_product(mmas[1], out, p, v[None, None, None, behind.index], True)
    warpgroup.wait_group(0)
    rings[1].consumer_release(behind)
    for r in cutlass.range_constexpr(2):
        total = quad_sum(row_sum[r])  # over the four threads of the row
        correction[r] = choose(total == 0.0, 0.0, 1.0 / total)
    rescale(rows_and_columns(out), correction)
    step6.store_accumulators(out, mO[None, None, head], (row, 0), thread)


@cute.jit
def next_block(ring, mmas, parts, where, context, constants: cutlass.Constexpr, masked: cutlass.Constexpr):
    """Scores and softmax of block i, beside the output of the block behind it."""
    (q, k, v, out, p, rows), (state, behind, i), (work, place, group) = parts, where, context
    tile = constants[0]
    scores = cute.make_rmem_tensor(mmas[0].partition_shape_C((64, tile.n)), Float32)
    ring.consumer_wait(state)
    shared.wait_turn(tile, group)
    issue_product(mmas[0], scores, q, k[None, None, None, state.index], False)
    issue_product(mmas[1], out, p, v[None, None, None, behind.index], True)
    shared.give_turn(tile, group)
    warpgroup.wait_group(1 if tile.overlap else 0)  # the scores are there; the output need not be
    if cutlass.const_expr(masked):
        shared.mask(scores, i, work, place, constants)
    soften(scores, parts, work[0])
    warpgroup.wait_group(0)
    ring.consumer_release(behind)
    rescale(rows_and_columns(out), rows[2])
    to_operand(scores, p)
    state.advance()
    behind.advance()
    return state, behind


def soften(scores: cute.Tensor, parts: tuple, scale_log2: Float32) -> None:
    """The online softmax: scores become exp(s - m'), and m, l and c follow. Not jitted: Python unrolls."""
    view, (row_max, row_sum, correction) = rows_and_columns(scores), parts[5]
    columns = range(cute.size(view) // 2)
    for r in range(2):
        new = quad_max(shared.fold([row_max[r], *(view[r, c] for c in columns)], cute.arch.fmax))
        base = choose(new == -math.inf, 0.0, new) * scale_log2  # no key so far: nothing to subtract
        for c in columns:
            view[r, c] = cute.math.exp2(view[r, c] * scale_log2 - base, fastmath=True)
        correction[r] = cute.math.exp2(row_max[r] * scale_log2 - base, fastmath=True)  # first block: 0
        total = shared.fold([view[r, c] for c in columns], lambda x, y: x + y)
        row_sum[r] = row_sum[r] * correction[r] + total
        row_max[r] = new


def to_operand(scores: cute.Tensor, p: cute.Tensor) -> None:
    """P, rounded to bfloat16: element by element in the same order."""
    cute.make_tensor(p.iterator, scores.layout).store(scores.load().to(cutlass.BFloat16))


# ---- host --------------------------------------------------------------------------------------------------


@jit
def attention(
    mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, scale: Float32, extra: tuple | None,
    stream, tile: cutlass.Constexpr, visit: cutlass.Constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V in bfloat16, all (rows, d, L) with d = tile.d contiguous."""
    major, dtype, keys = OperandMajorMode, cutlass.BFloat16, mK.shape[0]
    mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0, 2]))  # (d, keys, L): B of P V
    loads, layouts = shared.set_up((mQ, mK, mV), tile)
    mma_qk = make_warpgroup_mma(dtype, major.K, major.K, tile.n)
    mma_pv = make_warpgroup_mma(dtype, major.K, major.MN, tile.d, warpgroup.OperandSource.RMEM)
    work = (scale * math.log2(math.e), keys, extra)
    kernel = attention_kernel((mma_qk, mma_pv), loads, layouts, mO, work, (tile, visit))
    grid = (cute.ceil_div(mQ.shape[0], tile.m), mQ.shape[2], 1)
    kernel.launch(grid=grid, block=(2 * tile.m + WARPGROUP, 1, 1), min_blocks_per_mp=1, stream=stream)


# ---- check, measure ----------------------------------------------------------------------------------------


def call(q, k, v, o, extra=None, *, tile: Tile, visit: shared.Visit = shared.EVERYTHING) -> torch.Tensor:
    """Attention of (1, rows, heads, d) tensors into `o`."""
    views = [x[0].transpose(1, 2) for x in (q, k, v, o)]
    attention(*views, 1.0 / math.sqrt(tile.d), extra, tile=tile, visit=visit)
    return o


def check(lab: common.Lab) -> None:
    """Ragged lengths, with and without overlap."""
    for rows, keys, d in lab.pick(((1000, 2056, 128), (4096, 4096, 64)), ((70, 200, 64),)):
        for overlap in (False, True):
            tile = Tile(lab.pick(128, 64), d, lab.pick(3, 2), overlap)
            name = f"{rows} × {keys}, D {d}" + ", overlap" * overlap
            shared.check(lab, name, partial(call, tile=tile), shared.inputs(lab, rows, keys, 2, d), Masking())


def measure(bench: common.Bench) -> None:
    """Gains of overlap and of 192 queries; the peers; the cost of separate kernels; memory and errors."""
    for length, heads, d in ((4096, 64, 128), (16384, 16, 128), (4096, 128, 64)):
        tiles = {"one after the other": Tile(d=d, overlap=False), "overlap": Tile(d=d)}
        if d == 64:
            tiles["192 queries"] = Tile(d=d, m=192)
        q, k, v = shared.problem(length, heads, d)
        own = partial(call, q, k, v, torch.empty_like(q))
        calls = {f"step 10, {name}": partial(own, tile=tile) for name, tile in tiles.items()}
        calls.update(shared.peers(q, k, v))
        if length == 4096:
            calls["separate kernels"] = partial(shared.separate, q, k, v)
        title = f"{heads} heads, {length} × {length}, D {d}, bfloat16"
        bench.compare(title, calls, flops=4.0 * heads * length**2 * d, baseline="cuDNN")
    shared.costs(bench, lambda q, k, v: call(q, k, v, torch.empty_like(q), tile=Tile()))


# ---- takeaways ---------------------------------------------------------------------------------------------
# * The S x S scores never exist: a row needs its maximum, its sum and its output, corrected as it goes.
# * Accumulators of one WGMMA are operand A of the next after a conversion, thread by thread.
# * The softmax hides beside products if the next scores are issued first, and if warpgroups take turns. Two
#   warpgroups overlap a good deal without that: it gains 3 to 4 % at d = 128, and 11 % at d = 64, where there
#   are registers for a third warpgroup, which gains 23 % more.
# * `kernels_dsl.attention` is this kernel with a persistent grid, a TMA store, and more kinds of masks.
# * exercise: python tutorials/exercises/10.py

if __name__ == "__main__":
    common.main(check, measure)
