"""The README's plot: one dot a case, one a mean, at the place of its ratio."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks import overview, overview_plot

SVG = "{http://www.w3.org/2000/svg}"


def _summary(what: str, *ratios: float) -> overview.Summary:
    line = overview.Line("suite", what, "page", "a `peer` & others")
    return overview.Summary(line, [(ratio, f"case {i} <m>") for i, ratio in enumerate(ratios)])


def test_dots_lie_at_their_ratios():
    drawn = ET.fromstring(
        overview_plot.draw("title", [_summary("slow", 0.5, 1.0), _summary("fast", 2.0, 8.0)])
    )
    dots = [(x.get("class"), float(x.get("cx", 0))) for x in drawn.iter(f"{SVG}circle")]
    place = overview_plot.place
    expected = [("case", 2.0), ("case", 8.0), ("mean", 4.0), ("case", 0.5), ("case", 1.0), ("mean", 0.5**0.5)]
    assert dots == [(kind, pytest.approx(place(ratio), abs=0.06)) for kind, ratio in expected]
    texts = [x.text for x in drawn.iter(f"{SVG}text")]
    assert "4.00×" in texts and "0.71×" in texts and "to a peer & others" in texts


def test_places_are_logarithmic_and_stay_on_the_axis():
    place = overview_plot.place
    assert place(2.0) - place(1.0) == pytest.approx(place(4.0) - place(2.0))
    assert place(0.1) == place(0.8) == overview_plot.LEFT
    assert place(100.0) == place(4.0) == overview_plot.WIDTH - overview_plot.RIGHT
