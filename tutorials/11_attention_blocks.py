"""Step 11: visit only the key blocks that are needed. Causal, window, packed sequences, lists.

    python tutorials/11_attention_blocks.py

Adds:      visits: which blocks a tile of queries walks over, and which of them are masked element by element.
Reuses:    step 10's kernel, unchanged.
Measures:  against masking everything, cuDNN and flash-attn-4; TFLOPS count useful work only.

WHY
A mask says which keys a query sees. The easy way computes all scores and sets most of them to -inf: right,
and as slow as no mask at all. Under a causal mask half of the scores are wasted, under a window of 2048 of
32768 keys 94 %. But masks have structure. A row i sees a *range* of keys, low(i) <= j < high(i):

    causal            0                      i + 1
    window of w       max(i + 1 - w, 0)      i + 1
    packed, causal    start of i's sequence  i + 1

and neither edge ever moves to the left. So a tile of queries from row a to row b (included) needs

    any key    low(a) ... high(b)     the blocks to visit
    all keys   low(b) ... high(a)     blocks of which every row sees every key: no mask

          keys ->
    a   . . # # # # . . . . .        |  low(a) = 2, high(a) = 6
        . . . # # # # . . . .        |
    b   . . . . # # # # . . .        |  low(b) = 4, high(b) = 8
            [cut][who][cut]          a walk from the right: cut blocks, whole ones, cut blocks

The walk goes from the right, because only the right edge is there under every mask; step 10 peels its first
block and masks it in any case. What a block costs beside its products is the comparison of 128 x 128 places
with two edges, and only cut blocks pay it: one or two a tile and edge, however long the sequence is.

*Packed sequences* of different length lie behind each other in one long sequence, and rows look up their
bounds. A tile in which one sequence ends and the next one begins just has a wider range.

*Lists* say for each tile of queries which blocks to visit, in any order: what block-sparse attention is.
The kernel does not care where a block number comes from: all of this is three functions in place of three
others, compiled into the same kernel.
"""

from collections.abc import Callable
from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from reference.attention import Masking, allowed_by_lists

shared, step10 = common.load("shared_attention"), common.load("10_flash_attention")
Tile, Visit = step10.Tile, shared.Visit
WINDOW = 2048

# ---- kernel ------------------------------------------------------------------------------------------------


def causal_span(row: Int32, keys: Int32, extra: tuple) -> tuple:
    """Row i sees the keys 0 to i."""
    return Int32(0), cutlass.min(row + 1, keys)


def window_span(row: Int32, keys: Int32, extra: tuple) -> tuple:
    """Row i sees itself and the extra[0] - 1 keys before it."""
    return cutlass.max(row + 1 - extra[0], 0), cutlass.min(row + 1, keys)


def packed_span(row: Int32, keys: Int32, extra: tuple) -> tuple:
    """Row i sees the keys from where its sequence starts to itself. extra[0]: that start, int32 (rows,)."""
    row = cutlass.min(row, keys - 1)  # the last tile reaches over the end
    return extra[0][row], row + 1


