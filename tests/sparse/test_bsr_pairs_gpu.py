"""Lists in pairs on a GPU, against plain Python's greedy matching; without a wait, in a graph, repeatable."""

from __future__ import annotations

import pytest
import torch

from tests.sparse.bsr_pairs_cases import check, pattern_of_rows, random_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("kind", "count", "columns"),
    [
        ("uniform", 128, 128),
        ("power law", 301, 500),
        ("alike", 200, 300),
        ("duplicates", 64, 100),
        ("twins", 512, 1500),
        ("full", 1024, 16),
        ("unsorted", 1500, 60),  # two groups
        ("empty ones", 33, 8192),
    ],
)
def test_lists_are_those_of_plain_python(kind: str, count: int, columns: int, seed: int) -> None:
    rows = random_rows(kind, count, columns, seed)
    packed = [check(rows, columns, pattern_of_rows(rows, columns, "cuda").by_row) for _ in range(2)]
    assert torch.equal(*packed)


def test_they_are_made_without_a_wait_and_in_a_graph(seed: int) -> None:
    """By column, too: the graph finds the pattern that its index tensors have when it runs."""
    rows = random_rows("uniform", 96, 128, seed)
    pattern = pattern_of_rows(rows, 128, "cuda")
    expected = pattern.by_row.in_pairs, pattern.by_column.in_pairs
    again = pattern_of_rows(random_rows("uniform", 96, 128, seed + 1), 128, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = again.by_row.in_pairs, again.by_column.in_pairs
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again.col.copy_(pattern.col)
    graph.replay()
    for a, b in zip(expected, found):
        assert torch.equal(a, b)
