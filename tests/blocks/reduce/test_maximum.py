"""The maximum of an epilogue's values in global memory, run in the emulator."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32

import lowering
from kernels_dsl.blocks.epilogue.operands import load_operands
from kernels_dsl.blocks.epilogue.staged_store import row_vectors
from kernels_dsl.blocks.reduce.maximum import publish_maxima, running_maxima
from lowering import emulator

TILE = (8, 64)
VECTOR = 4


@cute.kernel
def _see_kernel(x: cute.Tensor, target: cute.Pointer):
    """A tile of x for each CTA of 32 threads, by vectors."""
    operands = running_maxima((target, Float32(0.0)))
    m, n = cute.arch.block_idx()[0], cute.arch.block_idx()[1]
    cX = cute.local_tile(cute.make_identity_tensor((*x.shape, 1)), (*TILE, 1), (m, n, 0))[None, None, 0]
    tXcX = row_vectors((8, 4), VECTOR).get_slice(cute.arch.thread_idx()[0]).partition_D(cX)
    pieces, _ = load_operands(operands, tXcX, (*x.shape, 1))
    values = cute.make_rmem_tensor(tXcX.shape, Float32)
    for i in cutlass.range_constexpr(cute.size(values)):
        at = tXcX[i]
        values[i] = Float32(1e30)  # what lies outside must not count
        if (at[0] < x.shape[0]) & (at[1] < x.shape[1]):
            values[i] = x[at[0], at[1]]
    pieces.see(values.load())
    publish_maxima(operands)


@lowering.jit
def _see(x: cute.Tensor, out: cute.Tensor, stream):
    tiles = [cute.ceil_div(x.shape[0], TILE[0]), cute.ceil_div(x.shape[1], TILE[1]), 1]
    _see_kernel(x, out.iterator).launch(grid=tiles, block=[32, 1, 1], stream=stream)


@pytest.mark.parametrize("value", [0.0, -3.5, 7.25, 1e-40, math.inf, -math.inf, math.nan])
def test_the_largest_magnitude_within_the_output(value):
    """Ragged in both modes; one NaN makes the maximum NaN; a subnormal number counts."""
    x = torch.zeros(19, 150)
    x[17, 149] = value
    if math.isnan(value):
        x[3, 3] = math.inf
    out = torch.zeros(1)
    with emulator.run("sm_80"):
        _see(x, out)
    assert torch.equal(out.isnan(), x[17:18, 149].isnan())
    assert math.isnan(value) or torch.equal(out, x[17:18, 149].abs())


def test_operands_that_are_no_maxima_stay_as_they_are():
    assert running_maxima((1.0, None)) == (1.0, None)
