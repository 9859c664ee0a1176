"""Masks and score functions on tiles of one warp, run in the emulator and compared element by element."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32

import lowering
from kernels_dsl.blocks.attention import mask as masks
from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.attention.softmax import rows_and_columns
from kernels_dsl.config.attention import AttentionVariant
from lowering import emulator
from reference.attention import Masking, _masked

Q_LEN, K_LEN, WIDTHS = 28, 41, (9, 4)
SHIFT = K_LEN - Q_LEN


@cute.kernel
def _mask_kernel(
    scores: cute.Tensor, out: cute.Tensor, mask: cute.Tensor | None, aux: tuple | None, at: cutlass.Constexpr
):
    variant, pack = at
    lane = cute.arch.lane_idx()
    row = cute.arch.block_idx()[0] * 16 + lane // 4
    column = cute.arch.block_idx()[1] * 16 + lane % 4 * 2
    view = rows_and_columns(cute.make_rmem_tensor(((2, 2), 1, 2), Float32))
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(4):
            view[r, c] = scores[row + masks.row_offset(r), column + masks.column_offset(c)]
    origin = masks.ScoreOrigin(row, column, Int32(1), Int32(0))
    seq = SeqInfo(Int32(0), Int32(0), Int32(Q_LEN), Int32(K_LEN))
    operands = masks.ScoreOperands(Float32(0.5), Float32(3.0), mask, aux)
    if cutlass.const_expr(variant.changes_scores):
        masks.change_scores(variant, view, origin, seq, operands)
    masks.mask_elements(variant, view, origin, seq, operands)
    masks.mask_range(variant, view, origin, seq, seq.k_len, Window(Int32(WIDTHS[0]), Int32(WIDTHS[1])), pack)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(4):
            out[row + masks.row_offset(r), column + masks.column_offset(c)] = view[r, c]


@lowering.jit
def _mask(
    scores: cute.Tensor, out: cute.Tensor, mask: cute.Tensor | None, aux: tuple | None, stream,
    at: cutlass.Constexpr,
):  # fmt: skip
    """`scores` (rows, columns) as the masks of `at`, (variant, heads that share a tile), leave them."""
    grid = (out.shape[0] // 16, out.shape[1] // 16, 1)
    _mask_kernel(scores, out, mask, aux, at).launch(grid=grid, block=(32, 1, 1), stream=stream)


def _run(variant, mask=None, aux=None, pack=1) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (Q_LEN, K_LEN) of a tile that reaches over both ends, and what became of them."""
    rows = Q_LEN * pack
    scores = torch.randn(-(-rows // 16) * 16, 48, generator=torch.Generator().manual_seed(3))
    out = torch.full_like(scores, torch.nan)
    with emulator.run(arch="sm_90a"):
        _mask(scores, out, mask, aux, at=(variant, pack))
    assert bool((out[:rows, K_LEN:] == -torch.inf).all())
    return scores[:rows, :K_LEN], out[:rows, :K_LEN]


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("top_left", [False, True])
def test_a_window(top_left, pack):
    scores, out = _run(AttentionVariant(right=True, left=True, top_left=top_left), pack=pack)
    i = torch.arange(Q_LEN)[:, None].repeat_interleave(pack, 0) + (0 if top_left else SHIFT)
    j = torch.arange(K_LEN)
    seen = (j >= i - WIDTHS[0]) & (j <= i + WIDTHS[1])
    assert torch.equal(out, scores.masked_fill(~seen, -torch.inf))


def _slope(score, b, h, i, j, slopes):
    return score - slopes[h] * (i - j)


def _even(b, h, i, j, slopes):
    return (i + j) % 2 == 0


def test_functions_a_bias_and_a_softcap(seed):
    """In this order: scale, softcap, function, bias; what the mask function hides is -inf whatever it was."""
    bias = torch.randn(1, 2, Q_LEN, K_LEN, generator=torch.Generator().manual_seed(seed))
    slopes = torch.tensor([9.0, 0.25])
    variant = AttentionVariant(softcap=True, mask="additive", score_mod=_slope, mask_mod=_even)
    scores, out = _run(variant, bias, (slopes,))
    masking = Masking(
        softcap=3.0, bias=bias[:, 1:], score_mod=lambda score, b, h, i, j: score - 0.25 * (i - j),
        mask_mod=lambda b, h, i, j: _even(b, h, i, j, None),
    )  # fmt: skip
    expected = _masked(scores.double()[None, None] * 0.5, masking)[0, 0]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_booleans():
    mask = torch.rand(1, 2, Q_LEN, K_LEN, generator=torch.Generator().manual_seed(4)) < 0.5
    scores, out = _run(AttentionVariant(mask="boolean"), mask.view(torch.uint8))
    assert torch.equal(out, scores.masked_fill(~mask[0, 1], -torch.inf))
