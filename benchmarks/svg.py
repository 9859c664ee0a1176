"""SVG as text: one card of marks whose colours follow the reader's light or dark mode.

Plots have few marks and need no library; and only a style sheet of the picture's own can follow the mode. The
card has a ground of its own, so that its words can be read on a page whose mode is not the reader's.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH = 700
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.card { fill: #ffffff; stroke: #d0d7de }
.title { font-size: 15px; font-weight: 600 } .bold { font-weight: 600 }
.faint { fill: #59636e; font-size: 11px } .small { font-size: 12px }
.grid { stroke: #e4e8ec } .one { stroke: #59636e } .line { fill: none; stroke-width: 2 }
.band { fill: #f6f8fa }
.f0 { fill: #0969da } .f1 { fill: #bc4c00 } .f2 { fill: #8250df } .f3 { fill: #1a7f37 } .f4 { fill: #6e7781 }
.s0 { stroke: #0969da } .s1 { stroke: #bc4c00 } .s2 { stroke: #8250df } .s3 { stroke: #1a7f37 }
.s4 { stroke: #6e7781 }
.case { fill-opacity: .35 } .stem { stroke-width: 3; stroke-opacity: .45 } .dash { stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .card { fill: #0d1117; stroke: #3d444d } .faint { fill: #9198a1 }
  .grid { stroke: #262c36 } .one { stroke: #9198a1 } .band { fill: #151b23 }
  .f0 { fill: #58a6ff } .f1 { fill: #f0883e } .f2 { fill: #bc8cff } .f3 { fill: #3fb950 }
  .f4 { fill: #9198a1 }
  .s0 { stroke: #58a6ff } .s1 { stroke: #f0883e } .s2 { stroke: #bc8cff } .s3 { stroke: #3fb950 }
  .s4 { stroke: #9198a1 }
}
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a place; `kind` is classes of the style sheet, `anchor` start, middle or end."""
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line of the classes `kind`."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def dot(x: float, y: float, radius: float, kind: str, title: str = "") -> str:
    """A disc of the classes `kind`; a browser shows `title` under the pointer."""
    mark = f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"'
    return f"{mark}><title>{escape(title)}</title></circle>" if title else f"{mark}/>"


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> str:
    """A rectangle of the classes `kind`, its corners rounded by `radius`."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {size}{f" rx={chr(34)}{radius:g}{chr(34)}" if radius else ""}/>'


def document(
    title: str, height: float, marks: Iterable[str], *, subtitle: str = "", width: int = WIDTH
) -> str:
    """The SVG file: a card of `width` × `height` with its title, subtitle and marks."""
    size = f'width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>",
        box(0.5, 0.5, width - 1, height - 1, "card", 8),
        text(18, 28, title, "title"),
    ]
    if subtitle:
        parts.append(text(18, 46, subtitle, "faint"))
    return "\n".join([*parts, *marks, "</svg>\n"])
