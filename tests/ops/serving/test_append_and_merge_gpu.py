"""`append_kv` and `merge_states` on a GPU: layouts, fp8, graphs, streams and torch.compile."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from reference.attention import Masking
from tests.ops.serving import append_cases, merge_cases
from tests.ops.serving.append_cases import BF16, E4M3, Caches, filled_caches, new_tokens
from tests.ops.serving.decode_cases import check, paged
from tests.ops.serving.merge_cases import States, random_states

pytestmark = pytest.mark.gpu


def _on_gpu(pair: Caches) -> Caches:
    """Copies with the strides that they have."""
    return Caches(*(x.cuda() if x.is_contiguous() else _strided_copy(x) for x in pair))


def _strided_copy(x: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8, device="cuda")
    storage.fill_(0x55)
    copy = storage.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
    return copy.copy_(x)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(E4M3, marks=pytest.mark.sm90)])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "turns"])
@pytest.mark.parametrize("dim", [64, 20, 7])
def test_append(dtype, layout, dim, seed):
    pages, size, heads, tokens = 300, 16, 5, 1000
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages * size, generator=generator)[:tokens]
    slots[::7] = torch.tensor([-1, pages * size, 1 << 40])[torch.arange(len(slots[::7])) % 3]
    scales = (torch.tensor(0.75).cuda(), torch.rand(heads).cuda() + 0.5) if dtype == E4M3 else (None, None)
    new = _on_gpu(new_tokens(tokens, heads, dim, seed=seed))
    caches = _on_gpu(filled_caches(layout, (pages, size, heads, dim), dtype))
    append_cases.check(new, caches, slots.cuda(), scales)


def test_append_in_a_graph_and_compiled(seed):
    new, caches = (
        _on_gpu(new_tokens(64, 4, 128, seed=seed)),
        _on_gpu(filled_caches("nhd", (9, 16, 4, 128), BF16)),
    )
    slots = torch.arange(64, device="cuda")
    kernels_dsl.append_kv(*new, *caches, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels_dsl.append_kv(*new, *caches, slots)
    slots.copy_(torch.randperm(144, device="cuda")[:64])
    graph.replay()
    expected = caches.k.clone().view(144, 4, 128)
    expected[slots] = new.k
    assert torch.equal(caches.k.view(144, 4, 128), expected)

    @torch.compile(fullgraph=True)
    def compiled(k, v, k_cache, v_cache, slots):
        kernels_dsl.append_kv(k + 1, v, k_cache, v_cache, slots)
        return k_cache * 2

    expected[slots] = new.k + 1
    assert torch.equal(compiled(*new, *caches, slots).view(144, 4, 128), expected * 2)


@pytest.mark.parametrize("columns", [64, 20, 256, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merge(dtype, columns, seed):
    for shape in ((3, 2, 50, 6, columns), (130, 9, 3, columns), (1, 700, columns)):
        states = States(*(x.cuda() for x in random_states(shape, dtype, seed)))
        merge_cases.check(states)
        merge_cases.check(states, torch.float32)


def test_merge_in_a_graph_and_compiled(seed):
    states = States(*(x.cuda() for x in random_states((4, 33, 8, 128), torch.bfloat16, seed)))
    expected = kernels_dsl.merge_states(*states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels_dsl.merge_states(*states)
    graph.replay()
    compiled = torch.compile(kernels_dsl.merge_states, fullgraph=True)(*states)
    for result in (found, compiled):
        assert all(torch.equal(x, y) for x, y in zip(result, expected))


def test_a_prefix_that_requests_share(seed):
    """A prefix's attention merged with that of each request's own keys is attention over both."""
    case = paged((500, 731, 1200), 16, seed, heads=(8, 2), dim=128).cuda()
    prefix, parts, lses = 256, [], []
    for first, length in ((0, torch.full_like(case.seqused_k, prefix)), (prefix, case.seqused_k - prefix)):
        table = case.block_table[:, first // 16 :].contiguous()
        out, lse = case._replace(seqused_k=length, block_table=table).decode()
        parts.append(out)
        lses.append(lse)
    out, lse = kernels_dsl.merge_states(torch.stack(parts).float(), torch.stack(lses).mT, out_dtype=BF16)
    check(case, (out, lse.mT), Masking(right=0))
