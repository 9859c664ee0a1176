"""`attention_decode` on a GPU: pages, masks, graphs, streams, torch.compile, against float64; its bits."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from reference.attention import Masking
from reference.buffers import check_output, poisoned
from tests.ops.serving.decode_cases import NO_PAGE, Paged, check, paged
from tests.ops.serving.rescored_cases import with_queries

pytestmark = pytest.mark.gpu
CAUSAL = Masking(right=0)
BORDERS = (1, 0, 63, 64, 65, 1024, 1025, 5000, 16384, 16385)
"""Lengths at the borders of pages and splits."""


@pytest.mark.parametrize("page", [1, 13, 16, 64, 128, 256, 1000])
def test_pages_of_any_size(page, seed):
    case = paged(BORDERS, page, seed, queries=2, heads=(8, 2), dim=128).cuda()
    check(case, case.decode(), CAUSAL)


@pytest.mark.parametrize("heads", [(2, 2), (32, 2), (64, 1)])
@pytest.mark.parametrize("dim", [8, 72, 96, 256])
def test_head_dimensions_and_rows(dim, heads, seed):
    case = paged((3000, 0, 1, 129), 16, seed, heads=heads, dim=dim).cuda()
    check(case, case.decode(), CAUSAL)


@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_window_softcap_sinks(queries, dtype, seed):
    """Pages before the window are none, and keys there hold NaN."""
    sinks = torch.randn(4, device="cuda")
    lengths = (4000, 2600, 2100)
    case = paged(lengths, 16, seed, queries=queries, heads=(4, 1), dim=128, hidden=1500, dtype=dtype).cuda()
    left = 600 - queries
    found = case.decode(window=(left, 0), softcap=3.0, sinks=sinks)
    check(case, found, Masking(left=left, right=0, softcap=3.0, sinks=sinks))
    found = case.decode(window=(left, 0))
    check(case, found, Masking(left=left, right=0))


def test_more_queries_than_keys(seed):
    """Rows that see no key are 0, with a log-sum-exp of -inf."""
    case = paged((5, 3, 0, 700), 16, seed, queries=8).cuda()
    check(case, case.decode(), CAUSAL)
    check(case, case.decode(causal=False), Masking())


def test_scores_far_apart(seed):
    """Maxima that rise late, and splits whose weights vanish beside others'."""
    case = paged((9000,), 64, seed, dim=128)
    case.k_cache.mul_(torch.linspace(0, 8, len(case.k_cache)).bfloat16()[:, None, None, None])
    k = torch.cat([case.k_cache[p] for p in case.block_table[0].tolist() if p != NO_PAGE])[:9000]
    case = case._replace(whole=[(k, case.whole[0][1])]).cuda()
    check(case, case.decode(), CAUSAL)


def test_dense_caches_of_heads_before_keys(seed):
    k, v = (torch.randn(3, 2, 2500, 64, device="cuda").bfloat16().transpose(1, 2) for _ in range(2))
    q = torch.randn(3, 1, 8, 64, device="cuda").bfloat16()
    used = torch.tensor([2500, 77, 0], device="cuda", dtype=torch.int32)
    whole = [(k[b, :n], v[b, :n]) for b, n in enumerate(used.tolist())]
    case = Paged(q, k, v, used, torch.empty(0), whole)
    check(case, case.decode(block_table=None), CAUSAL)


@pytest.mark.parametrize(("dim", "heads"), [(64, (4, 2)), (128, (32, 4)), (256, (4, 1))])
@pytest.mark.parametrize("left", [None, 2600])
def test_a_query_has_the_same_bits_alone_and_among_others(dim, heads, left, seed):
    """With `decode_equals_prefill`, at the borders of splits and of tiles of rows."""
    case = paged((4111, 900), 16, seed, heads=heads, dim=dim).cuda()
    rescored = with_queries(case, (200, 70), (0, 1, 15, 16, 184, 185, 199), seed)
    options = {"decode_equals_prefill": True, "window": None if left is None else (left, 0)}
    found = rescored.of_steps(rescored.together(**options))
    assert found.same(rescored.one_by_one(**options))
    assert found.same(rescored.one_by_one(packed=False, **options))
    assert found.same(rescored.in_chunks(77, **options))


