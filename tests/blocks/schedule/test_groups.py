"""Tiles of groups of rows, found on the GPU: run in the emulator and compared with plain Python."""

from __future__ import annotations

import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32

import lowering
from kernels_dsl.blocks.schedule.groups import (
    GroupedGrid,
    decode_group_tile,
    first_cursor,
    rows_of,
    tile_count,
)
from kernels_dsl.blocks.schedule.scheduler import Raster
from lowering import emulator

TILE_M = 16
RASTER = Raster(2, True)


@cute.kernel
def _decode_kernel(out: cute.Tensor, grid: GroupedGrid):
    """A warp goes through all tiles, each from the cursor of the one before."""
    lane = cute.arch.lane_idx()
    cursor = first_cursor()
    for index in range(out.shape[0]):
        tile, group = decode_group_tile(Int32(index), grid, TILE_M, RASTER, cursor)
        cursor = group.cursor
        if lane == 0:
            out[index, 0], out[index, 1], out[index, 2] = tile.batch, tile.m, tile.n
            out[index, 3], out[index, 4] = group.start, group.rows


@lowering.jit
def _decode(out: cute.Tensor, offsets: cute.Tensor, rows: Int32, n: Int32, stream):
    _decode_kernel(out, GroupedGrid(offsets, rows, n)).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def _expected(offsets: list[int], rows: int, n: int) -> list[list[int]]:
    """(group, m, n, start, rows) of each tile in order."""
    found, begin = [], 0
    for group, offset in enumerate(offsets):
        end = min(max(offset, 0), rows)
        own = max(end - begin, 0)
        tiles_m = -(-own // TILE_M)
        for first in range(0, tiles_m, RASTER[0]):
            for column in range(n):
                for m in range(first, min(first + RASTER[0], tiles_m)):
                    found.append([group, m, column, begin, own])
        begin = end
    return found


CASES = [
    [40],
    [0, 0, 17, 17, 64],  # groups without rows
    [16, 10, 50],  # one that ends before it starts
    [-5, 20, 500],  # rows that do not exist
    list(range(3, 3 * 71, 3)),  # more groups than a warp has lanes
]


@pytest.mark.parametrize("offsets", CASES, ids=str)
def test_tiles_of_all_groups_in_order(offsets):
    rows, n = 200, 3
    expected = _expected(offsets, rows, n)
    past = 3
    out = torch.full((len(expected) + past, 5), -1, dtype=torch.int32)
    with emulator.run("sm_80"):
        _decode(out, torch.tensor(offsets, dtype=torch.int32), rows, n)
    assert out[: len(expected)].tolist() == expected
    assert not out[len(expected) :, 4].any()  # beyond the last tile: a group without rows


@cute.kernel
def _count_kernel(out: cute.Tensor, grid: GroupedGrid):
    found = tile_count(grid, TILE_M)
    if cute.arch.lane_idx() == 0:
        out[0], out[1] = found, grid.most(TILE_M)


@lowering.jit
def _count(out: cute.Tensor, offsets: cute.Tensor, rows: Int32, n: Int32, stream):
    _count_kernel(out, GroupedGrid(offsets, rows, n)).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.mark.parametrize("offsets", CASES, ids=str)
def test_a_launch_has_a_cta_for_each_tile(offsets):
    out = torch.zeros(2, dtype=torch.int32)
    with emulator.run("sm_80"):
        _count(out, torch.tensor(offsets, dtype=torch.int32), 200, 3)
    count, most = out.tolist()
    assert count == len(_expected(offsets, 200, 3)) <= most


@cute.kernel
def _rows_kernel(x: cute.Tensor, out: cute.Tensor, grid: GroupedGrid):
    """The rows of the first group of tile 1, doubled."""
    _, group = decode_group_tile(Int32(1), grid, TILE_M, RASTER, first_cursor())
    own, lane = rows_of(x, group), cute.arch.lane_idx()
    for row in range(own.shape[0]):
        if lane < x.shape[1]:
            out[row, lane] = own[row, lane] * 2


@lowering.jit
def _rows(x: cute.Tensor, out: cute.Tensor, offsets: cute.Tensor, stream):
    grid = GroupedGrid(offsets, Int32(x.shape[0]), Int32(1))
    _rows_kernel(x, out, grid).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.mark.parametrize("broadcast", [False, True])
def test_rows_of_a_group(broadcast):
    """A tensor with one row for all groups has it for each."""
    x = torch.randint(0, 99, (1 if broadcast else 30, 8), dtype=torch.int32).expand(30, 8)
    out = torch.full((30, 8), -1, dtype=torch.int32)
    with emulator.run("sm_80"):
        _rows(x, out, torch.tensor([7, 19, 30], dtype=torch.int32))
    own = out[:30] if broadcast else out[:12]
    assert torch.equal(own, 2 * (x if broadcast else x[7:19]))
    assert broadcast or (out[12:] == -1).all()


def test_anything_but_a_tensor_stays_as_it_is():
    assert rows_of(2.0, None) == 2.0
