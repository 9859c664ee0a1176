"""Tables of pages that say nonsense: attention to a cache reads nothing beside it, in every kernel."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from lowering import emulator

PAGES, PAGE, HEADS, DIM = 4, 16, 2, 64
TABLES = {
    "past the last page": [[0, 9999], [2**31 - 1, 3]],
    "before the first": [[-1, 1], [2, -(2**31)]],
}
LENGTHS = {"within": [32, 20], "nonsense": [2**31 - 1, -5]}


def _decode(q, caches, lengths, table):
    return kernels_dsl.attention_decode(q[:, None], *caches, seqused_k=lengths, block_table=table)


def _packed(q, caches, lengths, table):
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    return kernels_dsl.attention_varlen(
        q, *caches, starts, max_seqlen_q=1, seqused_k=lengths, block_table=table, causal=True, family="sm80"
    )


@pytest.mark.parametrize("call", [_decode, _packed])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_nothing_beside_the_cache_is_read(table, lengths, call):
    q, caches = torch.randn(2, 2 * HEADS, DIM).bfloat16(), torch.randn(2, PAGES, PAGE, HEADS, DIM).bfloat16()
    numbers = [torch.tensor(x, dtype=torch.int32) for x in (lengths, table)]
    with emulator.run(arch="sm_89") as session:  # an access outside raises
        out = call(q, caches, *numbers)
    assert not session.reports and out.isfinite().all()


@pytest.mark.parametrize("call", [_decode, _packed])
def test_a_table_without_pages_has_no_keys(call):
    q, caches = torch.randn(2, 2 * HEADS, DIM).bfloat16(), torch.randn(2, PAGES, PAGE, HEADS, DIM).bfloat16()
    with emulator.run(arch="sm_89") as session:
        out = call(q, caches, torch.tensor([3, 0], dtype=torch.int32), torch.empty(2, 0, dtype=torch.int32))
    assert not session.reports and (out == 0).all()
