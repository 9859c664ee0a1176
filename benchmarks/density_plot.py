"""Time by density of a block-sparse product: a line a size of blocks, each named at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import svg
from benchmarks.svg import WIDTH

LEFT, RIGHT, TOP, HEIGHT = 62, 118, 74, 280
PERCENT = (1, 2, 5, 10, 20, 50, 100)


def _scale(value: float, low: float, high: float, start: float, end: float) -> float:
    """A value's place between `start` and `end`, logarithmic."""
    return start + (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * (end - start)


def draw(rows: Sequence[dict[str, Any]], title: str, where: str) -> str:
    """The SVG: milliseconds by density, for each column that ends in "_ms".

    Rows whose name is no percentage are left out.
    """
    points = [(float(row["name"].rstrip("%")), row) for row in rows if row["name"].endswith("%")]
    columns = [key for key in rows[0] if key.endswith("_ms")]
    values = [row[column] for _, row in points for column in columns]
    low, high = min(values) / 1.3, max(values) * 1.3
    span = (min(x for x, _ in points), max(x for x, _ in points))

    def at(percent: float, ms: float) -> tuple[float, float]:
        x = _scale(percent, *span, LEFT, WIDTH - RIGHT)
        return x, _scale(ms, low, high, TOP + HEIGHT, TOP)

    marks = []
    for percent in (tick for tick in PERCENT if span[0] <= tick <= span[1]):
        x = at(percent, low)[0]
        marks.append(svg.line(x, TOP, x, TOP + HEIGHT, "grid"))
        marks.append(svg.text(x, TOP + HEIGHT + 18, f"{percent}%", "faint", "middle"))
    for ms in (digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)):
        if low <= ms <= high:
            y = at(span[0], ms)[1]
            marks.append(svg.line(LEFT, y, WIDTH - RIGHT, y, "grid"))
            marks.append(svg.text(LEFT - 8, y + 4, f"{ms:g} ms", "faint", "end"))
    ends: list[float] = []
    order = sorted(enumerate(columns), key=lambda item: at(1, points[-1][1][item[1]])[1])
    for colour, column in order:
        name = column.removesuffix("_ms")
        places = [at(percent, row[column]) for percent, row in points]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dense = name == "dense"
        marks.append(f'<path class="line s{4 if dense else colour}{" dash" if dense else ""}" d="{path}"/>')
        if dense:
            marks.append(svg.text(places[0][0] + 8, places[0][1] - 8, "dense cuBLAS", "small"))
            continue
        y = max([places[-1][1], *(end + 16 for end in ends)])
        ends.append(y)
        marks.append(svg.text(WIDTH - RIGHT + 8, y + 4, f"{name}×{name} blocks", "small"))
        marks += [svg.dot(x, y, 2.5, f"f{colour}") for x, y in places]
    marks.append(svg.text((LEFT + WIDTH - RIGHT) / 2, TOP + HEIGHT + 36, "blocks kept", "faint", "middle"))
    subtitle = f"Milliseconds a product on one {where}, by the share of blocks kept"
    return svg.document(title, TOP + HEIGHT + 48, marks, subtitle=subtitle)
