"""The committed pictures are the ones that the code draws; those of layouts agree with CuTe's semantics."""

from __future__ import annotations

import re

import pytest


def test_committed_layouts_are_current():
    import pictures

    for name, svg in pictures.layouts().items():
        assert (pictures.OUT / f"{name}.svg").read_text() == svg, f"{name}.svg: run tutorials/pictures.py"


def test_committed_timelines_are_there():
    import pictures

    for step in pictures.STEPS:
        svg = (pictures.OUT / f"timeline_{step[:2]}.svg").read_text()
        assert step in svg and svg.count("<rect") > 10


def test_accumulator_picture_is_right():
    """Cell by cell against the emulator's table of who holds what."""
    import pictures

    from lowering.emulator.semantics.wgmma import accumulator_coordinates

    rows, columns = accumulator_coordinates(16)
    labels = re.findall(r">T(\d+) v(\d+)<", pictures.layouts()["accumulator"])
    assert len(labels) == 16 * 16
    for cell, (thread, value) in enumerate(labels):
        assert (rows[int(thread), int(value)], columns[int(thread), int(value)]) == divmod(cell, 16)


@pytest.mark.parametrize(
    ("width", "picture"), [(1000, "visit_causal"), (12, "visit_window")], ids=["causal", "window"]
)
def test_visit_pictures_are_what_exercise_11_asks_for(width, picture):
    """The picture's blocks against the exercise's solution without a sink."""
    import checker
    import pictures

    solution = checker.load(checker.SOLUTIONS / "11.py")
    drawn = re.findall(r">(mask|whole|)</text>", pictures.layouts()[picture])[-64:]
    for number in range(64):
        row, block = divmod(number, 8)
        expected = dict(solution.visit(4 * row, 4 * row + 3, 4, width, 0))
        assert drawn[number] == {None: "", True: "whole", False: "mask"}[expected.get(block)]


@pytest.mark.parametrize("group", [1, 3, 4])
def test_walk_picture_is_step_8s_walk(group):
    """The picture's order against `tile_at`, which is plain arithmetic on integers too."""
    import checker
    import pictures

    solution = checker.load(checker.SOLUTIONS / "08.py")  # the same walk, but for the direction of odd groups
    labels = [int(n) for n in re.findall(r">(\d+)<", pictures.walk("", group))]
    for index in range(64):
        row, column = solution.tile_at(index, (8, 8), group)
        if row // group % 2:
            column = 7 - column
        assert labels[row * 8 + column] == index
