"""Steps of the SM90 attention that take two listed blocks of keys side by side, in the emulator.

Lists have odd and even numbers of partial and of whole blocks, none, and blocks past the end of the keys; two
SMs take several tiles each. TEST_ALL_KERNELS=1 takes the whole grids.
The emulator also reports races and reads of memory that nobody wrote.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.ops.attention import plan
from kernels_dsl.ops.attention.list_order import longest_first
from kernels_dsl.sparse import attention_blocks
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from reference.attention import Masking, allowed_by_lists
from tests.ops.attention.attention_cases import check_close, inputs, run
from tests.samples import one, pairs

PAIR = Sm90AttentionConfig(64, 128, 64, 64, stages=1, lazy_rescale=True, joined=2, ctas_per_sm=2)
CONFIGS = {
    "two on an SM": PAIR,
    "more stages": replace(PAIR, stages=2, ctas_per_sm=1),
    "tall": Sm90AttentionConfig(128, 128, 64, 64, lazy_rescale=True, joined=2),
    "longest first": replace(PAIR, longest_first=True),
    "tall, maxima at once": Sm90AttentionConfig(128, 128, 64, 64, joined=2),
}


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a", sms=2):
        yield


def _lists(shape: tuple[int, int, int, int], seed: int, kinds: str, block=(64, 64)) -> BlockLists:
    """Random lists, one for each head of (batch, heads, queries, keys) `shape`: up to five entries of each of
    `kinds`, "partial", "whole" or both, no block twice."""
    batch, heads, rows, keys = shape
    query_blocks, key_blocks = (-(-n // b) for n, b in zip((rows, keys), block))
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand((batch, heads, query_blocks, key_blocks), generator=generator).argsort(-1).int()
    most = min(5, key_blocks // 2)
    counts = torch.randint(0, most + 1, (2, batch, heads, query_blocks), generator=generator).int()
    counts[:, 0, 0, 0] = 0
    partial, whole = (counts[0], order[..., :most].contiguous()), (counts[1], order[..., most:].contiguous())
    return BlockLists(
        *(partial if "partial" in kinds else (None, None)),
        *(whole if "whole" in kinds else (None, None)),
        block,
    )


def _run(lists, shape, heads_kv, seed, config, hidden=None, dims=(64, 64), right=None, **options):
    batch, heads, rows, keys = shape
    tensors = inputs((batch, rows, heads, dims[0]), (batch, keys, heads_kv, dims[0]), dims[1], seed)
    # The edge of the mask cuts partial blocks alone.
    after = None if right is None else torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows + right
    hidden = after if hidden is None else hidden
    allowed = allowed_by_lists(lists.tensors, lists.block, shape, hidden)
    if right is not None:
        options["window"] = (None, right)
    run(tensors, Masking(allowed=allowed), blocks=lists, config=config, **options)


@pytest.mark.parametrize(
    ("kinds", "name"), pairs("kinds of lists", ("partial", "whole", "partial and whole"), CONFIGS)
)
def test_odd_even_and_empty_lists(name, kinds, seed):
    block = (CONFIGS[name].tile_m, 64)
    lists = _lists((1, 2, 320, 640), seed, kinds, block)
    _run(lists, (1, 2, 320, 640), 1, seed, CONFIGS[name])


def test_lists_that_are_seen_again_have_an_order(monkeypatch, seed):
    """Of their own; the bits stay."""
    orders: list[int] = []

    def noted(*arguments):
        order = longest_first(*arguments)
        orders.append(order.numel())
        return order

    monkeypatch.setattr(plan, "longest_first", noted)
    shape = (1, 2, 320, 640)
    lists, tensors = _lists(shape, seed, "whole"), inputs((1, 320, 2, 64), (1, 640, 1, 64), 64, seed)
    first, second = (kernels_dsl.attention(*tensors, blocks=lists, return_lse=True) for _ in range(2))
    assert orders == [0, 10]
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    check_close(first, tensors, Masking(allowed=allowed_by_lists(lists.tensors, lists.block, shape)))


@pytest.mark.parametrize("name", one("ragged ends", ["two on an SM", "tall"]))
def test_ragged_ends_and_several_sequences(name, seed):
    block = (CONFIGS[name].tile_m, 64)
    shape = (2, 2, 200, 550)
    _run(_lists(shape, seed, "partial and whole", block), shape, 2, seed, CONFIGS[name])


@pytest.mark.parametrize("name", one("causal edges", ["two on an SM", "tall"]))
def test_a_causal_edge_in_partial_blocks(name, seed):
    """Whole blocks are not cut, wherever they are."""
    block = (CONFIGS[name].tile_m, 64)
    shape = (1, 2, 200, 330)
    _run(_lists(shape, seed, "partial and whole", block), shape, 1, seed, CONFIGS[name], right=0)


def _every_third(b, h, i, j):
    return (i - j + h) % 3 == 0


def test_a_mask_function_in_partial_blocks(seed):
    shape = (1, 2, 130, 450)
    i, j = torch.arange(130)[:, None], torch.arange(450)[None]
    hidden = torch.stack([~_every_third(0, h, i, j) for h in range(2)])[None]
    _run(_lists(shape, seed, "partial and whole"), shape, 2, seed, PAIR, hidden=hidden, mask_mod=_every_third)


def _alibi(score, b, h, i, j):
    return score - (i - j) * 0.0625 * (h + 1)


def test_a_score_function(seed):
    shape = (1, 2, 130, 450)
    tensors = inputs((1, 130, 2, 64), (1, 450, 2, 64), 64, seed)
    lists = _lists(shape, seed, "partial and whole")
    masking = Masking(allowed=allowed_by_lists(lists.tensors, lists.block, shape), score_mod=_alibi)
    run(tensors, masking, blocks=lists, score_mod=_alibi, config=PAIR)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_mask_tensors(kind, seed):
    shape = (1, 1, 130, 450)
    lists = _lists(shape, seed, "partial and whole")
    mask = torch.randn((130, 450), generator=torch.Generator().manual_seed(seed))
    hidden = bias = None
    if kind == "boolean":  # in partial blocks alone
        mask = mask < 0.5
        hidden = ~mask
    else:
        bias = mask
    allowed = allowed_by_lists(lists.tensors, lists.block, shape, hidden)
    tensors = inputs((1, 130, 1, 64), (1, 450, 1, 64), 64, seed)
    run(tensors, Masking(allowed=allowed, bias=bias), blocks=lists, mask=mask, config=PAIR)


def test_softcap_and_sinks(seed):
    shape, sinks = (1, 2, 130, 450), torch.tensor([0.5, -1.0])
    lists = _lists(shape, seed, "partial and whole")
    masking = Masking(allowed=allowed_by_lists(lists.tensors, lists.block, shape), softcap=2.0, sinks=sinks)
    tensors = inputs((1, 130, 2, 64), (1, 450, 2, 64), 64, seed)
    run(tensors, masking, blocks=lists, softcap=2.0, sinks=sinks, config=PAIR)


def test_window_lists(seed):
    lists = attention_blocks.window_blocks(200, 330, left=150, block=(64, 64), device="cpu")
    tensors = inputs((1, 200, 1, 64), (1, 330, 1, 64), 64, seed)
    run(tensors, Masking(left=150, right=0), blocks=lists, window=(150, 0), config=PAIR)


@pytest.mark.parametrize("dims", one("joined dims", [(96, 96), (128, 128), (192, 128)]))
def test_head_dimensions(dims, seed):
    shape = (1, 1, 130, 450)
    config = Sm90AttentionConfig(64, 128, *dims, stages=1, lazy_rescale=True, joined=2)
    _run(_lists(shape, seed, "whole"), shape, 1, seed, config, dims=dims)


def test_unsorted_lists_of_larger_blocks_with_garbage(seed):
    """A listed block is three of those that a step takes two of. Some numbers are no blocks."""
    indices = torch.tensor([2, 0, 99, -7], dtype=torch.int32).view(1, 1, 1, 4).repeat(1, 1, 3, 1)
    counts = torch.tensor([2, 0, 1], dtype=torch.int32).view(1, 1, 3)
    lists = BlockLists(None, None, counts, indices, (64, 192))
    allowed = allowed_by_lists(lists.tensors, lists.block, (1, 2, 190, 500))
    tensors = inputs((1, 190, 2, 64), (1, 500, 2, 64), 64, seed)
    run(tensors, Masking(allowed=allowed), blocks=lists, config=PAIR)


@pytest.mark.parametrize("name", one("joined and packed", ["two on an SM", "tall"]))
def test_packed_sequences(name, seed):
    """Empty and short ones too, with NaN wherever no key counts."""
    config = CONFIGS[name]
    q_lens, k_lens, gap, block = (70, 0, 1, 200), (150, 5, 0, 300), 20, (config.tile_m, 64)
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, [n + gap for n in k_lens])]
    q, k, v = inputs((sum(q_lens), 2, 64), (int(starts[1][-1]), 1, 64), 64, seed)
    for x in (k, v):
        for first, count in zip(starts[1][:-1], k_lens):
            x[first + count : first + count + gap] = torch.nan
    lists = _lists((4, 2, max(q_lens), max(k_lens)), seed, "partial and whole", block)
    out, lse = kernels_dsl.attention_varlen(
        q, k, v, *starts, max(q_lens), max(k_lens), seqused_k=torch.tensor(k_lens).int(), blocks=lists,
        return_lse=True, config=config,
    )  # fmt: skip
    reach = (4, 2, -(-max(q_lens) // block[0]) * block[0], -(-max(k_lens) // 64) * 64)
    allowed = allowed_by_lists(lists.tensors, lists.block, reach)
    for n, (q_len, k_len) in enumerate(zip(q_lens, k_lens)):
        if q_len:
            rows = slice(int(starts[0][n]), int(starts[0][n + 1]))
            keys = slice(int(starts[1][n]), int(starts[1][n]) + k_len)
            masking = Masking(allowed=allowed[n : n + 1, :, :q_len, :k_len])
            check_close(
                (out[None, rows], lse[None, :, rows]), (q[None, rows], k[None, keys], v[None, keys]), masking
            )


def test_where_blocks_cannot_be_joined():
    q = torch.zeros((1, 64, 1, 64), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="joins 2 listed blocks in a step, must have block lists"):
        kernels_dsl.attention(q, q, q, config=PAIR)
    with pytest.raises(ValueError, match="joined is 3, must divide tile_n into multiples of 16"):
        kernels_dsl.attention(q, q, q, config=replace(PAIR, joined=3))
