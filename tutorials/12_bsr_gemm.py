"""Step 12: the producer follows a list. A block-sparse GEMM.

    python tutorials/12_bsr_gemm.py

Adds:      an index-driven producer: K tiles come from a list, not from a counter; rows sorted by length.
Reuses:    step 7's shared memory and consumers, unchanged; step 6's store.
Measures:  against dense cuBLAS, from 1 block in 64 to all: where sparsity starts to pay; sorted against not.

WHY
A matrix of which most blocks are zero need not be multiplied in full. Block compressed sparse rows (BSR)
keeps the other blocks and says where they were:

    A   | . # . # |     first    0  2  3  6          row r keeps the entries first[r] ... first[r + 1] - 1
        | # . . . |     columns  1  3 | 0 | 0 1 3    of each entry, the block column
        | # # . # |     values   one 128 x 128 block an entry, in the same order

A tile of D = A @ B has a loop over K. Dense, its tile number k needs A's tile (m, k) and B's (k, n). Here the
loop runs over the row's entries, and entry e needs

    of A   values[e]             what is kept lies end to end: no gaps to skip
    of B   rows columns[e] * 128 to columns[e] * 128 + 127, as ever

So only the producer changes, and in it two coordinates. The consumers see stages fill and do not know why.
That is what warp roles are for: where tiles come from, and what is done with them, are different files.

What can be gained is bounded: with a quarter of the blocks a quarter of the products. What is lost: a dense
GEMM shares B's tiles among the CTAs of a column at the same time, here each row wants other ones. A panel of
256 columns of B is 4 MB, which L2 holds, so the grid goes down the rows first: one panel at a time.

*Rows of uneven length.* The time of a CTA is its row's length. If a long row starts last, all wait for it.
Started longest first, the short ones fill the gaps at the end ("longest processing time first" is at most a
third worse than the best schedule: Graham, 1969). So CTA y takes row order[y], with the rows sorted.
"""

from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.pipeline import make_tma_ring, producer_state, sync_after_init
from lowering import jit

step6, step7 = common.load("06_gemm_simple"), common.load("07_gemm_warp_specialized")
Tile = step7.Tile
BLOCK = 128  # rows and columns of a block; a tile has as many rows

# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def bsr_kernel(
    tiled_mma: cute.TiledMma,
    loads: tuple,  # (atom of the values, their coordinates (entries * BLOCK, BLOCK), the same of B (N, K))
    layouts: tuple,
    mD: cute.Tensor,  # (M, N)
    lists: tuple,  # order (rows), first (rows + 1), columns (entries)
    tile: cutlass.Constexpr,
):
    """Step 7's kernel, but for the row, which is looked up, and the number of K tiles, which differs."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    barriers, sA, sB = step7.allocate(layouts, tile)
    ring = make_tma_ring(barriers, tile.stages, tile.stage_bytes, step7.CONSUMERS * 4, (1, 1))
    sync_after_init((1, 1))
    order, first, _ = lists
    row = order[cute.arch.block_idx()[0]]
    begin, end = first[row], first[row + 1]
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == step7.CONSUMERS:
        cute.arch.setmaxregister_decrease(24)
        if warp == step7.CONSUMERS * 4:
            produce(ring, loads, (sA, sB), (begin, end, lists[2]), tile)
    else:
        cute.arch.setmaxregister_increase(240)
        consume(ring, tiled_mma, (sA, sB), mD, (row, end - begin), tile)


@cute.jit
def produce(ring, loads: tuple, s_tiles: tuple, entries: tuple, tile: cutlass.Constexpr):
    """For each entry of the row: its block, and the rows of B that the block meets."""
    load_a, tma_a, load_b, tma_b = loads
    begin, end, columns = entries
    gA = cute.local_tile(tma_a, (tile.m, tile.k), (None, None))  # (bM, bK, entries, pieces of a block)
    gB = cute.local_tile(tma_b, (tile.n, tile.k), (cute.arch.block_idx()[1], None))  # (bN, bK, k_tiles)
    tAsA, tAgA = tma.load_partition(load_a, gA, s_tiles[0], cute.make_layout(1), Int32(0))
    tBsB, tBgB = tma.load_partition(load_b, gB, s_tiles[1], cute.make_layout(1), Int32(0))
    state = producer_state(tile.stages)
    column = columns[cutlass.min(begin, end - 1)]
    for entry in cutlass.range(begin, end, unroll=1):
        following = columns[cutlass.min(entry + 1, end - 1)]  # on its way while this one's loads are issued
        for piece in cutlass.range_constexpr(BLOCK // tile.k):
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            k = column * (BLOCK // tile.k) + piece
            cute.copy(load_a, tAgA[None, entry, piece], tAsA[None, state.index], tma_bar_ptr=full)
            cute.copy(load_b, tBgB[None, k], tBsB[None, state.index], tma_bar_ptr=full)
            state.advance()
        column = following


@cute.jit
def consume(ring, tiled_mma, s_tiles: tuple, mD, work: tuple, tile: cutlass.Constexpr):
    """One warpgroup: half of the rows of the tile. `work`: the block row, and how many blocks it keeps."""
    row, kept = work
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
    thread = cute.arch.thread_idx()[0] % step7.WARPGROUP
    acc, tCrA, tCrB = step7.fragments(tiled_mma, s_tiles, tile, group, thread)
    k_tiles = kept * (BLOCK // tile.k)
    _, release = step7.issue_all(
        ring, step7.consumer_state(tile.stages), tiled_mma, (acc, tCrA, tCrB), k_tiles
    )
    step7.finish(ring, release)
    origin = (row * tile.m + group * (tile.m // step7.CONSUMERS), cute.arch.block_idx()[1] * tile.n)
    step6.store_accumulators(acc, mD, origin, thread)


# ---- host --------------------------------------------------------------------------------------------------


@jit
def bsr_gemm(
    values: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, lists: tuple, stream, tile: cutlass.Constexpr
):
    """D (M, N) = A @ B (N, K).T in bfloat16. values: (entries * BLOCK, BLOCK), the kept blocks end to end.

    lists: int32 order (rows), first (rows + 1), columns (entries). Each row keeps one block at least.
    """
    tiled_mma, loads, layouts = step7.set_up(values, mB, tile)
    bsr_kernel(tiled_mma, loads, layouts, mD, lists, tile).launch(
        grid=(cute.size(lists[0]), cute.ceil_div(mD.shape[1], tile.n), 1),
        block=((step7.CONSUMERS + 1) * step7.WARPGROUP, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


def lists_of(mask: torch.Tensor, longest_first: bool = True) -> tuple:
    """(order, first, columns) of a mask (rows, columns) of kept blocks. On the mask's device, int32."""
    lengths = mask.sum(1)
    first = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    order = torch.argsort(lengths, descending=True, stable=True)
    if not longest_first:
        order = torch.arange(len(lengths), device=mask.device)
    return order.int(), first, mask.nonzero()[:, 1].int()


