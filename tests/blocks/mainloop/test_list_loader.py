"""Loaders of K tiles from lists of blocks and from gathered rows, run in the emulator: what lands in a
stage."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16, Int32, range_constexpr

import lowering
from kernels_dsl.blocks.hw.cp_async import Loader, TileLoadPlan
from kernels_dsl.blocks.mainloop.list_loader import (
    BlockRows,
    ListOperand,
    make_gather_loader,
    make_list_loader,
)
from kernels_dsl.blocks.mainloop.multistage import staged_operand
from lowering import emulator

THREADS = 64
TILE = (32, 32)


@cute.jit
def _fetch_all(loader: Loader, sX: cute.Tensor, out: cute.Tensor, k_tiles: cutlass.Constexpr, tidx: Int32):
    """Visits K tiles in the main loop's order, the last one first, and copies each stage to out (t, mn,
    k)."""
    plan = cutlass.const_expr(loader.plan)
    for t in range_constexpr(-1, k_tiles - 1):
        k_tile = cutlass.const_expr(k_tiles - 1 if t < 0 else t)
        loader.fetch(Int32(k_tile), Int32(0), t < 0)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for i in cutlass.range(tidx, plan.tile[0] * plan.tile[1], THREADS, unroll=1):
            mn, k = i // plan.tile[1], i % plan.tile[1]
            out[k_tile, mn, k] = sX[mn, k, 0]
        cute.arch.sync_threads()


@cute.kernel
def _list_kernel(
    mX: cute.Tensor,
    blocks: cute.Tensor,
    out: cute.Tensor,
    plan: cutlass.Constexpr,
    k_tiles: cutlass.Constexpr,
):
    tidx, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    smem = cutlass.memory.SmemAllocator().allocate(plan.tile[0] * plan.tile[1] * 2, byte_alignment=1024)
    sX = staged_operand(smem, plan, 1, BFloat16)
    loader = make_list_loader(plan, ListOperand(mX, tile, blocks), sX, tidx)
    _fetch_all(loader, sX, out[tile, None, None, None], k_tiles, tidx)


@lowering.jit
def _list(
    x: cute.Tensor,
    blocks: cute.Tensor,
    out: cute.Tensor,
    stream,
    block: cutlass.Constexpr,
    k_major: cutlass.Constexpr,
    k_tiles: cutlass.Constexpr,
):
    """x (blocks, MN, K) or, unless k_major, (blocks, K, MN); out (tiles, k_tiles, *TILE)."""
    mn, k = block
    stride = (k, 1) if k_major else (1, mn)
    layout = cute.make_layout((mn, k, x.shape[0]), stride=(*stride, mn * k))
    plan = TileLoadPlan(TILE, THREADS, 2, 16, k_major)
    _list_kernel(cute.make_tensor(x.iterator, layout), blocks, out, plan, k_tiles).launch(
        grid=[out.shape[0], 1, 1], block=[THREADS, 1, 1], smem=TILE[0] * TILE[1] * 2, stream=stream
    )


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize(("mn", "k"), [(32, 64), (48, 16), (32, 48), (64, 32)], ids=str)
def test_blocks_of_a_list_end_to_end(mn, k, k_major):
    """Blocks longer and shorter than a K tile, and such as straddle it; rows and K beyond the end are 0."""
    x = torch.randn(5, mn, k).bfloat16()
    numbers = torch.tensor([3, 0, 4, 4, 1], dtype=torch.int32)
    k_tiles, tiles = -(-len(numbers) * k // TILE[1]), -(-mn // TILE[0])
    out = torch.full((tiles, k_tiles, *TILE), torch.nan).bfloat16()
    stored = x if k_major else x.mT.contiguous()
    with emulator.run("sm_80"):
        _list(stored, numbers, out, block=(mn, k), k_major=k_major, k_tiles=k_tiles)
    expected = torch.zeros(tiles * TILE[0], k_tiles * TILE[1]).bfloat16()
    expected[:mn, : len(numbers) * k] = torch.cat([x[n] for n in numbers], dim=1)
    found = out.permute(0, 2, 1, 3).reshape(expected.shape)
    assert torch.equal(found, expected)


@cute.kernel
def _gather_kernel(
    mX: cute.Tensor,
    numbers: cute.Tensor,
    out: cute.Tensor,
    count: Int32,
    plan: cutlass.Constexpr,
    extent: cutlass.Constexpr,
    k_tiles: cutlass.Constexpr,
):
    tidx, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    smem = cutlass.memory.SmemAllocator().allocate(plan.tile[0] * plan.tile[1] * 2, byte_alignment=1024)
    sX = staged_operand(smem, plan, 1, BFloat16)
    loader = make_gather_loader(plan, mX, sX, BlockRows(numbers, count, extent), tile, tidx)
    _fetch_all(loader, sX, out[tile, None, None, None], k_tiles, tidx)


@lowering.jit
def _gather(
    x: cute.Tensor,
    numbers: cute.Tensor,
    out: cute.Tensor,
    count: Int32,
    stream,
    plan: cutlass.Constexpr,
    extent: cutlass.Constexpr,
    k_tiles: cutlass.Constexpr,
):
    """x (MN, K) of any strides; out (tiles, k_tiles, *TILE)."""
    _gather_kernel(x, numbers, out, count, plan, extent, k_tiles).launch(
        grid=[out.shape[0], 1, 1], block=[THREADS, 1, 1], smem=TILE[0] * TILE[1] * 2, stream=stream
    )


@pytest.mark.parametrize(("k_major", "copy_bytes"), [(True, 16), (True, 4), (False, 16)])
@pytest.mark.parametrize("extent", [16, 48])
def test_blocks_of_rows_side_by_side(extent, k_major, copy_bytes):
    """A ragged K, fewer blocks than there is room for: what is missing is 0."""
    rows, k, picked, count = 4 * extent, 72, [2, 0, 3], 2
    x = torch.randn(rows, k).bfloat16()
    k_tiles, tiles = -(-k // TILE[1]), -(-len(picked) * extent // TILE[0])
    out = torch.full((tiles, k_tiles, *TILE), torch.nan).bfloat16()
    stored = x if k_major else x.T.contiguous().T
    numbers, plan = (
        torch.tensor(picked, dtype=torch.int32),
        TileLoadPlan(TILE, THREADS, 2, copy_bytes, k_major),
    )
    with emulator.run("sm_80"):
        _gather(stored, numbers, out, count, plan=plan, extent=extent, k_tiles=k_tiles)
    expected = torch.zeros(tiles * TILE[0], k_tiles * TILE[1]).bfloat16()
    expected[: count * extent, :k] = torch.cat([x[n * extent :][:extent] for n in picked[:count]])
    found = out.permute(0, 2, 1, 3).reshape(expected.shape)
    assert torch.equal(found, expected)


def test_a_list_needs_vectors():
    """Elements that go through registers have no list loader."""
    plan = TileLoadPlan(TILE, THREADS, 2, 2, True)
    with pytest.raises(ValueError, match="copy_bytes is 2; it must be at least 4"):
        make_list_loader(plan, ListOperand(None, Int32(0), None), None, Int32(0))
