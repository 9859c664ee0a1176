"""Parts of steps 10 and 11 that steps 5 and 7 have explained; inputs, check against float64, peers' calls.

In a kernel: rings and tiles in shared memory, TMA partitions, WGMMA fragments. `tile` has m, n, d, stages.
On the host: tensors are (1, rows, heads, d).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from kernels_dsl.blocks.attention.softmax import choose, rows_and_columns
from kernels_dsl.blocks.hw import barriers, tma
from kernels_dsl.blocks.hw.layouts import staged_smem_layout
from kernels_dsl.blocks.hw.pipeline import make_tma_ring
from reference.attention import Masking, attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WARPGROUP = 128


@dataclass(frozen=True)
class Visit:
    """Key blocks that a tile of queries visits, and keys of them that a row sees: three traced functions.

    `plan(at, keys, extra, tile)`: (count, cut, whole, ...) for the tile `at` = (number, head). `block(i,
    plan, at, extra)`: the i-th of `count` blocks. `span(row, keys, extra)`: the row sees the keys from low to
    high; this is looked at for i < cut and i >= whole only.
    """

    plan: Callable
    block: Callable
    span: Callable


def all_blocks(at: tuple, keys: Int32, extra: tuple | None, tile: Any) -> tuple:
    """The last block comes first, and is cut: it may reach over the end of the keys."""
    count = cute.ceil_div(keys, tile.n)
    return count, Int32(1), count


EVERYTHING = Visit(
    all_blocks, lambda i, plan, at, extra: plan[0] - 1 - i, lambda row, keys, extra: (Int32(0), keys)
)


def registers(tile: Any) -> tuple[int, int]:
    """Of a thread of the producer and of a consumer: 65536 in all, for two consumer warpgroups or three."""
    return (24, 240) if tile.m == 128 else (32, 160)


def set_up(operands: tuple, tile: Any) -> tuple:
    """(TMA loads, swizzled layouts in shared memory) of Q (queries, d, L), K (keys, d, L), V (d, keys, L).

    As `set_up` of step 7: boxes (m, d), and (n, d), (d, n) in `stages`.
    """
    boxes, stages = ((tile.m, tile.d), (tile.n, tile.d), (tile.d, tile.n)), (1, tile.stages, tile.stages)
    majors = OperandMajorMode.K, OperandMajorMode.K, OperandMajorMode.MN
    layouts = tuple(
        staged_smem_layout(cutlass.BFloat16, box, count, major)
        for box, count, major in zip(boxes, stages, majors)
    )
    return tuple(tma.make_load_atom(*each) for each in zip(operands, layouts, boxes)), layouts


def allocate(layouts: tuple, tile: Any) -> tuple:
    """Rings of Q (one stage) and of K with V; their tiles in shared memory."""
    smem = cutlass.memory.SmemAllocator()
    words = smem.allocate_array(cutlass.Int64, 2 + 2 * tile.stages)
    s_tiles = tuple(
        smem.allocate_tensor(cutlass.BFloat16, x.outer, byte_alignment=1024, swizzle=x.inner) for x in layouts
    )
    q_ring = make_tma_ring(words, 1, tile.m * tile.d * 2, tile.m // 16, (1, 1))
    kv_ring = make_tma_ring(words + 2, tile.stages, 2 * tile.n * tile.d * 2, tile.m // 16, (1, 1))
    return (q_ring, kv_ring), s_tiles


def partitions(loads: tuple, s_tiles: tuple, head: Int32, tile: Any) -> list:
    """(atom, shared (TMA, stages), global (TMA, tiles)) of Q, K and V of one head, as in step 7."""
    boxes = ((tile.m, tile.d), (None, 0)), ((tile.n, tile.d), (None, 0)), ((tile.d, tile.n), (0, None))
    parts = []
    for (atom, tensor), (box, walk), s_tile in zip(loads, boxes, s_tiles):
        g_tiles = cute.local_tile(tensor[None, None, head], box, walk)  # (box, tiles)
        parts.append((atom, *tma.load_partition(atom, g_tiles, s_tile, cute.make_layout(1), Int32(0))))
    return parts


@cute.jit
def load(ring, state, parts: tuple, number: Int32):
    """Tile `number` of each of `parts` into the ring's next stage; the state after it."""
    ring.producer_acquire(state)
    full = ring.producer_get_barrier(state)
    for atom, shared, source in parts:
        cute.copy(atom, source[None, number], shared[None, state.index], tma_bar_ptr=full)
    state.advance()
    return state