def ranges(span: Callable) -> Visit:
    """The visit of a mask in which a row sees a range of keys; as many queries as keys."""

    def plan(at: tuple, keys: Int32, extra: tuple, tile: Tile) -> tuple:
        first, last = at[0] * tile.m, cutlass.min((at[0] + 1) * tile.m, keys) - 1
        (low_a, high_a), (low_b, high_b) = (span(row, keys, extra) for row in (first, last))
        begin, end = low_a // tile.n, cute.ceil_div(high_b, tile.n)
        count = end - begin
        cut = cutlass.min(end - high_a // tile.n, count)
        whole = cutlass.max(cutlass.min(end - cute.ceil_div(low_b, tile.n), count), cut)
        return count, cut, whole, end

    return Visit(plan, lambda i, plan, at, extra: plan[3] - 1 - i, span)


def everything_masked(span: Callable) -> Visit:
    """The easy way: all blocks, each masked element by element."""

    def plan(at: tuple, keys: Int32, extra: tuple, tile: Tile) -> tuple:
        count = cute.ceil_div(keys, tile.n)
        return count, count, count

    return Visit(plan, shared.EVERYTHING.block, span)


def listed(at: tuple, keys: Int32, extra: tuple, tile: Tile) -> tuple:
    """extra: (counts (heads, tiles), blocks (heads, tiles, entries)), int32; no count is 0."""
    count = extra[0][at[1], at[0]]
    return count, Int32(0), count


CAUSAL, SLIDING, PACKED = (ranges(span) for span in (causal_span, window_span, packed_span))
# Only whole blocks are listed: keys are a multiple of a block, and nothing is masked.
LISTS = Visit(listed, lambda i, plan, at, extra: extra[1][at[1], at[0], i], shared.EVERYTHING.span)


# ---- host --------------------------------------------------------------------------------------------------


def sequence_starts(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    """For each row of packed sequences of these lengths, the row at which its sequence starts: int32."""
    sizes = torch.tensor(lengths)
    return torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes).int().to(device)


def random_lists(length: int, tile: Tile, heads: int, kept: int, device: str) -> tuple:
    """`kept` different blocks for each tile of each head: counts (heads, tiles), blocks (heads, tiles, k)."""
    generator, tiles = torch.Generator().manual_seed(kept), length // tile.m
    draws = torch.rand(heads, tiles, length // tile.n, generator=generator)
    blocks = draws.topk(kept).indices.sort().values
    counts = torch.full((heads, tiles), kept)
    return counts.int().to(device), blocks.int().to(device)


# ---- check, measure ----------------------------------------------------------------------------------------


def check(lab: common.Lab) -> None:
    """Every visit, and the easy way, where tiles are ragged and edges cut."""
    n, d, rows = lab.pick((128, 128, 2000), (64, 64, 200))
    tile, lengths = Tile(n, d, lab.pick(3, 2)), (rows - 150, 1, 149)
    tensors, starts = shared.inputs(lab, rows, rows, lab.pick(2, 1), d), sequence_starts(lengths, lab.device)
    places = torch.arange(rows, device=lab.device)
    causal = (places[:, None] >= places) & (places >= starts[:, None])
    masks = {
        "causal": (CAUSAL, (), Masking(right=0)),
        "causal, everything masked": (everything_masked(causal_span), (), Masking(right=0)),
        "window of 100": (SLIDING, (100,), Masking(left=99, right=0)),
        "packed": (PACKED, (starts,), Masking(allowed=causal[None, None])),
    }
    for name, (visit, extra, masking) in masks.items():
        call = partial(step10.call, extra=extra or None, tile=tile, visit=visit)
        shared.check(lab, f"{name}, S {rows}", call, tensors, masking)
    rows = 4 * tile.m
    counts, blocks = random_lists(rows, tile, 2, 3, lab.device)
    allowed = allowed_by_lists((None, None, counts[None], blocks[None]), (tile.m, n), (1, 2, rows, rows))
    call = partial(step10.call, extra=(counts, blocks), tile=tile, visit=LISTS)
    masking = Masking(allowed=allowed.to(lab.device))
    shared.check(lab, f"lists, S {rows}", call, shared.inputs(lab, rows, rows, 2, d), masking)


def measure(bench: common.Bench) -> None:
    """Each mask, with the visit that it allows and without."""
    peers, tile = shared.peers, Tile()
    for length, heads in ((4096, 64), (16384, 16)):
        q, k, v = shared.problem(length, heads, tile.d)
        own = partial(step10.call, q, k, v, torch.empty_like(q), tile=tile)
        calls = {
            "step 10, everything masked": partial(own, visit=everything_masked(causal_span)),
            "step 11, causal": partial(own, visit=CAUSAL),
            **peers(q, k, v, causal=True),
        }
        flops = 2.0 * heads * length**2 * tile.d
        bench.compare(f"causal, {heads} heads, S {length}, D 128", calls, flops=flops, baseline="cuDNN")
    length, heads = 32768, 8
    q, k, v = shared.problem(length, heads, tile.d)
    own = partial(step10.call, q, k, v, torch.empty_like(q), tile=tile)
    calls = {
        "step 10, everything masked": partial(own, (WINDOW,), visit=everything_masked(window_span)),
        "step 11, window": partial(own, (WINDOW,), visit=SLIDING),
        **shared.window_peer(q, k, v, WINDOW),
    }
    flops = 4.0 * heads * tile.d * WINDOW * (length - WINDOW / 2)
    title = f"causal window of {WINDOW}, 8 heads, S {length}, D 128"
    bench.compare(title, calls, flops=flops, baseline="step 11, window")
    lengths = (500, 8192, 1024, 3000, 6000, 2048, 7000, 5004)
    starts = sequence_starts(lengths, "cuda")
    calls = {
        "step 10, everything masked": partial(own, (starts,), visit=everything_masked(packed_span)),
        "step 11, packed": partial(own, (starts,), visit=PACKED),
    }
    flops = sum(2.0 * heads * tile.d * n**2 for n in lengths)
    title = "packed, causal, 8 sequences of 500 to 8192, 8 heads, D 128"
    bench.compare(title, calls, flops=flops, baseline="step 11, packed")
    lists = random_lists(length, tile, heads, 32, "cuda")
    calls = {
        "step 10, all 256 blocks": own,
        "step 11, lists": partial(own, lists, visit=LISTS),
        **shared.lists_peer(q, k, v, lists, (tile.m, tile.n)),
    }
    work = dict.fromkeys(calls, 4.0 * heads * tile.d * length * 32 * tile.n)
    title = f"32 random blocks of 128 × 128 a tile, 8 heads, S {length}, D 128"
    bench.compare(title, calls, flops=work, baseline="step 11, lists")


# ---- takeaways ---------------------------------------------------------------------------------------------
# * A visit is a count, a function from position to block, and a range of keys a row: the kernel is one.
# * Only blocks that an edge cuts are masked; whole blocks cost what they cost without a mask. So the gain can
#   be more than what is left out: up to 2.3 times for the half of a causal mask.
# * Tiles differ in length by now. Which SM gets which tile starts to matter: `kernels_dsl.attention` hands
#   them out one by one, the longest first (`tile_queue.py` and `query_tiles.py` in `blocks/attention`).
# * exercise: python tutorials/exercises/11.py

if __name__ == "__main__":
    common.main(check, measure)
