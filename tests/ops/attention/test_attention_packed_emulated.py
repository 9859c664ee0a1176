"""Packed sequences with mask tensors and block lists, by both families of kernels in the emulator.

Sequences lie between rows of NaN in K and V: what a mask or the end of a sequence hides must not be read.
TEST_ALL_KERNELS=1 takes both kinds of lists with both families.
"""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from reference.attention import Masking, allowed_by_lists
from tests.ops.attention.attention_cases import check_close, inputs
from tests.samples import pairs

Q_LENS, K_LENS = (70, 0, 1, 130), (150, 5, 1, 100)
HEADS = 2


@pytest.fixture(autouse=True, params=["sm90", "sm80"])
def family(request):
    with emulator.run(arch="sm_90a"):
        yield request.param


def _packed(seed):
    """(q, k, v), prefix sums of both, keys that count: 20 rows of NaN behind every sequence's keys."""
    gap = 20
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (Q_LENS, [n + gap for n in K_LENS])]
    tensors = inputs((sum(Q_LENS), HEADS, 64), (int(starts[1][-1]), 1, 64), 64, seed)
    for x in tensors[1:]:
        for first, count in zip(starts[1][:-1], K_LENS):
            x[first + count : first + count + gap] = torch.nan
    return tensors, starts, torch.tensor(K_LENS).int()


def _check(seed, family, maskings, **options):
    """One call on all sequences against one reference a sequence; `maskings`: their `Masking`s."""
    (q, k, v), starts, used = _packed(seed)
    out, lse = kernels_dsl.attention_varlen(
        q, k, v, *starts, max(Q_LENS), max(K_LENS), seqused_k=used, return_lse=True, family=family, **options
    )
    for n, (q_len, k_len) in enumerate(zip(Q_LENS, K_LENS)):
        if q_len:
            rows = slice(int(starts[0][n]), int(starts[0][n + 1]))
            keys = slice(int(starts[1][n]), int(starts[1][n]) + k_len)
            part = (q[None, rows], k[None, keys], v[None, keys])
            check_close((out[None, rows], lse[None, :, rows]), part, maskings[n])


def test_masks(seed, family):
    """A boolean one for each sequence and head, or a bias for all, with a kernel each."""
    generator = torch.Generator().manual_seed(seed)
    if family == "sm90":
        mask = torch.rand((4, HEADS, max(Q_LENS), max(K_LENS)), generator=generator) < 0.5
        mask[0, 0, 3] = False
        allowed = (mask[n : n + 1, :, :i, :j] for n, (i, j) in enumerate(zip(Q_LENS, K_LENS)))
        _check(seed, family, [Masking(allowed=part) for part in allowed], mask=mask)
    else:
        bias = torch.randn((max(Q_LENS), 1), generator=generator).bfloat16()
        maskings = [Masking(right=0, bias=bias[:n].float()) for n in Q_LENS]
        _check(seed, family, maskings, mask=bias, causal=True)


@pytest.mark.parametrize(
    ("family", "full"), pairs("packed lists", ("sm90", "sm80"), [False, True]), indirect=["family"]
)
def test_lists(full, seed, family):
    """Each sequence and head its own, unsorted, with blocks past the keys and garbage past the count; where
    blocks are partial, under a boolean mask too."""
    generator = torch.Generator().manual_seed(seed)
    block, entries = (128 if full else 64, 64), 3  # two consumer warpgroups, or one
    rows = -(-max(Q_LENS) // block[0])
    indices = torch.stack([torch.randperm(3, generator=generator) for _ in range(4 * HEADS * rows)])
    indices = indices.view(4, HEADS, rows, entries).int()
    counts = torch.randint(0, entries + 1, (4, HEADS, rows), generator=generator).int()
    indices[torch.arange(entries) >= counts[..., None]] = -77
    pair, none = (counts, indices), (None, None)
    lists = BlockLists(*(none + pair if full else pair + none), block=block)
    mask = None if full else torch.rand((1, max(Q_LENS), max(K_LENS)), generator=generator) < 0.7
    maskings = []
    for n, (i, j) in enumerate(zip(Q_LENS, K_LENS)):
        parts = tuple(x if x is None else x[n : n + 1] for x in lists.tensors)
        allowed = allowed_by_lists(parts, block, (1, HEADS, i, max(K_LENS) + 64))[..., :j]
        if not full:
            allowed &= (torch.arange(j) <= torch.arange(i)[:, None] + j - i) & mask[:, :i, :j]
        maskings.append(Masking(allowed=allowed))
    _check(seed, family, maskings, blocks=lists, causal=not full, mask=mask)


def _steeper(score, b, h, i, j):
    return score * 1.5


def test_a_list_that_begins_with_a_whole_block(seed, family):
    """Elements of whole blocks are not masked, wherever they are in a list; scores are changed there too."""
    tensors = inputs((1, 64, 1, 64), (1, 128, 1, 64), 64, seed)
    bias = torch.randn((64, 128), generator=torch.Generator().manual_seed(seed))
    counts, indices = torch.tensor([[[2]]]).int(), torch.tensor([[[[1, 0]]]]).int()
    lists = BlockLists(None, None, counts, indices, (64, 64))
    options = {"blocks": lists, "causal": True, "mask": bias, "score_mod": _steeper}
    found = kernels_dsl.attention(*tensors, **options, return_lse=True, family=family)
    check_close(found, tensors, Masking(bias=bias, score_mod=_steeper))