def fragments(mmas: tuple, s_tiles: tuple, tile: Any, group: Int32) -> tuple:
    """Descriptors of Q's 64 rows, of K and V; registers of O, P and (m, l, c) of a thread's two rows.

    No key was seen yet: O and l are 0, m is -inf.
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    sQ = cute.local_tile(s_tiles[0], (64, tile.d), (group, 0, None))  # (64, d, 1)
    qk, pv = (mma.get_slice(thread) for mma in mmas)
    q = mmas[0].make_fragment_A(qk.partition_A(sQ))[None, None, None, 0]  # (MMA, 1, MMA_K)
    k = mmas[0].make_fragment_B(qk.partition_B(s_tiles[1]))  # (MMA, 1, MMA_K, stages)
    v = mmas[1].make_fragment_B(pv.partition_B(s_tiles[2]))  # (MMA, 1, MMA_K, stages)
    out = cute.make_rmem_tensor(mmas[1].partition_shape_C((64, tile.d)), Float32)
    # 16 columns of operand A: (neighbour, row + 8, column + 8), in the order that accumulators have.
    p = cute.make_layout(((2, 2, 2), 1, tile.n // 16), stride=((1, 2, 4), 0, 8))
    rows = tuple(cute.make_rmem_tensor(2, Float32) for _ in range(3))
    out.fill(0.0)
    rows[0].fill(-math.inf)
    rows[1].fill(0.0)
    return q, k, v, out, cute.make_rmem_tensor(p, cutlass.BFloat16), rows


@cute.jit
def first_turn(tile: cutlass.Constexpr, group: Int32):
    """Turns as in step 9, where products overlap: group 0 begins."""
    if cutlass.const_expr(tile.overlap):
        if group == tile.m // 64 - 1:
            barriers.give_turn(barriers.NamedBarrier.MMA_ORDER, Int32(0))


@cute.jit
def wait_turn(tile: cutlass.Constexpr, group: Int32):
    """Until the group before this one has issued its products."""
    if cutlass.const_expr(tile.overlap):
        barriers.wait_turn(barriers.NamedBarrier.MMA_ORDER, group)


@cute.jit
def give_turn(tile: cutlass.Constexpr, group: Int32):
    """To the next group."""
    if cutlass.const_expr(tile.overlap):
        barriers.give_turn(barriers.NamedBarrier.MMA_ORDER, (group + 1) % (tile.m // 64))


# Not jitted: Python runs the loops of these functions while it traces, so that they are unrolled.


def mask(scores: cute.Tensor, i: Int32, work: tuple, place: tuple, constants: tuple) -> None:
    """Keys of block i that a row does not see get the score -inf."""
    (tile, visit), (_, keys, extra), (plan, at, row, column) = constants, work, place
    first = visit.block(i, plan, at, extra) * tile.n + column
    view = rows_and_columns(scores)  # (2, columns of this thread): step 5's picture as two rows
    for r in range(2):
        low, high = (edge - first for edge in visit.span(row + 8 * r, keys, extra))
        for c in range(tile.n // 4):
            offset = 8 * (c // 2) + c % 2
            view[r, c] = choose((low <= offset) & (offset < high), view[r, c], -math.inf)


def fold(values: list, combine) -> Float32:
    """Combines pairs, then pairs of pairs: no operation waits for the one before it."""
    while len(values) > 1:
        pairs = [combine(x, y) for x, y in zip(values[::2], values[1::2])]
        values = pairs + values[2 * len(pairs) :]
    return values[0]


def inputs(lab: common.Lab, rows: int, keys: int, heads: int, d: int) -> Tensors:
    """q, k, v, N(0, 1), the same each time."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(1, n, heads, d, generator=generator).to(lab.device, torch.bfloat16)
        for n in (rows, keys, keys)
    )
    return q, k, v