def test_a_long_sequence_beside_short_ones(seed):
    case = paged((131072, 1, 70000, 0, 128), 64, seed, heads=(4, 1), dim=128).cuda()
    check(case, case.decode(), CAUSAL)


def _room(case: Paged, keys: int) -> Paged:
    """The same with a table that has room for `keys`."""
    more = -(-keys // case.k_cache.shape[1]) - case.block_table.shape[1]
    return case._replace(block_table=torch.nn.functional.pad(case.block_table, (0, more), value=NO_PAGE))


def test_a_graph_serves_all_lengths(seed):
    """Captured with room for 131072 keys a sequence, replayed at other lengths and pages: the same bits as an
    eager call whose table has room for those keys alone."""
    lengths = ((9000, 4097), (130, 1), (0, 64))
    many = [paged(x, 16, seed, heads=(8, 2), dim=128).cuda() for x in lengths]
    pages = max(len(case.k_cache) for case in many)
    fixed = [torch.full((pages, *many[0].k_cache.shape[1:]), torch.nan).bfloat16().cuda() for _ in range(2)]
    room = _room(many[0], 131072)._replace(k_cache=fixed[0], v_cache=fixed[1])
    room = Paged(*(x.clone() for x in room[:5]), [])
    room.decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = room.decode()
    for case in (*many, many[0]):
        for target, source in zip(room[:5], _room(case, 131072)[:5]):
            target[: len(source)].copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        check(case, (out, lse), CAUSAL)
        assert all(torch.equal(x, y) for x, y in zip(case.decode(), (out, lse)))


def test_lengths_and_pages_that_the_kernel_just_before_writes(seed):
    """Then the first item that a CTA guesses, before that kernel has ended, is of the call before."""
    case = paged((3000, 2999, 1, 1700), 16, seed, heads=(32, 8), dim=128).cuda()
    draw = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, 3000, (4,), generator=draw, dtype=torch.int32).cuda() for _ in range(12)]
    tables = [
        torch.randint(0, len(case.k_cache), (4, 188), generator=draw, dtype=torch.int32).cuda()
        for _ in lengths
    ]
    steps = [case._replace(seqused_k=n, block_table=t) for n, t in zip(lengths, tables)]
    for page in (case.k_cache, case.v_cache):
        page.nan_to_num_()  # any page may be any sequence's
    wanted = [step.decode() for step in steps]
    changing = case._replace(seqused_k=lengths[0].clone(), block_table=tables[0].clone())
    changing.decode()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for n, table in zip(lengths, tables):
            changing.block_table.copy_(table)
            changing.seqused_k.copy_(n)
            found.append(changing.decode())
    for _ in range(20):
        graph.replay()
        for step, other in zip(wanted, found):
            assert all(torch.equal(x, y) for x, y in zip(step, other))


@pytest.mark.parametrize("page", [16, 100])
def test_a_sequences_bits_depend_on_itself_alone(page, seed):
    """Whatever the batch beside it, its place there, the place of its pages and the room in the table."""
    lengths = (5000, 17, 131, 20000, 64, 0, 1500)
    batch = paged(lengths, page, seed, heads=(8, 2), dim=128).cuda()
    found = batch.decode()
    again = batch.decode()
    assert all(torch.equal(x, y) for x, y in zip(found, again))
    for b in range(len(lengths)):
        alone = Paged(*(x[b : b + 1] if n in (0, 3, 4) else x for n, x in enumerate(batch)))
        assert all(torch.equal(x, y[b : b + 1]) for x, y in zip(_room(alone, 200000).decode(), found))
    order = torch.randperm(len(batch.k_cache), generator=torch.Generator().manual_seed(seed)).cuda()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cuda"))
    table = torch.where(batch.block_table == NO_PAGE, NO_PAGE, place[batch.block_table.clamp(min=0)]).int()
    moved = batch._replace(k_cache=batch.k_cache[order], v_cache=batch.v_cache[order], block_table=table)
    large = moved._replace(
        q=moved.q.repeat(40, 1, 1, 1), seqused_k=moved.seqused_k.repeat(40), block_table=table.repeat(40, 1)
    )
    assert all(torch.equal(x, y) for x, y in zip(moved.decode(), found))
    for x, y in zip(large.decode(), found):
        assert torch.equal(x, y.repeat(40, *[1] * (x.dim() - 1)))


