"""Tile numbers of the persistent schedule, run in the emulator and compared with plain Python."""

from __future__ import annotations

import random

import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32

import lowering
from kernels_dsl.blocks.schedule.scheduler import Divisor, TileGrid, decode_tile, with_divisors
from lowering import emulator

GROUP = 8
MOST = 2**31 - 1


@cute.kernel
def _decode_kernel(out: cute.Tensor, grid: TileGrid):
    index = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
    if index < grid.size:
        at = decode_tile(index, grid, GROUP, True)
        out[index, 0], out[index, 1], out[index, 2], out[index, 3] = at.m, at.n, at.batch, at.split


@lowering.jit
def _decode(out: cute.Tensor, m: Int32, n: Int32, batch: Int32, stream):
    """out (tiles, 4): (m, n, batch, split) of each number, with two splits."""
    grid = with_divisors(TileGrid(m, n, batch, 2), GROUP, True)
    blocks = cute.ceil_div(grid.size, 32)
    _decode_kernel(out, grid).launch(grid=(blocks, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.mark.parametrize(("m", "n", "batch"), [(21, 5, 2), (8, 3, 1), (3, 7, 2), (1, 1, 3), (17, 1, 1)])
def test_tiles_come_in_groups_of_rows(m: int, n: int, batch: int):
    out = torch.full((2 * m * n * batch, 4), -1, dtype=torch.int32)
    with emulator.run("sm_90a"):
        _decode(out, m, n, batch)
    plane = [
        (row, column)
        for first in range(0, m, GROUP)
        for column in range(n)
        for row in range(first, min(first + GROUP, m))
    ]
    assert out.tolist() == [[*at, b, split] for b in range(batch) for split in range(2) for at in plane]


@cute.kernel
def _divide_kernel(found: cute.Tensor, numbers: cute.Tensor, by: Divisor):
    lane = cute.arch.thread_idx()[0]
    found[lane, 0], found[lane, 1] = by.into(numbers[lane])


@lowering.jit
def _divide(found: cute.Tensor, numbers: cute.Tensor, by: Int32, stream):
    _divide_kernel(found, numbers, Divisor.of(by)).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.mark.parametrize("by", [1, 2, 3, 7, 641, 2**16 + 1, 2**30 - 1, 2**30, 2**30 + 1, MOST])
def test_division_without_dividing(by: int):
    picked = random.Random(by)
    edges = [0, 1, by - 1, by, MOST, MOST // by * by, max(MOST // by * by - 1, 0)]
    numbers = edges + [picked.randint(0, MOST) for _ in range(32 - len(edges))]
    found = torch.full((32, 2), -1, dtype=torch.int32)
    with emulator.run("sm_90a"):
        _divide(found, torch.tensor(numbers, dtype=torch.int32), by)
    assert found.tolist() == [list(divmod(number, by)) for number in numbers]
