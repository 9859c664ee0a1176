"""The README's plot: each family's ratios to its peers as dots on a line, as an SVG that follows dark mode.

Written as text: so few marks need no library, and a colour scheme reaches an SVG's own style sheet alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from benchmarks.overview import Summary

WIDTH, ROW, TOP, LEFT, RIGHT = 700, 34, 44, 270, 62
TICKS = (0.8, 1.0, 1.5, 2.0, 3.0, 4.0)
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.faint { fill: #656d76; font-size: 11px }
.grid { stroke: #d0d7de } .one { stroke: #1f2328 }
.case { fill: #0969da; fill-opacity: .3 } .mean { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .faint { fill: #8d96a0 } .grid { stroke: #3d444d } .one { stroke: #e6edf3 }
  .case { fill: #58a6ff } .mean { fill: #58a6ff }
}
"""


def place(ratio: float) -> float:
    """Horizontal place of a ratio: logarithmic, so that twice and half as fast are as far from 1."""
    low, high = math.log(TICKS[0]), math.log(TICKS[-1])
    share = (math.log(min(max(ratio, TICKS[0]), TICKS[-1])) - low) / (high - low)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def draw(title: str, lines: Iterable[Summary]) -> str:
    """The SVG: a line a summary, largest mean first; a faint dot a case, a full one for the mean."""
    ordered = sorted(lines, key=lambda found: -found.mean)
    bottom = TOP + ROW * len(ordered)
    marks = [f'<text x="0" y="16">{escape(title)}</text>']
    for tick in TICKS:
        kind = "one" if tick == 1.0 else "grid"
        x = place(tick)
        marks.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        marks.append(f'<text class="faint" x="{x:.1f}" y="{TOP - 14}" text-anchor="middle">{tick:g}×</text>')
    for number, found in enumerate(ordered):
        y = TOP + ROW * number + ROW / 2
        marks.append(f'<text x="{LEFT - 12}" y="{y:.1f}" text-anchor="end">{escape(found.line.what)}</text>')
        peer = f"to {found.line.against}".replace("`", "")
        below = f'x="{LEFT - 12}" y="{y + 13:.1f}" text-anchor="end"'
        marks.append(f'<text class="faint" {below}>{escape(peer)}</text>')
        for ratio, case in found.ratios:
            dot = f'<circle class="case" cx="{place(ratio):.1f}" cy="{y:.1f}" r="4">'
            marks.append(f"{dot}<title>{escape(case)}: {ratio:.2f}</title></circle>")
        marks.append(f'<circle class="mean" cx="{place(found.mean):.1f}" cy="{y:.1f}" r="6"/>')
        marks.append(f'<text x="{WIDTH - RIGHT + 12}" y="{y + 4:.1f}">{found.mean:.2f}×</text>')
    body = "\n".join(marks)
    size = f'width="{WIDTH}" height="{bottom + 8}" viewBox="0 0 {WIDTH} {bottom + 8}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
