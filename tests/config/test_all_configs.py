"""Configurations that callers can construct and operators accept: a sample compiles, and draws are
repeatable.

`python -m tests.config.all_configs` compiles as much of the rest as there is time for.
"""

from __future__ import annotations

from dataclasses import replace

from tests.config.all_configs import sample
from tests.config.compile_farm import Found, Task, draw, run
from tests.config.covering import all_pairs, covering, pairs_of
from tests.config.spaces import SPACES, Space, recorded

SAMPLE, SEED = 50, 0


def test_a_sample_of_what_is_accepted_compiles() -> None:
    tasks = [replace(task, spills=False) for task in sample(SAMPLE, SEED)]
    found = [result for _, result in run(tasks, jobs=2)]
    failed = [each for each in found if each is not None and each.why is not None]
    assert not failed, "\n".join(f"{each.why}\n    {each.repro}" for each in failed)
    assert sum(each is not None for each in found) == SAMPLE


def test_the_common_point_of_every_space_is_accepted() -> None:
    for space in SPACES.values():
        point = {name: values[0] for name, values in space.axes.items()}
        assert not isinstance(found := recorded(space, point), str), (space.name, found)


def test_draws_follow_from_the_seed() -> None:
    assert draw("gemm sm90", 3) == draw("gemm sm90", 3) != draw("gemm sm90", 4)


def test_covering_points_meet_every_pair_that_is_accepted() -> None:
    space = Space("small", {"x": (1, 2, 3), "y": (1, 2, 3), "z": (False, True)}, lambda point: None)

    def accepts(point: dict) -> bool:
        return not (point["x"] == point["y"] == 3)

    points = covering(space, accepts, seed=1, seconds=10.0)
    assert all(map(accepts, points)) and len(points) < 18
    met = set().union(*map(pairs_of, points))
    assert set(all_pairs(space)) - met == {(("x", 3), ("y", 3))}


def test_a_process_that_dies_is_a_failure_and_no_more() -> None:
    """The compiler can end a process: the others' results still come, and the point is named."""
    tasks = [Task("die", "gemm sm90", point={"tile_m": 1}), Task("draw", "sddmm", seed=1, spills=False)]
    found = {task.space: result for task, result in run(tasks, jobs=1)}
    assert isinstance(found["gemm sm90"], Found) and found["gemm sm90"].why == "the compiler ends the process"
    assert "sddmm" in found["sddmm"].repro and found["sddmm"].why is None