def test_output_is_written_once_and_nothing_else(seed):
    case = paged((700, 0, 33), 16, seed, queries=3, heads=(6, 2), dim=72).cuda()
    place = poisoned(tuple(case.q.shape), case.q.dtype, device="cuda")
    case.decode(out=place.tensor)
    check_output(place)


def test_torch_compile(seed):
    case = paged((700, 0, 33), 16, seed, heads=(8, 2), dim=128).cuda()

    @torch.compile(fullgraph=True)
    def compiled(q, k, v, used, table):
        return kernels_dsl.attention_decode(q, k, v, seqused_k=used, block_table=table) * 2

    assert torch.equal(compiled(*case[:5]), case.decode()[0] * 2)


def test_two_streams_at_a_time(seed):
    cases = [paged((9000, 400), 16, seed + n, heads=(8, 2), dim=128).cuda() for n in range(2)]
    expected = [case.decode()[0] for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, case, results in zip(streams, cases, found):
            with torch.cuda.stream(stream):
                results.append(case.decode()[0])
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for results, y in zip(found, expected) for x in results)


def test_caches_of_more_than_2_to_the_31_elements(seed):
    """Offsets of pages and of keys do not fit 32 bits."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    case = paged((300, 40), 16, seed, heads=(4, 2), dim=128)
    shape = ((1 << 31) // case.k_cache[0].numel() + len(case.k_cache) + 1, *case.k_cache.shape[1:])
    first = shape[0] - len(case.k_cache)
    caches = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for large, small in zip(caches, case[1:3]):
        large[first:] = small.cuda()
    table = torch.where(case.block_table == NO_PAGE, NO_PAGE, case.block_table + first)
    found = case.cuda()._replace(k_cache=caches[0], v_cache=caches[1], block_table=table.cuda()).decode()
    check(case.cuda(), found, CAUSAL)


def test_a_server_that_generates(seed):
    """Prefill by `attention`, then a captured step of `append_kv` and `attention_decode`: what attention over
    all tokens gives at the last one."""
    batch, heads, dim, page, prompt, steps = 3, (8, 2), 128, 16, 100, 40
    q, k, v = (
        torch.randn(batch, prompt + steps, n, dim, device="cuda").bfloat16()
        for n in (heads[0], heads[1], heads[1])
    )
    caches = torch.full((2, 40, page, heads[1], dim), torch.nan, device="cuda").bfloat16()
    table = torch.randperm(40, device="cuda")[:36].int().view(batch, 12)
    before = torch.zeros(batch, device="cuda", dtype=torch.int32)
    kernels_dsl.append_kv(k[:, :prompt], v[:, :prompt], *caches, cache_seqlens=before, block_table=table)
    before += prompt
    new = [torch.zeros_like(x[:, :1]) for x in (q, k, v)]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        kernels_dsl.append_kv(*new[1:], *caches, cache_seqlens=before, block_table=table)
        before.add_(1)
        return Paged(new[0], *caches, before, table, []).decode()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    before.fill_(prompt)
    for t in range(prompt, prompt + steps):
        for target, x in zip(new, (q, k, v)):
            target.copy_(x[:, t : t + 1])
        graph.replay()
        whole = [(k[b, : t + 1], v[b, : t + 1]) for b in range(batch)]
        check(Paged(new[0], *caches, before, table, whole), found, CAUSAL)
    assert before.tolist() == [prompt + steps] * batch