def check(lab: common.Lab, name: str, call: Callable[..., Any], tensors: Tensors, masking: Masking) -> None:
    """`call(q, k, v, out)` against float64, with the error of PyTorch in bfloat16 as the measure."""
    q, k, v = tensors
    out = lab.poison(*q.shape, dtype=q.dtype)
    if lab.where == common.COMPILE:
        print(f"  left out  {name}   (no GPU and no emulator to run it on)")
        return
    lab.launch(call, q, k, v, out)
    expected, peer = (attention(q, k, v, masking, dtype=t)[0] for t in (torch.float64, q.dtype))
    lab.close(name, *(x.transpose(1, 2) for x in (out, expected, peer)))


def problem(length: int, heads: int, d: int) -> Tensors:
    """q, k, v on the GPU."""
    q, k, v = (common.random(1, length, heads, d) for _ in range(3))
    return q, k, v


def peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> dict[str, Any]:
    """cuDNN by way of PyTorch, and flash-attn-4 where it is installed."""
    from benchmarks import attention_calls

    calls = {"cuDNN": partial(attention_calls.sdpa(q, k, v, "cudnn", causal), 0)}
    if importlib.util.find_spec("flash_attn") is not None:
        calls["flash-attn-4"] = partial(attention_calls.flash4(q, k, v, causal=causal), 0)
    return calls


def separate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in a kernel for each part: all scores go through memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5, dim=-1)
    return (weights @ v).transpose(1, 2)


def memory(calls: Mapping[str, Callable[[], Any]], title: str) -> str:
    """Memory of each call at its peak, its output included."""
    found = []
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        found.append(f"{name} {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB")
    return f"Memory of a call, {title}: {', '.join(found)}."


def errors(calls: Mapping[str, Callable[[], Any]], tensors: Tensors) -> str:
    """Root mean square error of each against float64."""
    expected, _ = attention(*tensors)
    found = []
    for name, call in calls.items():
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        out = out if out.shape == expected.shape else out.transpose(1, 2)
        error = float((out.double() - expected).square().mean().sqrt())
        found.append(f"{name} {error:.3g}")
    return f"Root mean square error against float64: {', '.join(found)}."


def costs(bench: common.Bench, own: Callable[..., torch.Tensor]) -> None:
    """Memory and errors of `own(q, k, v)`, of its peers and of separate kernels."""
    tensors = problem(4096, 8, 128)
    calls = {"step 10": partial(own, *tensors), **peers(*tensors)}
    calls["separate kernels"] = partial(separate, *tensors)
    bench.remark(memory(calls, "8 heads, 4096 × 4096"))
    bench.remark(errors(calls, tensors))


def window_peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int) -> dict[str, Any]:
    """flash-attn-4 with a causal window, where it is installed."""
    from benchmarks import attention_calls

    if importlib.util.find_spec("flash_attn") is None:
        return {}
    window = {"causal": True, "window_size": (width - 1, 0)}
    return {"flash-attn-4": partial(attention_calls.flash4(q, k, v, **window), 0)}


def lists_peer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: tuple[torch.Tensor, ...], block: tuple[int, int]
) -> dict[str, Any]:
    """flash-attn-4 on lists (counts (heads, tiles), blocks (heads, tiles, n)), where it is installed."""
    from benchmarks import attention_calls

    if importlib.util.find_spec("flash_attn") is None:
        return {}
    counts, blocks = (x[None] for x in lists)
    return {"flash-attn-4": partial(attention_calls.flash4_lists(q, k, v, counts, blocks, block), 0)}
