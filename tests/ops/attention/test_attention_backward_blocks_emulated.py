"""Gradients of attention over block lists in the emulator: both families, against float64 and ranges.

TEST_ALL_KERNELS=1 takes more sizes of blocks.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops.attention import gradient as attention_gradient  # noqa: F401  (defines the operator)
from kernels_dsl.sparse.attention_blocks import causal_blocks
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from reference.attention import Masking, allowed_by_lists, attention
from reference.tolerance import check
from tests.ops.attention.attention_cases import inputs
from tests.ops.attention.gradient_cases import check_gradients, leaves, reference_gradients


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that nobody wrote is NaN."""

    def poisoned(make, *args, **options):
        made = make(*args, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    for make in (torch.empty, torch.empty_like):
        monkeypatch.setattr(torch, make.__name__, partial(poisoned, make))


def _lists(rows: list[list[list[int]]], width: int, block: tuple[int, int], full: int = 0) -> BlockLists:
    """Lists of each head's rows, the last `full` of each row whole; garbage after the counts."""
    counts = torch.tensor([[[max(len(row) - full, 0) for row in head] for head in rows]])
    indices = torch.full((1, len(rows), len(rows[0]), width), 77)
    whole_counts, whole = torch.zeros_like(counts), indices.clone()
    for h, head in enumerate(rows):
        for i, row in enumerate(head):
            masked, unmasked = row[: max(len(row) - full, 0)], row[max(len(row) - full, 0) :]
            indices[0, h, i, : len(masked)] = torch.tensor(masked)
            whole[0, h, i, : len(unmasked)] = torch.tensor(unmasked)
            whole_counts[0, h, i] = len(unmasked)
    return BlockLists(counts.int(), indices.int(), whole_counts.int(), whole.int(), block)


def _even(b, h, i, j):
    return (i + j) % 2 == 0


@pytest.mark.parametrize(
    ("arch", "block"), [("sm_90a", (64, 128)), ("sm_90a", (64, 64)), ("sm_89", (64, 64))]
)
def test_lists_of_each_head(arch, block, seed):
    """Masked and whole blocks in any order, two heads that share keys; a query block without keys, a key
    block that nobody sees, ends of both sequences inside of a block. Gradients of 0 are written."""
    lengths = (block[0] + 10, 3 * block[1] - 30)
    lists = _lists([[[2, 0], []], [[2], [0, 2]]], 3, block, full=1)
    shape = (1, 2, 2 * block[0], 3 * block[1])
    places = torch.arange(shape[2])[:, None] + torch.arange(shape[3])
    hidden = (places % 2 == 1)[None, None]
    allowed = allowed_by_lists(lists.tensors, block, shape, hidden)[..., : lengths[0], : lengths[1]]
    with emulator.run(arch=arch):
        found = check_gradients(
            leaves((2, 1), lengths, (64, 64), seed),
            Masking(allowed=allowed),
            True,
            mask_mod=_even,
            blocks=lists,
        )
    assert not found[0][:, block[0] :, 0].any()
    assert not any(x[:, block[1] : 2 * block[1]].any() for x in found[1:])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_lists_that_spell_causal_give_the_bits_of_causal(arch, seed):
    """At head dimension 64, from the same output and log-sum-exp; one list for both heads."""
    q, k, v = (x.detach() for x in leaves((2, 1), (70, 140), (64, 64), seed))
    out, lse = attention(q, k, v, Masking(right=0))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(q.dtype)
    lists = causal_blocks(70, 140, block=(64, 128), device="cpu")
    names = ("counts", "indices", "full_counts", "full_indices")
    tensors = (do, None, q, k, v, out.to(q.dtype), lse.float())
    with emulator.run(arch=arch):
        run = partial(torch.ops.kernels_dsl.attention_backward, *tensors, causal=True, block_q=64)
        expected, found = run(), run(**dict(zip(names, lists.tensors)))
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_packed(seed):
    """Lists for all sequences, of which one ends in the middle of a query block and one has no queries; a
    key block is two tiles."""
    lengths_q, lengths_k, block = (20, 0, 140), (60, 20, 130), (128, 256)
    starts = [torch.tensor([0, *torch.tensor(x).cumsum(0)]).int() for x in (lengths_q, lengths_k)]
    q, k, v = inputs((160, 1, 64), (210, 1, 64), 64, seed)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(4)).to(q.dtype)
    lists = _lists([[[0], [0]]], 1, block)
    asked = [x.requires_grad_() for x in (q, k, v)]
    with emulator.run(arch="sm_90a"):
        out = kernels_dsl.attention_varlen(*asked, *starts, 140, causal=True, blocks=lists)
        found = torch.autograd.grad(out, asked, d_out)
    allowed = allowed_by_lists(lists.tensors, block, (1, 1, 256, 256))
    for n, (rows, keys) in enumerate(zip(lengths_q, lengths_k)):
        places = [slice(int(x[n]), int(x[n + 1])) for x in (starts[0], starts[1], starts[1])]
        if not rows:
            assert not any(bool(x[at].any()) for x, at in zip(found, places))
            continue
        masking = Masking(right=0, allowed=allowed[..., :rows, :keys])
        tensors = tuple(x[at][None] for x, at in zip(asked, places))
        exact, peer = (
            reference_gradients(tensors, masking, d_out[places[0]][None], None, dtype)
            for dtype in (torch.float64, torch.bfloat16)
        )
        for own, at, expected, theirs in zip(found, places, exact, peer):
            check(own[at][None].transpose(1, 2), expected, theirs, ulps=4.0)


def test_sizes_of_blocks_that_have_no_gradient():
    q, k, v = leaves((1, 1), (32, 48), (64, 64), 0)
    with (
        emulator.run(arch="sm_90a"),
        pytest.raises(RuntimeError, match=r"blocks of \(32, 48\), only of mult"),
    ):
        kernels_dsl.attention(q, k, v, blocks=_lists([[[0]]], 1, (32, 48)))
