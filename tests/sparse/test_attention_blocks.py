"""Builders of block lists against masks written out element by element."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from kernels_dsl.sparse import attention_blocks as builders
from kernels_dsl.sparse import torch_masks
from kernels_dsl.sparse.block_lists import BlockLists


def _classes(lists: BlockLists, rows: int, columns: int) -> torch.Tensor:
    """(B, H, rows, columns): 0 not listed, 1 partial, 2 full. Fails where a block is listed twice."""
    counts = next(x for x in (lists.counts, lists.full_counts) if x is not None)
    found = torch.zeros((*counts.shape, columns), dtype=torch.int64)
    for kind, counts, indices in (
        (1, lists.counts, lists.indices),
        (2, lists.full_counts, lists.full_indices),
    ):
        if counts is None:
            continue
        for place in torch.cartesian_prod(*(torch.arange(s) for s in counts.shape)).tolist():
            for entry in range(int(counts[tuple(place)])):
                block = int(indices[(*place, entry)])
                assert 0 <= block < columns
                assert found[(*place, block)] == 0
                found[(*place, block)] = kind
    assert found.shape[2] == rows
    return found


def _expected(allowed: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """0, 1 or 2 for the blocks of a mask (Sq, Sk) that allow nothing, something, everything."""
    rows, columns = (-(-s // b) for s, b in zip(allowed.shape, block))
    classes = torch.zeros(rows, columns, dtype=torch.int64)
    for r in range(rows):
        for c in range(columns):
            part = allowed[r * block[0] : (r + 1) * block[0], c * block[1] : (c + 1) * block[1]]
            classes[r, c] = 2 if bool(part.all()) else 1 if bool(part.any()) else 0
    return classes


def _check(lists: BlockLists, allowed: torch.Tensor) -> None:
    """All that the mask needs is listed, as full only where it is; a few blocks too many may be partial."""
    expected = _expected(allowed, lists.block)
    found = _classes(lists, *expected.shape)[0, 0]
    assert bool(((found > 0) | (expected == 0)).all())
    assert bool(((found == 2) == (expected == 2)).all())
    assert int(((found > 0) & (expected == 0)).sum()) <= expected.shape[0]


@pytest.mark.parametrize("lengths", [(300, 300), (200, 430), (430, 200), (1, 1000), (128, 128)])
@pytest.mark.parametrize(
    "window", [(None, 0), (100, 0), (64, 64), (None, None), (0, 0), (5, None), (1000, 3)]
)
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128)])
def test_windows(lengths, window, alignment, block):
    left, right = window
    shift = 0 if alignment == "top_left" else lengths[1] - lengths[0]
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None]
    allowed = torch.ones(lengths, dtype=torch.bool)
    if left is not None:
        allowed &= j >= i + shift - left
    if right is not None:
        allowed &= j <= i + shift + right
    made = builders.window_blocks(
        *lengths, left=left, right=right, block=block, alignment=alignment, device="cpu"
    )
    _check(made, allowed)


def test_causal_is_a_window():
    made = builders.causal_blocks(300, 400, device="cpu")
    i, j = torch.arange(300)[:, None], torch.arange(400)[None]
    _check(made, j <= i + 100)


def test_window_lists_do_not_grow_with_the_square():
    made = builders.window_blocks(1 << 20, 1 << 20, left=2048, block=(128, 128), device="cpu")
    assert made.indices.shape[-1] <= 4 and made.full_indices.shape[-1] <= 2048 // 128 + 4


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal):
    documents = torch.tensor([[0] * 100 + [1] * 29 + [5] * 171])
    made = builders.document_blocks(documents, causal=causal, block=(64, 64))
    allowed = documents[0, :, None] == documents[0, None, :]
    if causal:
        allowed &= torch.ones_like(allowed).tril()
    expected = _expected(allowed, (64, 64))
    found = _classes(made, 5, 5)[0, 0]
    assert bool(((found == 1) | (expected == 0)).all())


def test_topk(seed):
    scores = torch.randn((2, 3, 5, 7), generator=torch.Generator().manual_seed(seed))
    made = builders.topk_blocks(scores, 3)
    best = scores.argsort(dim=-1, descending=True)[..., :3].sort(dim=-1).values
    assert made.counts is None and torch.equal(made.full_indices, best.int())
    assert bool((made.full_counts == 3).all())


def test_causal_topk_takes_no_block_behind_the_diagonal(seed):
    scores = torch.randn((1, 1, 4, 4), generator=torch.Generator().manual_seed(seed))
    made = builders.topk_blocks(scores, 3, causal=True)
    assert made.counts.flatten().tolist() == [1, 2, 3, 3]
    for row in range(4):
        assert int(made.indices[0, 0, row, : int(made.counts[0, 0, row])].max()) <= row


def test_torch_functions_are_made_traceable():
    def near(b, h, i, j):
        return i - j < 20

    def even(b, h, i, j):
        return j % 2 == 0

    def causal(b, h, i, j):
        return i >= j

    made = flex.and_masks(flex.or_masks(near, even), causal, flex.noop_mask)
    found = torch_masks.traceable(made)
    places = torch.arange(1), torch.arange(1), torch.arange(70)[:, None], torch.arange(90)[None]
    assert torch.equal(found(*places), flex.create_mask(made, 1, 1, 70, 90, device="cpu")[0, 0])
    assert torch_masks.traceable(made) is found  # so that repeated calls find their kernel
    assert torch_masks.traceable(flex.noop_mask) is None and torch_masks.traceable(near) is near
    assert bool(torch_masks.traceable(flex.or_masks(near, flex.noop_mask))(*places).all())


def test_torch_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    def other(b, h, i, j):
        return i > j

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu", BLOCK_SIZE=128)
    made = builders.from_block_mask(mask)
    assert torch_masks.of_block_mask(mask, None, (300, 300)) == (mask.mask_mod, made)
    assert torch_masks.of_block_mask(mask, other, None)[0] is other  # the call's own goes first
    assert made.block == (128, 128)
    assert _classes(made, 3, 3)[0, 0].gt(0).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
