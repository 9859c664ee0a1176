"""The block-sparse references against dense products, and the patterns."""

from __future__ import annotations

import pytest
import torch

from reference.bsr import PATTERNS, matmul, random_bsr, sampled, to_dense


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_against_the_dense_product(pattern: str) -> None:
    matrix = random_bsr(pattern, (4, 5), (3, 2), 2, dtype=torch.float32, exact=False, sorted_columns=False)
    dense = to_dense(matrix)
    b = torch.randn(10, 7)
    torch.testing.assert_close(matmul(matrix, b), dense @ b.double())
    a, c = torch.randn(12, 6), torch.randn(6, 10)
    kept = sampled(a, c, matrix)
    full = (a.double() @ c.double()).view(4, 3, 5, 2).transpose(1, 2)
    rows = torch.repeat_interleave(torch.arange(4), matrix.crow.diff())
    torch.testing.assert_close(kept, full[rows, matrix.col.long()])


def test_rows_that_no_block_reads_may_hold_anything() -> None:
    matrix = random_bsr("empty_rows", (4, 6), (2, 2), 2, dtype=torch.float32)
    b = torch.randn(12, 3)
    expected = matmul(matrix, b)
    b[:2] = float("nan")  # block column 0 is empty
    assert torch.equal(matmul(matrix, b), expected)


def test_patterns() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = {name: pattern(32, 64, 8, generator) for name, pattern in PATTERNS.items()}
    assert (masks["uniform"].sum(1) == 8).all()
    lengths = masks["power_law"].sum(1)
    assert lengths.sum() == 32 * 8 and lengths.max() > 16 and lengths.min() >= 1
    assert masks["one_heavy_row"].sum(1).tolist().count(64) == 1
    assert (masks["empty_rows"].sum(1)[::2] == 0).all() and masks["empty_rows"].any()
    assert masks["full"].all() and not masks["none"].any()
