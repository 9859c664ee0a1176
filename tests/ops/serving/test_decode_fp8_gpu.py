"""`attention_decode` with caches of e4m3 on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from reference.attention import Masking
from tests.ops.serving.decode_cases import Scales, check, fp8_case

pytestmark = pytest.mark.gpu
CAUSAL = Masking(right=0)


def _cuda(scales: Scales) -> dict[str, torch.Tensor]:
    return {name: x.cuda() for name, x in scales._asdict().items()}


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (32, 1), (64, 1)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dimensions_and_rows(dtype, dim, heads, seed):
    case, scales = fp8_case((3000, 0, 1, 129, 16385), 16, seed, heads=heads, dim=dim, dtype=dtype)
    found = case.cuda().decode(**_cuda(scales))
    check(case.cuda(), found, CAUSAL)


@pytest.mark.parametrize("page", [1, 13, 64, 1000])
def test_pages_windows_softcap_sinks(page, seed):
    sinks = torch.randn(8, device="cuda")
    case, scales = fp8_case((4000, 2600, 2100), page, seed, queries=2, heads=(8, 2), dim=128, hidden=1500)
    found = case.cuda().decode(window=(598, 0), softcap=3.0, sinks=sinks, **_cuda(scales))
    check(case.cuda(), found, Masking(left=598, right=0, softcap=3.0, sinks=sinks))


def test_a_graph_and_a_sequences_bits(seed):
    """Replayed at other lengths; a sequence alone has the same bits; one scale a sequence and head."""
    case, scales = fp8_case((5000, 17, 131, 20000), 16, seed, heads=(8, 2), dim=128)
    case, given = case.cuda(), _cuda(scales)
    found = case.decode(**given)
    check(case, found, CAUSAL)
    each = {name: x.expand(4, 2).contiguous() for name, x in given.items()}
    assert all(torch.equal(x, y) for x, y in zip(case.decode(**each), found))
    alone = case._replace(
        q=case.q[:1], seqused_k=case.seqused_k[:1], block_table=case.block_table[:1], whole=case.whole[:1]
    )
    assert all(torch.equal(x, y[:1]) for x, y in zip(alone.decode(**given), found))
    used = case.seqused_k.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.decode(**given)
    case.seqused_k.copy_(torch.tensor([4000, 1, 100, 19999]))
    graph.replay()
    check(
        case._replace(whole=[(k[:n], v[:n]) for n, (k, v) in zip(case.seqused_k.tolist(), case.whole)]),
        captured,
        CAUSAL,
    )
    case.seqused_k.copy_(used)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, found))


def test_infinities_and_nan_of_queries(seed):
    """They give NaN where PyTorch has NaN, in their own rows alone."""
    case, scales = fp8_case((100,), 16, seed, heads=(4, 1))
    case.q[0, 0, 0, 3], case.q[0, 0, 2, 5] = torch.nan, torch.inf
    out = kernels_dsl.attention_decode(
        *case.cuda()[:3],
        seqused_k=case.seqused_k.cuda(),
        block_table=case.block_table.cuda(),
        **_cuda(scales),
    )
    assert out[0, 0, [0, 2]].isnan().all() and out[0, 0, [1, 3]].isfinite().all()
