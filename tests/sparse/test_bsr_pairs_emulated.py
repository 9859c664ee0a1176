"""Lists in pairs, made by the emulated kernels, against greedy matching in plain Python."""

from __future__ import annotations

import pytest

from kernels_dsl.config.bsr import MatchRule
from kernels_dsl.sparse import lists as module
from lowering import emulator, recording
from tests.sparse.bsr_pairs_cases import check, pattern_of_rows, random_rows


@pytest.mark.parametrize(
    ("kind", "count", "columns"),
    [
        ("uniform", 15, 40),
        ("alike", 17, 70),
        ("power law", 9, 70),
        ("twins", 12, 30),
        ("disjoint", 9, 40),
        ("full", 7, 33),
        ("empty ones", 17, 24),
        ("duplicates", 8, 40),
        ("unsorted", 10, 64),
        ("uniform", 1, 5),
        ("all empty", 3, 4),
        ("alike", 133, 24),  # more lists than threads
    ],
)
def test_lists_are_those_of_plain_python(
    kind: str, count: int, columns: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RULE", MatchRule(group=32))
    rows = random_rows(kind, count, columns, seed + 1)
    with emulator.run(arch="sm_90a", seed=seed) as session:
        check(rows, columns, pattern_of_rows(rows, columns).by_row)
    assert not session.reports


def test_recorded_lists_are_not_kept(seed: int) -> None:
    rows = random_rows("twins", 4, 9, seed)
    lists = pattern_of_rows(rows, 9).by_row
    with recording.record("sm_90a") as calls:
        _ = lists.in_pairs
    assert len(calls) == 4
    with emulator.run(arch="sm_90a"):
        assert check(rows, 9, lists) is lists.in_pairs


def test_lists_that_do_not_come_in_pairs_are_named() -> None:
    for count, columns, reason in (
        (32769, 1, "there are 32769 lists to pair, must be at most 32768"),
        (1, 16385, "lists to pair may name 16385 blocks, must be at most 16384"),
    ):
        with pytest.raises(ValueError, match=reason):
            _ = pattern_of_rows([[]] * count, columns).by_row.in_pairs