def dense(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A (rows * BLOCK, columns * BLOCK), with zeros where nothing is kept."""
    blocks = values.new_zeros(*mask.shape, BLOCK, BLOCK)
    blocks[mask] = values.view(-1, BLOCK, BLOCK)
    return blocks.transpose(1, 2).reshape(mask.shape[0] * BLOCK, -1)


# ---- check, measure ----------------------------------------------------------------------------------------


def uniform(rows: int, columns: int, kept: int, seed: int = 0) -> torch.Tensor:
    """A mask with `kept` blocks in each row, anywhere."""
    draw = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    return draw >= draw.sort(1, descending=True).values[:, kept - 1 : kept]


def uneven(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A mask of which the last row is full, and earlier ones ever shorter, one block at least."""
    kept = (columns / torch.arange(rows, 0, -1)).ceil().long()
    draw = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    return draw.argsort(1).argsort(1) < kept[:, None]


def check(lab: common.Lab) -> None:
    """Integers, on rows of equal and of uneven length; B holds NaN where no kept block meets it."""
    tile = lab.pick(Tile(), Tile(128, 64, 64, 3))
    rows, columns, n = lab.pick((16, 24, 1032), (3, 4, 72))
    masks = {"uniform": uniform(rows, columns, max(columns // 4, 2)), "uneven": uneven(rows, columns)}
    masks["a column that nobody keeps"] = masks["uniform"].clone()
    masks["a column that nobody keeps"][:, 0] = False
    masks["a column that nobody keeps"][:, 1] = True
    for name, mask in masks.items():
        mask = mask.to(lab.device)
        values = lab.integers(int(mask.sum()) * BLOCK, BLOCK, dtype=torch.bfloat16)
        b = lab.integers(n, columns * BLOCK, dtype=torch.bfloat16)
        expected = dense(values, mask).double() @ b.double().T
        b.view(n, columns, BLOCK)[:, ~mask.any(0)] = float("nan")
        d = lab.poison(rows * BLOCK, n, dtype=torch.bfloat16)
        lab.launch(bsr_gemm, values, b, d, lists_of(mask), tile=tile)
        lab.equal(f"{rows}×{columns} blocks, N {n}, {name}", d, expected)


def measure(bench: common.Bench) -> None:
    """8192³: from one block in 64 to all; then a pattern of uneven rows, sorted and not."""
    size, blocks = 8192, 64
    b, d = common.random(size, size), torch.empty(size, size, dtype=torch.bfloat16, device="cuda")
    for kept in (1, 4, 16, 32, 48, 64):
        mask = uniform(blocks, blocks, kept).cuda()
        values = common.random(int(mask.sum()) * BLOCK, BLOCK)
        a, lists = dense(values, mask), lists_of(mask)
        calls = {"step 12": partial(bsr_gemm, values, b, d, lists, tile=Tile())}
        calls["cuBLAS, dense"] = partial(torch.mm, a, b.T, out=d)
        flops = 2.0 * values.numel() * size
        bench.compare(f"8192³, {kept} of {blocks} blocks kept", calls, flops=flops, baseline="cuBLAS, dense")
    mask = uneven(blocks, blocks).cuda()
    values = common.random(int(mask.sum()) * BLOCK, BLOCK)
    calls = {
        "longest first": partial(bsr_gemm, values, b, d, lists_of(mask), tile=Tile()),
        "as they come": partial(bsr_gemm, values, b, d, lists_of(mask, False), tile=Tile()),
    }
    flops = 2.0 * values.numel() * size
    bench.compare("8192³, rows of uneven length", calls, flops=flops, baseline="as they come")


# ---- takeaways ---------------------------------------------------------------------------------------------
# * With roles apart, sparsity is a producer that follows a list. Consumers, ring and store are step 7's.
# * Useful work counts: TFLOPS of kept blocks. Where dense time divided by sparse time passes 1, it pays.
# * `kernels_dsl.bsr_gemm` adds what this step leaves out: empty rows, small blocks (on WGMMA's N), multicast,
#   persistence and a TMA store: kernels_dsl/kernels/bsr/sm90.py.
# * exercise: python tutorials/exercises/12.py

if __name__ == "__main__":
    common.main(check, measure)
