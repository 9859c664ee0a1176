"""The README's plot: each family's speed in relation to its peers' as dots around a line at 1."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks import ratio_plot, svg
from benchmarks.overview import Summary
from benchmarks.svg import WIDTH

ROW, TOP, LEFT, RIGHT = 36, 82, 262, 74
TICKS = (0.8, 1.0, 1.5, 2.0, 3.0, 5.0)
AXIS = ratio_plot.Axis(TICKS[0], TICKS[-1], LEFT, WIDTH - RIGHT)


def place(ratio: float) -> float:
    """Horizontal place of a ratio, on a logarithmic axis; those outside of it lie at its ends."""
    return ratio_plot.place(ratio, AXIS)


def draw(title: str, lines: Iterable[Summary]) -> str:
    """The SVG: a row a summary, largest mean first; a faint dot a case, a full one for the mean."""
    ordered = sorted(lines, key=lambda found: -found.mean)
    bottom = TOP + ROW * len(ordered)
    marks = []
    for tick in TICKS:
        one = tick == 1.0
        marks.append(svg.line(place(tick), TOP - 6, place(tick), bottom, "one" if one else "grid"))
        words = "as fast" if one else f"{tick:g}×"
        marks.append(svg.text(place(tick), TOP - 12, words, "small bold" if one else "faint", "middle"))
    for number, found in enumerate(ordered):
        y = TOP + ROW * number + ROW / 2
        colour = 0 if found.mean >= 0.995 else 1
        marks.append(svg.text(LEFT - 16, y, found.line.what, "bold", "end"))
        peer = f"to {found.line.against}".replace("`", "")
        marks.append(svg.text(LEFT - 16, y + 14, peer, "faint", "end"))
        marks.append(svg.line(place(1.0), y + 2, place(found.mean), y + 2, f"stem s{colour}"))
        for ratio, case in found.ratios:
            marks.append(svg.dot(place(ratio), y + 2, 4, f"case f{colour}", f"{case}: {ratio:.2f}×"))
        marks.append(svg.dot(place(found.mean), y + 2, 6.5, f"mean f{colour}"))
        marks.append(svg.text(WIDTH - 18, y + 7, f"{found.mean:.2f}×", "bold", "end"))
    subtitle = "Faint dots are cases, full ones geometric means; higher is faster; losses included"
    return svg.document(title, bottom + 14, marks, subtitle=subtitle)
