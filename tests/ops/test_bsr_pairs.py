"""Lists in pairs, checked against what a plain program makes of the same pattern."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels_dsl.config.bsr import PAIR_ROWS, SECOND, SHARED
from kernels_dsl.ops.bsr import pairs
from kernels_dsl.ops.bsr.pattern import Pattern

COLUMNS = 24


def _pattern(rows: int, seed: int) -> tuple[Pattern, list[list[int]]]:
    """Rows of all lengths, unsorted, with empty ones, equal ones, and columns that come twice."""
    generator = torch.Generator().manual_seed(seed)
    lists: list[list[int]] = []
    for row in range(rows):
        kept = int(torch.randint(0, COLUMNS + 1, (1,), generator=generator)) if row % 3 else 6
        lists.append(torch.randperm(COLUMNS, generator=generator)[:kept].tolist())
        if row % 7 == 5:
            lists[row] = lists[row - 1][::-1]
        if row % 5 == 4 and lists[row]:
            lists[row].append(lists[row][0])
    crow = torch.tensor([0, *itertools.accumulate(map(len, lists))])
    return Pattern(crow, torch.tensor([*itertools.chain(*lists)]), rows, COLUMNS), lists


def _greedy(lists: list[list[int]]) -> list[int]:
    """The partner of each list: again and again the best pair of those left, of equals neighbours first."""
    order = sorted(range(len(lists)), key=lambda row: -len(lists[row]))
    scores = []
    for (i, row), (j, other) in itertools.combinations(enumerate(order), 2):
        uneven = abs(len(lists[row]) - len(lists[other]))
        score = pairs.SHARED_GAIN * len({*lists[row]} & {*lists[other]}) - pairs.UNEVEN_COST * uneven
        scores.append((-score, i ^ j, i, row, other))
    partner = list(range(len(lists)))
    for score, _, _, row, other in sorted(scores):
        if score <= 0 and partner[row] == row and partner[other] == other:
            partner[row], partner[other] = other, row
    return partner


@pytest.mark.parametrize("rows", [1, 2, 41])
def test_partners_are_those_of_a_greedy_choice(rows: int) -> None:
    pattern, lists = _pattern(rows, seed=rows)
    assert pairs.partners(pattern.by_row).tolist() == _greedy(lists)


def test_equal_lists_are_pairs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "ROUNDS", 1)
    pattern = Pattern(torch.arange(0, 84, 2), torch.tensor([3, 5]).repeat(41), 41, COLUMNS)
    assert pairs.partners(pattern.by_row).tolist() == [row ^ 1 for row in range(40)] + [40]


def test_many_lists_find_partners_among_those_alike_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "GROUP", 8)
    pattern, lists = _pattern(30, seed=3)
    order = sorted(range(30), key=lambda row: -len(lists[row]))
    partner = pairs.partners(pattern.by_row).tolist()
    for group in (order[i : i + 8] for i in range(0, 30, 8)):
        assert [partner[row] for row in group] == [group[i] for i in _greedy([lists[row] for row in group])]


@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (2, 1), (23, 2), (40, 3)])
def test_every_entry_is_there_once(rows: int, seed: int) -> None:
    """Whichever are paired: lines, halves, shared places, what lies behind a shorter list's end."""
    pattern, lists = _pattern(rows, seed)
    packed = pattern.by_row.in_pairs.tolist()
    assert packed == Pattern(pattern.crow, pattern.col, rows, COLUMNS).by_row.in_pairs.tolist()
    nnz = pattern.nnz
    table = [packed[4 + 4 * i : 8 + 4 * i] for i in range(rows)]
    dense, kept = (packed[4 + 4 * rows + i * 2 * nnz :][: 2 * nnz] for i in range(2))
    first = pattern.crow.tolist()
    partner = pairs.partners(pattern.by_row).tolist()
    done: dict[tuple[int, int], tuple[int, int]] = {}
    places: list[int] = []
    for word, begin, end, zero in table:
        row, other, second = word % PAIR_ROWS, word // PAIR_ROWS % PAIR_ROWS, word // SECOND
        assert zero == 0 and row <= other == partner[row] and (row, second) not in done
        done[row, second] = (begin, end)
        if second:
            continue
        places += range(begin, end)
        shared = [[place for place in range(begin, end) if dense[h * nnz + place] >= SHARED] for h in (0, 1)]
        if row == other:
            shared[1] = []
            assert not shared[0]
        assert shared[0] == shared[1] * (row != other)
        assert len(shared[0]) == len({*lists[row]} & {*lists[other]}) * (row != other)
        for half, of in enumerate({row: 0, other: 0}):
            entries = [(dense[half * nnz + p] % SHARED, kept[half * nnz + p]) for p in range(begin, end)]
            there = sorted(entry for entry in entries if entry != (COLUMNS, nnz))
            assert there == sorted(zip(lists[of], range(first[of], first[of + 1]), strict=True))
            for place in shared[half]:
                assert dense[place] == dense[nnz + place]
        assert end - begin == max(len(lists[row]), len(lists[other]))
    assert sorted(places) == list(range(len(places)))
    for row, other in enumerate(partner):
        lead = min(row, other)
        assert done[lead, 0] == done.get((lead, 1), done[lead, 0])
        assert ((lead, 1) in done) == (row != other)


def test_heavy_pairs_come_first_then_first_halves() -> None:
    lists = [[0], [1, 2], *[list(range(12))] * 2, [0], [1, 2]]
    crow = torch.tensor([0, *itertools.accumulate(map(len, lists))])
    packed = Pattern(crow, torch.tensor([*itertools.chain(*lists)]), 6, COLUMNS).by_row.in_pairs.tolist()
    lines = [(word % PAIR_ROWS, word // SECOND, end - begin) for word, begin, end, _ in
             (packed[4 + 4 * i : 8 + 4 * i] for i in range(6))]  # fmt: skip
    assert packed[0] == 2
    assert lines == [(2, 0, 12), (2, 1, 12), (1, 0, 2), (0, 0, 1), (1, 1, 2), (0, 1, 1)]
