"""Keys in pages in packed attention, by both families of kernels in the emulator, compared with float64.

What belongs to no sequence holds NaN, and entries of the table past its keys are no pages.
"""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from reference.attention import Masking, allowed_by_lists
from tests.ops.attention.paged_cases import Paged, paged

MIXED = ((66, 66), (3, 140), (0, 5), (1, 33), (5, 0), (20, 17))
"""A prefill, a chunk, none, a decoding step, no keys, fewer keys than queries."""


@pytest.fixture(autouse=True, params=["sm_90a", "sm_80"])
def arch(request):
    with emulator.run(arch=request.param, sms=2):
        yield request.param


@pytest.mark.parametrize("page", [1, 16, 128])
def test_a_mixed_batch(page, seed, arch):
    """Any page size, heads before keys or after, the same kernel."""
    case = paged(MIXED, page, seed, heads_first=page == 16)
    case.check(Masking(right=0), causal=True)


def test_windows_sinks_and_an_output(seed, arch):
    """Pages before the window are none; rows of no sequence keep what they held."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    case = paged(((1, 130), (20, 150)), 16, seed, dims=(64, 40), dtype=torch.float16, hidden=48)
    out = torch.full((25, 4, 40), 7.0, dtype=torch.float16)
    longer = case._replace(q=torch.cat([case.q, torch.full_like(case.q[:4], torch.nan)]))
    options = {"causal": True, "window": (60, None), "softcap": 3.0, "sinks": sinks}
    found = longer.check(Masking(60, 0, softcap=3.0, sinks=sinks), out=out, **options)
    assert found is out and bool((out[21:] == 7.0).all())


def _near(b, h, i, j):
    return (i - j < 40) & (j - i < 40)


def _tilted(score, b, h, i, j):
    return score * 1.5 + (i - j) * 0.125


def test_functions_and_lists(seed, arch):
    """Places are those within a sequence; listed blocks are of its keys."""
    case = paged(((70, 130), (64, 60)), 32, seed)
    if arch == "sm_80":
        masking = Masking(mask_mod=_near, score_mod=_tilted)
        case.check(masking, mask_mod=_near, score_mod=_tilted)
        return
    counts = torch.tensor([[2, 1], [1, 0]]).int()[:, None]
    indices = torch.tensor([[[2, 0], [1, -5]], [[0, -5], [-5, -5]]]).int()[:, None]
    lists = BlockLists(counts, indices, None, None, (64, 64))
    maskings = []
    for n, (q_len, k_len) in enumerate(((70, 130), (64, 60))):
        parts = (counts[n : n + 1], indices[n : n + 1], None, None)
        allowed = allowed_by_lists(parts, (64, 64), (1, 4, q_len, 192))[..., :k_len]
        maskings.append(Masking(allowed=allowed))
    case.check(maskings, blocks=lists)


def test_an_empty_cache(arch, seed):
    """Without pages a row attends to nothing."""
    case = paged(((3, 0), (2, 0)), 16, seed)
    bare = case._replace(k=case.k[:0], v=case.v[:0])
    out, lse = kernels_dsl.attention_varlen(**bare.arguments(return_lse=True))
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


def _refusals(case: Paged) -> list[tuple[dict, type[Exception], str]]:
    starts, table = case.starts, case.table
    return [
        ({"cu_seqlens_k": starts}, ValueError, "cu_seqlens_k is given beside block_table, must be None"),
        ({"seqused_k": None}, ValueError, "seqused_k is None, must be given beside block_table"),
        ({"seqused_k": case.used[:1]}, ValueError, "seqused_k has 1 elements, must have 2"),
        ({"block_table": table.long()}, TypeError, "block_table is torch.int64 on cpu, must be torch.int32"),
        ({"block_table": table[:1]}, ValueError, r"block_table has shape \(1, 3\), must be \(2, pages"),
        ({"block_table": table[0]}, ValueError, r"block_table has shape \(3,\), must be"),
        ({"block_table": [1]}, TypeError, "block_table is a list, must be a torch.Tensor"),
        ({"k": case.k[0]}, ValueError, "k has shape .* must have 4 modes"),
        ({"v": case.v[:1]}, ValueError, "v has 1 pages, must have 5 like k"),
        ({"v": case.v[:, :5]}, ValueError, "v has a length of 5, must be 16 like k's"),
        ({"k": case.k[:, :0], "v": case.v[:, :0]}, ValueError, "k has pages of 0 keys"),
        ({"q": case.q[:, :3]}, ValueError, "q has 3 heads, must be a multiple of k's number of heads, 2"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q is None, must be given"),
        ({"block_table": None, "k": case.k[0], "v": case.v[0]}, TypeError, "cu_seqlens_k is a NoneType"),
    ]  # fmt: skip


def test_refusals(seed, arch):
    case = paged(((3, 20), (2, 9)), 16, seed)
    assert kernels_dsl.attention_supports(layout="thd", **case.arguments()) is None
    for wrong, error, message in _refusals(case):
        with pytest.raises(error, match=message):
            kernels_dsl.attention_varlen(**case.arguments(**wrong))
    wide = case.table[:, :1].expand(2, 1 << 27)
    reason = kernels_dsl.attention_supports(layout="thd", **case.arguments(block_table=wide))
    assert reason is not None and "must be for at most 1073741824" in reason
    case.k.requires_grad_()
    with pytest.raises(RuntimeError, match="k requires grad, but attention has no gradient with block_table"):
        kernels_dsl.attention_varlen(**case.arguments())


def test_values_are_checked_on_request(seed, arch):
    case = paged(((3, 20), (2, 9)), 16, seed)
    more, wrong = case.used.clone(), case.table.clone()
    more[1], wrong[0, 1] = 49, 5
    for options, message in (
        ({"seqused_k": more}, r"seqused_k\[1\] is 49, must be from 0 to 48"),
        ({"block_table": wrong}, r"block_table\[0, 1\] is 5, must be from 0 to 4"),
    ):
        with kernels_dsl.checked(), pytest.raises(ValueError, match=message):
            kernels_dsl.attention_varlen(**case.arguments(**options))


def test_the_operator(seed, arch):
    """torch.compile sees one operator, whose fake implementation knows the shapes."""
    case = paged(((3, 20), (2, 9)), 16, seed)
    call = torch.compile(kernels_dsl.attention_varlen, backend="aot_eager", fullgraph=True)
    out, lse = call(**case.arguments(return_lse=True, causal=True))
    case.compare(out, lse, Masking(right=0))
