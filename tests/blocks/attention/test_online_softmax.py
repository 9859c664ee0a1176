"""The online softmax on one warp's tile, run in the emulator and compared with PyTorch's softmax."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32

import lowering
from kernels_dsl.blocks.attention import softmax
from kernels_dsl.blocks.attention.mask import column_offset, row_offset
from lowering import emulator

STEPS = 4
TILE = ((2, 2), 1, 2)
"""Accumulators of 16 rows x 16 columns."""


@cute.kernel
def _softmax_kernel(
    scores: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, scale: Float32, how: cutlass.Constexpr
):
    lane = cute.arch.lane_idx()
    row, column = lane // 4, lane % 4 * 2
    scale_log2 = scale * softmax.LOG2_E
    row_max, row_sum, correction = (cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in range(3))
    row_max.fill(-math.inf)
    row_sum.fill(0.0)
    done = []
    for step in cutlass.range_constexpr(STEPS):
        view = softmax.rows_and_columns(cute.make_rmem_tensor(TILE, Float32))
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(4):
                view[r, c] = scores[row + row_offset(r), 16 * step + column + column_offset(c)]
        if cutlass.const_expr(how == "by vote"):
            moved = softmax.lazy_step(view, row_max, row_sum, correction, scale_log2, True)
            for older in done:
                if moved:
                    softmax.rescale(older, correction)
        else:
            softmax.online_step(view, row_max, row_sum, correction, scale_log2, True, how == "lazy")
            for older in done:
                softmax.rescale_where_needed(older, correction)
        done.append(view)
    for step in cutlass.range_constexpr(STEPS):
        last, factor = (cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in range(2))
        last.store(row_max.load())
        factor.store(row_sum.load())
        some_empty = softmax.close(last, factor, scale_log2)
        softmax.finish(done[step], last, factor, some_empty)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(4):
                out[row + row_offset(r), 16 * step + column + column_offset(c)] = done[step][r, c]
            lse[row + row_offset(r)] = last[r]


@lowering.jit
def _softmax(
    scores: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, scale: Float32, stream, how: cutlass.Constexpr
):
    _softmax_kernel(scores, out, lse, scale, how).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.mark.parametrize("how", ["each step", "lazy", "by vote"])
def test_rows_of_every_kind(how, seed):
    """Maxima that rise, fall and jump, keys that count for nothing, and a row that has none at all."""
    scores = torch.randn(16, 16 * STEPS, generator=torch.Generator().manual_seed(seed)) * 3
    scores[1, 32:] += 40
    scores[2] += torch.linspace(0, 60, 16 * STEPS)
    scores[3, :20] = -torch.inf
    scores[4, 40:] = -torch.inf
    scores[5] = -torch.inf
    scores[6] = -torch.inf
    scores[6, 37] = -5.0
    scores[7] -= 1000
    out, lse = torch.full_like(scores, torch.nan), torch.full((16,), torch.nan)
    with emulator.run(arch="sm_90a"):
        _softmax(scores, out, lse, 0.5, how=how)
    expected = torch.softmax(scores.double() * 0.5, dim=-1).nan_to_num(0.0)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-4)
    assert lse[5] == -torch.inf and bool((out[5] == 0).all())
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores.double() * 0.5, -1), atol=1e-4, rtol=1e-6)
