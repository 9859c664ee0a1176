"""Every exercise accepts its solution, tells an empty answer apart, and finds typical mistakes."""

from __future__ import annotations

import math
import types
from pathlib import Path

import pytest

EXERCISES = Path(__file__).resolve().parents[2] / "tutorials" / "exercises"
NAMES = sorted(path.stem for path in EXERCISES.glob("*.py") if path.stem != "checker")


def _exercise(name: str):
    import checker

    return checker.load(checker.EXERCISES / f"{name}.py")


def _solution(name: str):
    import checker

    return checker.load(checker.SOLUTIONS / f"{name}.py")


def test_one_for_each_step():
    steps = sorted(path.name.split("_")[0] for path in EXERCISES.parent.glob("[0-9a]*_*.py"))
    assert steps == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_solution_is_right(name):
    _exercise(name).check(_solution(name))


@pytest.mark.parametrize("name", NAMES)
def test_unwritten_answer(name):
    exercise = _exercise(name)
    with pytest.raises(NotImplementedError):
        exercise.check(exercise)


def _tile(*shape):
    import common

    return common.load("07_gemm_warp_specialized").Tile(*shape)


def _uncapped(limit):
    import cutlass.cute as cute

    return lambda acc, bias: cute.where(acc + bias < 0.0, cute.zeros_like(acc), acc + bias)


def _clipped_bytes(tile, origin, extent, itemsize):
    return min(tile[0], extent[0] - origin[0]) * min(tile[1], extent[1] - origin[1]) * itemsize


def _without_rounding(shared, threads, registers):
    return min(233472 // (shared + 1024), 65536 // (threads * registers), 2048 // threads, 32)


MISTAKES = [
    ("01", "outside", {"tv_layout": lambda: (((64, 4), 8), ((8, 512), 1))}),
    ("01", "has already", {"tv_layout": lambda: (((8, 32), 8), ((4, 512), 1))}),
    ("02", "whole box", {"expected_bytes": _clipped_bytes}),
    ("02", "200 bytes", {"tma_can_read": lambda address, strides, size: address % 16 == 0 and 1 in strides}),
    ("03", "overwrites", {"empty_phase": lambda k, stages: 1}),
    ("03", "a hang", {"empty_phase": lambda k, stages: k // stages & 1}),
    ("03", "did not wait", {"full_phase": lambda k, stages: k // stages & 1 ^ 1}),
    ("04", "a hang", {"empty_arrivals": lambda groups, share, elect: 128 * groups}),
    ("04", "may still be reading", {"empty_arrivals": lambda groups, share, elect: 1}),
    ("05", "value 2 of thread 0", {"place": lambda t, v: (t // 32 * 16 + t % 32 // 4, t % 4 * 2 + v)}),
    ("05", "belongs to", {"owner": lambda row, column: (row // 16 * 32, 0)}),
    ("06", "81 is rounded up", {"ctas_per_sm": _without_rounding}),
    ("07", "100 are wanted", {"tile": lambda: _tile(128, 256, 64, 4)}),
    ("07", "accumulators a thread", {"tile": lambda: _tile(256, 256, 64, 3)}),
    ("07", "does not compile", {"tile": lambda: _tile(256, 192, 64, 5)}),
    ("08", "stay in the column", {"tile_at": lambda i, grid, group: _plain_walk(i, grid, group)}),
    ("09", "elements differ", {"capped_relu": _uncapped}),
    ("10", "overflow|math range", {"merge": lambda p, q: _merged_at(p, q, 0.0)}),
    ("10", "l is", {"merge": lambda p, q: (max(p[0], q[0]), p[1] + q[1], p[2])}),
    ("10", "no key at all", {"merge": lambda p, q: _merged_at(p, q, max(p[0], q[0]))}),
    ("11", "block 0 is needed", {"visit": lambda a, b, n, w, s: [(x, False) for x in _window(a, b, n, w)]}),
    ("11", "in vain", {"visit": lambda a, b, n, w, s: [(x, False) for x in range(b // n + 1)]}),
    ("11", "is called whole", {"visit": lambda *tile: [(x, True) for x, _ in _solution("11").visit(*tile)]}),
    ("11", "would be masked", {"visit": lambda *tile: [(x, False) for x, _ in _solution("11").visit(*tile)]}),
    ("12", "waits for the GPU", {"transposed": lambda f, c, n: (f, c, (c >= 0).nonzero()[:, 0].int())}),
    ("12", "rows must ascend", {"transposed": lambda *x: _lists(*x, 0, lambda row_of, _: row_of.flip(0))}),
    ("12", "where the values lie", {"transposed": lambda *x: _lists(*x, 1, lambda rows, at: at.flip(0))}),
    ("a1", "does not say", {"under_way": lambda k, k_tiles, stages: stages - 2}),
    ("a1", "not needed yet", {"under_way": lambda k, k_tiles, stages: 0}),
]  # fmt: skip


def _window(a, b, n, window):
    return range(max(a - window + 1, 0) // n, b // n + 1)


def _merged_at(p, q, at):
    """Right, but for what happens far from the reference point or without one."""
    top, x, y = max(p[0], q[0]), math.exp(p[0] - at), math.exp(q[0] - at)
    back = math.exp(at - top)
    return top, back * (x * p[1] + y * q[1]), [back * (x * u + y * v) for u, v in zip(p[2], q[2])]


def _lists(first, columns, count, which, change):
    """The right lists, but for rows (0) or entries (1)."""
    first_t, *lists = _solution("12").transposed(first, columns, count)
    lists[which] = change(*lists)
    return first_t, *lists


def _plain_walk(index, grid, group):
    number = index // (group * grid[1])
    height = min(grid[0] - number * group, group)
    within = index - number * group * grid[1]
    return number * group + within % height, within // height


@pytest.mark.parametrize(
    ("name", "message", "answer"), MISTAKES, ids=[f"{m[0]}-{m[1]}".replace(" ", "_") for m in MISTAKES]
)
def test_mistake_is_named(name, message, answer):
    """A right solution with one function replaced by a wrong one."""
    import checker

    right = {key: value for key, value in vars(_solution(name)).items() if callable(value)}
    with pytest.raises(checker.Wrong, match=message):
        _exercise(name).check(types.SimpleNamespace(**{**right, **answer}))
