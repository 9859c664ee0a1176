"""`attention_decode` of packed queries, sequences of different numbers of them, in the emulator."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch

import kernels_dsl
from lowering import emulator
from reference.attention import Masking
from reference.buffers import check_output, poisoned
from tests.ops.serving.decode_cases import Paged, check_packed, paged

CAUSAL = Masking(right=0)


def packed(case: Paged, queries: tuple[int, ...], spare: int = 0) -> tuple[Paged, torch.Tensor]:
    """The case with packed queries, `spare` of them past the last sequence, and where they start."""
    heads, dim = case.q.shape[2:]
    generator = torch.Generator().manual_seed(len(queries))
    q = torch.randn((sum(queries) + spare, heads, dim), generator=generator).to(case.q.dtype)
    return case._replace(q=q), torch.tensor([0, *accumulate(queries)], dtype=torch.int32)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_sequences_of_any_number_of_queries(arch, seed):
    """None, more than keys, several tiles of rows; every row is written once, those of no sequence with 0."""
    case, starts = packed(paged((130, 0, 1, 70, 33, 9), 16, seed), (3, 1, 0, 20, 2, 11), spare=2)
    place = poisoned(tuple(case.q.shape), case.q.dtype)
    with emulator.run(arch=arch, sms=1):
        found = case.decode(cu_seqlens_q=starts, max_seqlen_q=20, out=place.tensor)
    check_output(place)
    check_packed(case, starts, found, CAUSAL)
    assert not found[0][-2:].any() and (found[1][:, -2:] == -math.inf).all()


def test_window_and_sinks(seed):
    """Tiles whose windows begin far from each other, in one split."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    case, starts = packed(paged((120, 70), 16, seed), (40, 1))
    with emulator.run(arch="sm_90a", sms=1):
        found = case.decode(cu_seqlens_q=starts, max_seqlen_q=40, window=(20, 0), sinks=sinks)
    check_packed(case, starts, found, Masking(left=20, right=0, sinks=sinks))


def test_many_rows_of_a_dense_batch(seed):
    """More than a CTA takes together, without packing."""
    case = paged((70, 41), 16, seed, queries=33)
    whole = case._replace(q=case.q.flatten(0, 1))
    with emulator.run(arch="sm_90a", sms=1):
        out, lse = case.decode()
    check_packed(
        whole, torch.tensor([0, 33, 66]), (out.flatten(0, 1), lse.transpose(0, 1).flatten(1)), CAUSAL
    )


def test_bits_do_not_depend_on_the_others(seed):
    """A sequence of one query has those of a batch without packing, and of any batch beside it."""
    case = paged((200, 70, 40), 16, seed)
    many, starts = packed(case, (1, 20, 0))
    alone = case._replace(q=many.q[:1, None], seqused_k=case.seqused_k[:1], block_table=case.block_table[:1])
    with emulator.run(arch="sm_90a", sms=1):
        beside, one = many.decode(cu_seqlens_q=starts), alone.decode()
    assert torch.equal(beside[0][:1], one[0][0]) and torch.equal(beside[1][:, :1], one[1][0])


def test_all_rows_are_written_at_any_lengths(seed):
    """One query a sequence and several splits, where FlashAttention-2 wrote the first sequence alone (PyTorch
    #194167). Then lengths change in place, as under a CUDA graph."""
    case, starts = packed(paged((256, 130), 16, seed), (1, 1))
    out = torch.full_like(case.q, math.nan)
    with emulator.run(arch="sm_80", sms=2):
        check_packed(case, starts, case.decode(cu_seqlens_q=starts, out=out), CAUSAL)
        starts.copy_(torch.tensor([0, 2, 2]))
        case.seqused_k.copy_(torch.tensor([70, 1]))
        shorter = [(k[:n], v[:n]) for n, (k, v) in zip((70, 1), case.whole)]
        found = case.decode(cu_seqlens_q=starts, out=out.fill_(math.nan))
        check_packed(case._replace(whole=shorter), starts, found, CAUSAL)


def test_more_queries_than_announced(seed):
    """Rows past the most are NaN, the others right. Inside `checked` it is an error, as are starts that
    fall."""
    case, starts = packed(paged((50, 20), 16, seed), (4, 2))
    with emulator.run(arch="sm_90a"):
        out, lse = case.decode(cu_seqlens_q=starts, max_seqlen_q=2)
        whole = case.decode(cu_seqlens_q=starts)
        with kernels_dsl.checked():
            with pytest.raises(ValueError, match="max_seqlen_q is 3, must be at least 4"):
                case.decode(cu_seqlens_q=starts, max_seqlen_q=3)
            with pytest.raises(ValueError, match=r"cu_seqlens_q\[2\] is 3, must be from 4 to 6"):
                case.decode(cu_seqlens_q=torch.tensor([0, 4, 3], dtype=torch.int32))
    assert out[2:4].isnan().all() and lse[:, 2:4].isnan().all()
    assert torch.equal(out[:2], whole[0][:2]) and torch.equal(out[4:], whole[0][4:])
