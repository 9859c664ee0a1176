"""Draws the pictures of tutorials/README.md as SVG: layouts, and timelines of what the emulator saw.

python tutorials/pictures.py            # all of them, into tutorials/pictures
python tutorials/pictures.py layouts    # those that need no emulator
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import common

OUT = common.FOLDER / "pictures"
PALETTE = ("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")
KINDS = {  # of timeline events: colour, and what the legend says
    "tma load": ("#1f77b4", "TMA load"),
    "tma store": ("#9467bd", "TMA store"),
    "wgmma": ("#d62728", "WGMMA"),
    "wait": ("#d9d9d9", "warp waits"),
}
STEPS = ("03_pipeline", "04_warp_roles", "07_gemm_warp_specialized", "09_gemm_epilogue")


def svg(width: float, height: float, parts: list[str]) -> str:
    """One file, with a white ground."""
    size = f'width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "#666") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'
    )


def table(title: str, cells: list[list[tuple[str, str]]], cell: tuple[float, float] = (34, 22)) -> str:
    """A grid of (text, colour), row by row."""
    parts = [text(6, 16, title, 12)]
    for i, row in enumerate(cells):
        for j, (words, colour) in enumerate(row):
            x, y = 6 + j * cell[0], 24 + i * cell[1]
            parts += [box(x, y, *cell, colour), text(x + cell[0] / 2, y + cell[1] - 7, words, 10, "middle")]
    return svg(12 + len(cells[0]) * cell[0], 30 + len(cells) * cell[1], parts)


def layouts() -> dict[str, str]:
    """Name -> SVG of the pictures that are arithmetic."""
    swizzle = [[(str(place ^ row), PALETTE[place ^ row]) for place in range(8)] for row in range(8)]
    # Step 5: lane l has row l // 4 and columns 2 (l % 4), + 1; 8 rows further down the same again.
    accumulator = [
        [(f"T{row % 8 * 4 + column % 8 // 2} v{column % 2 + row // 8 * 2 + column // 8 * 4}",
          PALETTE[row % 8]) for column in range(16)]
        for row in range(16)
    ]  # fmt: skip
    blocked = [[(f"T{i // 4} v{i % 4}", PALETTE[i // 4]) for i in range(16)]]
    interleaved = [[(f"T{i % 4} v{i // 4}", PALETTE[i % 4]) for i in range(16)]]
    return {
        "swizzle": table("Which 16-byte chunk lies where: rows of 128 bytes, swizzled", swizzle),
        "accumulator": table(
            "WGMMA accumulators of warp 0, first 16 columns: thread, value", accumulator, (48, 20)
        ),
        "blocked": table("(thread, value) blocked: (4, 4):(4, 1)", blocked, (48, 22)),
        "interleaved": table("(thread, value) interleaved: (4, 4):(1, 4)", interleaved, (48, 22)),
        "visit_causal": visits("Causal", lambda i: (0, i + 1)),
        "visit_window": visits("Causal window of 12", lambda i: (max(i - 11, 0), i + 1)),
        "visit_packed": visits(
            "Packed, causal: 10, 9 and 13 rows", lambda i: (0 if i < 10 else 10 if i < 19 else 19, i + 1)
        ),
        "raster_rows": walk("Row by row (group 1)", 1),
        "raster_groups": walk("In groups of 4 rows", 4),
    }


def visits(title: str, span: Callable[[int], tuple[int, int]], size: int = 32, block: int = 4) -> str:
    """Step 11: `size` rows and keys in tiles and blocks of `block`; `span(row)`: the keys that a row sees."""
    colours = {"": "white", "mask": PALETTE[5], "whole": PALETTE[6]}
    cells = []
    for a in range(0, size, block):
        row = []
        for first in range(0, size, block):
            spans = [span(i) for i in range(a, a + block)]
            seen = [low <= j < high for low, high in spans for j in range(first, first + block)]
            kind = "whole" if all(seen) else "mask" if any(seen) else ""
            row.append((kind, colours[kind]))
        cells.append(row)
    return table(f"{title}: blocks of {block} x {block} that are visited", cells, (44, 22))


def walk(title: str, group: int, rows: int = 8, columns: int = 8, at_once: int = 16) -> str:
    """Step 8's order of tiles; the colour is the wave of `at_once` tiles that run together."""
    cells = [[("", "")] * columns for _ in range(rows)]
    for index in range(rows * columns):
        first = index // (group * columns) * group
        height = min(rows - first, group)
        within = index - first * columns
        cells[first + within % height][within // height] = (str(index), PALETTE[index // at_once])
    return table(f"{title}: colours run at one time", cells)


def timeline(events: list, title: str, width: int = 900) -> str:
    """Rows of actors, spans of events, as in `lowering.emulator.timeline`, for one CTA."""
    corner = "CTA (0, 0, 0) "
    shown = [e for e in events if e.actor.startswith(corner) and e.kind in KINDS]
    order = {"TMA": 0, "WGMMA": 1, "warp": 2}
    actors = sorted(
        {e.actor.removeprefix(corner) for e in shown},
        key=lambda name: (order.get(name.split()[0], 3), int(name.split()[1]) if " " in name else 0),
    )
    low, high = min(e.start for e in shown), max(e.end for e in shown)
    left, row = 80, 16
    scale = (width - left - 10) / max(high - low, 1)
    parts = [text(6, 16, title, 12)]
    for i, actor in enumerate(actors):
        parts.append(text(6, 40 + i * row, actor, 10))
    for event in sorted(shown, key=lambda e: e.kind != "wait"):
        y = 29 + actors.index(event.actor.removeprefix(corner)) * row
        x, span = left + (event.start - low) * scale, max((event.end - event.start) * scale, 1)
        size = f'width="{span:.1f}" height="{row - 4}"'
        parts.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{KINDS[event.kind][0]}" fill-opacity="0.8"/>')
    bottom = 44 + len(actors) * row
    for i, (colour, words) in enumerate(KINDS.values()):
        parts += [
            box(left + i * 120, bottom - 9, 10, 10, colour, "none"),
            text(left + 14 + i * 120, bottom, words, 10),
        ]
    return svg(width, bottom + 10, parts)


def main(which: str) -> None:
    OUT.mkdir(exist_ok=True)
    for name, picture in layouts().items():
        (OUT / f"{name}.svg").write_text(picture)
    if which == "layouts":
        return
    for name in STEPS:
        lab = common.Lab(common.EMULATOR)
        common.load(name).show(lab)
        title = f"{name}: one CTA in the emulator (order is real, durations are not)"
        (OUT / f"timeline_{name[:2]}.svg").write_text(timeline(lab.timeline.events, title))


if __name__ == "__main__":
    main(Path(sys.argv[1]).name if len(sys.argv) > 1 else "all")
