"""Lists and chunks of block rows by one kernel each: the same as by PyTorch's sort."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.blocks.schedule.block_lists import HEADER
from kernels_dsl.config.bsr import ROW_LISTS_HEADER
from kernels_dsl.sparse.lists import Lists, row_chunks, row_lists
from kernels_dsl.sparse.pattern import Pattern
from lowering import emulator
from reference.inputs import case_seed

EXTENT = 40


def _format(lengths: list[int], dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    return first, torch.randint(EXTENT, (int(first[-1]),), generator=generator).to(dtype)


def _assert_same(found: Lists, expected: Lists) -> None:
    for name in ("table", "first", "across", "kept", "packed"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == torch.int32 and torch.equal(ours, theirs), name
        assert ours.data_ptr() % 16 == 0, name
    assert found.extent == expected.extent


LENGTHS = {
    "one": [1],
    "one of three": [0, 3, 0],
    "equal": [2] * 130,
    "falling": list(range(9, -1, -1)),
    "one heavy": [1, 40, 1, 1, 1, 1],
    "at the limit": [3, 1, 2, 2],  # 3 is 1.5 times the mean, and not heavier
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_kernel_makes_the_lists_of_torch(lengths, dtype):
    first, columns = _format(lengths, dtype, case_seed(str(lengths)))
    with emulator.run(arch="sm_80"):
        found = row_lists(first, columns, EXTENT)
    _assert_same(found, Pattern(first, columns, len(lengths), EXTENT).by_row)


NONSENSE = {
    "starts that fall": ([0, 5, 2, 9, 9, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    "starts outside": ([-7, 3, 99, 4], [1, 2, 3, 4]),
    "columns outside": ([0, 2, 4], [-1, 40, 2**31 - 1, -(2**31)]),
    "back and forth": ([0, 9, 0, 9, 0, 9, 0, 9], list(range(9))),
    "wider than int32": ([0, 2**40 + 1, 2], [2**32 + 3, -(2**40)]),
}


@pytest.mark.parametrize("starts, columns", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_makes_lists_of_blocks_that_exist(starts, columns):
    wide = max(map(abs, starts + columns)) >= 2**32
    dtype = torch.int64 if wide else torch.int32
    first, across = torch.tensor(starts, dtype=dtype), torch.tensor(columns, dtype=dtype)
    with emulator.run(arch="sm_80"):
        found = row_lists(first, across, EXTENT)
    pattern, nnz = Pattern(first, across, len(starts) - 1, EXTENT), len(columns)
    for name in ("table", "first", "across", "kept"):
        assert torch.equal(getattr(found, name), getattr(pattern.by_row, name)), name
    rows = len(starts) - 1
    for lists, count, extent in ((found, rows, EXTENT), (pattern.by_column, EXTENT, rows)):
        assert sorted(lists.table[:, 0].tolist()) == list(range(count))
        begin, end = lists.table[:, 1], lists.table[:, 2]
        assert ((begin >= 0) & (begin <= end) & (end <= nnz)).all() and (lists.first.diff() >= 0).all()
        assert int((end - begin).sum()) <= nnz
        assert ((lists.across >= 0) & (lists.across < extent)).all()
        assert sorted(lists.kept.tolist()) == list(range(nnz))


@pytest.mark.parametrize("units, group", [(1, 0), (2, 0), (2, 4), (3, 32)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_kernel_makes_the_chunks_of_torch(lengths, units, group):
    first, columns = _format(lengths, torch.int32, case_seed(str(lengths)))
    row, entry, *_ = Pattern(first, columns, len(lengths), EXTENT).chunks(units, group)
    with emulator.run(arch="sm_80"):
        found = row_chunks(first, len(row), units, group)
    assert torch.equal(found[0], row) and torch.equal(found[1], entry)


def test_starts_that_fall_write_within_the_chunks():
    """Whatever the starts are, no memory of others is written."""
    first = torch.tensor([0, 5, 2, 9, 9, 1], dtype=torch.int32)
    with emulator.run(arch="sm_80"):
        for most in (1, 4, 40):
            assert len(row_chunks(first, most, 2, 2)[0]) == most


def test_the_header_is_as_long_as_the_products_take_it():
    assert ROW_LISTS_HEADER == HEADER


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_patterns_use_it():
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 1000, 8192, 8193):
        first, columns = _format(
            torch.randint(0, 9, (rows,), generator=generator).tolist(), torch.int64, rows
        )
        found = Pattern(first.cuda(), columns.cuda(), rows, EXTENT).by_row
        assert (found.made is not None) == (rows <= 8192)
        expected = Pattern(first, columns, rows, EXTENT).by_row
        for units, group, together in ((4, 0, 1), (2, 32, 1), (4, 32, 2)):
            sources = (first.cuda(), columns.cuda()), (first, columns)
            chunks = [Pattern(*x, rows, EXTENT).chunks(units, group, together) for x in sources]
            assert all(torch.equal(x.cpu(), y) for x, y in zip(*chunks)), (rows, units, group, together)
        for name in ("table", "first", "across", "kept", "packed"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), (rows, name)
