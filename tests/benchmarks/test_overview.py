"""The plots: dots at the places of their ratios, ticks that do not touch, names that are told apart."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import overview, overview_plot, ratio_plot

ROOT = Path(__file__).parents[2]
OF_THE_README = {
    "attention forward, bf16": "forward {:.2f} × the best",
    "attention backward, bf16": "backward {:.2f} ×",
    "dense GEMM, bf16": "bf16 {:.2f} × the best",
    "dense GEMM, ragged sizes": "{:.2f} × cuBLAS at ragged sizes",
    "fp8 GEMM, all kinds of scales": "fp8 {:.2f} × cuBLASLt",
    "GEMM of 1 to 256 rows, bf16": "at 1 to 256 rows bf16 {:.2f} ×",
    "fp8 GEMM of 1 to 256 rows": ", fp8 {:.2f} ×;",
    "block-sparse GEMM": "{:.2f} × PyTorch's",
    "decoding from paged caches": "{:.2f} × FlashAttention-3",
}
SVG = "{http://www.w3.org/2000/svg}"


def _summary(what: str, *ratios: float) -> overview.Summary:
    line = overview.Line("suite", what, "page", "a `peer` & others")
    return overview.Summary(line, [(ratio, f"case {i} <m>") for i, ratio in enumerate(ratios)])


def test_the_readmes_figures_are_those_of_the_results():
    text = " ".join((ROOT / "README.md").read_text().split())
    found, _ = overview.summaries(ROOT / "benchmarks" / "results" / "h200")
    means = {summary.line.what: summary.mean for summary in found}
    figures = [words.format(means[what]) for what, words in OF_THE_README.items()]
    stale = [figure for figure in figures if figure not in text]
    assert not stale


def test_dots_lie_at_their_ratios():
    drawn = ET.fromstring(
        overview_plot.draw("title", [_summary("slow", 0.5, 1.0), _summary("fast", 2.0, 8.0)])
    )
    dots = [(x.get("class"), float(x.get("cx", 0))) for x in drawn.iter(f"{SVG}circle")]
    place = overview_plot.place
    fast = [("case f0", 2.0), ("case f0", 8.0), ("mean f0", 4.0)]
    expected = [*fast, ("case f1", 0.5), ("case f1", 1.0), ("mean f1", 0.5**0.5)]
    assert dots == [(kind, pytest.approx(place(ratio), abs=0.06)) for kind, ratio in expected]
    texts = [x.text for x in drawn.iter(f"{SVG}text")]
    assert "4.00×" in texts and "0.71×" in texts and "to a peer & others" in texts


def test_places_are_logarithmic_and_stay_on_the_axis():
    place = overview_plot.place
    assert place(2.0) - place(1.0) == pytest.approx(place(4.0) - place(2.0))
    assert place(0.1) == place(0.8) == overview_plot.LEFT
    assert place(100.0) == place(5.0) == overview_plot.WIDTH - overview_plot.RIGHT


def _dots(drawn: str) -> list[tuple[str, float]]:
    """Title under the pointer and place of each dot of a row, in the order of drawing."""
    found = ET.fromstring(drawn).iter(f"{SVG}circle")
    return [(dot[0].text, float(dot.get("cx"))) for dot in found if len(dot)]


def test_a_row_has_a_dot_for_each_peer_and_the_ratio_to_the_fastest():
    plot = ratio_plot.Plot("title", {"a": "cuA", "b": "quackB"}, {"c": "ours, C"})
    cases = [ratio_plot.Case("64×8×8, row", {"a": 1.3, "b": 0.9, "c": 0.5, "d": 9.0}, 12.0)]
    drawn = ratio_plot.draw(plot, cases, "GPU")
    axis = ratio_plot.axis_of([1.3, 0.9, 0.5], 180)
    assert dict(_dots(drawn)) == {
        title: pytest.approx(ratio_plot.place(ratio, axis), abs=0.06)
        for title, ratio in {"cuA: 1.30×": 1.3, "quackB: 0.90×": 0.9, "ours, C: 0.50×": 0.5}.items()
    }
    texts = [x.text for x in ET.fromstring(drawn).iter(f"{SVG}text")]
    assert {"0.90×", "12 TFLOPS", "64×8×8", "row", "1×"} <= set(texts) and "0.50×" not in texts


@pytest.mark.parametrize("values", [[1.0], [0.09, 12.0], [0.98, 1.02], [1.1, 32.0], [0.84, 1.18]])
def test_ticks_hold_one_and_do_not_touch(values):
    axis = ratio_plot.axis_of(values, 250)
    chosen = ratio_plot.ticks(axis)
    places = [ratio_plot.place(tick, axis) for tick in chosen]
    assert 1.0 in chosen and len(chosen) >= 2
    assert axis.low <= min(values) and max(values) <= axis.high and axis.low < 1 < axis.high
    assert all(b - a >= ratio_plot.CLOSEST for a, b in pairwise(places))


def test_competitors_of_a_plot_have_colours_of_their_own():
    for suite, plot in ratio_plot.PLOTS.items():
        colours = ratio_plot.colours_of([*plot.rivals.values(), *plot.others.values()])
        assert len(set(colours)) == len(colours), suite


def test_decoding_counts_flash_attention_with_its_better_time():
    row = {"name": "1×64", "us": 10.0, "tb_s": 1.0, "fa3_us": 12.0, "fa3_planned_us": 11.0, "sdpa_us": None}
    host = {"name": "host", "us": 20.0, "tb_s": None, "fa3_us": None, "fa3_planned_us": None, "sdpa_us": None}
    assert ratio_plot.of_decoding([row, host]) == [ratio_plot.Case("1×64", {"fa3": 1.1}, 1.0)]
