"""Block lists that say nonsense: attention reads and writes nothing beside its tensors, for both families."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from lowering import emulator

BLOCK, ROWS, DIM = 128, 256, 64
LISTS = {  # counts and entries of two blocks of queries
    "counts past the entries": ([5, 2**31 - 1], [[0, 1], [1, 0]]),
    "counts below zero": ([-3, -(2**31)], [[0, 1], [1, 0]]),
    "blocks past the last": ([2, 1], [[0, 900], [2, 0]]),
    "blocks before the first": ([2, 1], [[0, -7], [-1, 0]]),
}


def _lists(counts: list[int], entries: list[list[int]]) -> kernels_dsl.BlockLists:
    count, entry = (torch.tensor(x, dtype=torch.int32)[None, None] for x in (counts, entries))
    return kernels_dsl.BlockLists(count, entry, block=(BLOCK, BLOCK))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize(("counts", "entries"), LISTS.values(), ids=LISTS)
def test_nothing_beside_the_tensors_is_touched(counts, entries, arch):
    q, k, v = torch.randn(3, 1, ROWS, 1, DIM).bfloat16()
    with emulator.run(arch=arch) as session:  # an access outside raises
        out = kernels_dsl.attention(q, k, v, blocks=_lists(counts, entries))
    assert not session.reports and out.isfinite().all()


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_a_count_past_the_entries_counts_what_is_there(arch):
    q, k, v = torch.randn(3, 1, ROWS, 1, DIM).bfloat16()
    entries = [[0, 1], [1, 0]]
    with emulator.run(arch=arch):
        found = kernels_dsl.attention(q, k, v, blocks=_lists([9, 2], entries))
        assert torch.equal(found, kernels_dsl.attention(q, k, v, blocks=_lists([2, 2], entries)))
