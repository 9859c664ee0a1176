"""Timelines: spans and points of warps and asynchronous units, drawn as text or a plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Event(NamedTuple):
    """``kind`` (wait, tma load, tma store, wgmma...) on the row ``actor``, steps ``start`` to ``end``."""

    actor: str
    kind: str
    label: str
    start: int
    end: int


@dataclass
class Timeline:
    """Events in the order in which they ended. ``limit`` bounds memory; ``dropped`` counts the rest.

    ``roles``: of warps, by actor. ``peers``: by CTA, such as ``CTA (1, 0, 0)``, its cluster's CTAs by rank.
    Printing it draws the first cluster.
    """

    limit: int = 200_000
    events: list[Event] = field(default_factory=list)
    dropped: int = 0
    roles: dict[str, str] = field(default_factory=dict)
    peers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, actor: str, kind: str, label: str, start: int, end: int) -> None:
        """Record a span."""
        if len(self.events) < self.limit:
            self.events.append(Event(actor, kind, label, start, end))
        else:
            self.dropped += 1

    def __str__(self) -> str:
        found = {e.actor.split(")")[0] + ")" for e in self.events if e.actor.startswith("CTA")}
        if not found:
            return draw_text(self.events)
        first = min(found, key=_natural)
        ctas = self.peers.get(first, (first,))
        shown = [e for e in self.events if e.actor.startswith(ctas)]
        text = draw_text([Event(self.title(e.actor), e.kind, e.label, e.start, e.end) for e in shown])
        if len(ctas) > 1:
            text += "\nCTAs of one cluster, by rank: " + ", ".join(c.removeprefix("CTA ") for c in ctas)
        if self.dropped:
            text += f"\n{self.dropped} later events were not kept"
        return text

    def title(self, actor: str) -> str:
        """An actor with its role: ``CTA (0, 0, 0) warp 4, consumer 0``."""
        role = self.roles.get(actor, "")
        return f"{actor}, {role}" if role else actor

    def save(self, path: str | Path) -> None:
        """Write a trace file, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        from .trace import save

        save(self, path)

    def point(self, actor: str, kind: str, label: str, at: int) -> None:
        """Record an event without duration."""
        self.add(actor, kind, label, at, at)


_LETTER = {
    "wait": ".",
    "tma load": "L",
    "tma store": "S",
    "wgmma": "W",
    "mma": "M",
    "cp.async": "C",
    "phase": "|",
}
_MEANING = {"wait": "waits", "phase": "an mbarrier's phase completes", "wgmma": "WGMMA group"}
_COLOUR = {
    "wait": "#cccccc",
    "tma load": "#1f77b4",
    "tma store": "#9467bd",
    "wgmma": "#d62728",
    "mma": "#d62728",
    "cp.async": "#17becf",
    "phase": "#000000",
}


def select(events: list[Event], cta: str | None = None, kinds: tuple[str, ...] | None = None) -> list[Event]:
    """Events of one CTA (text such as ``"(0, 0, 0)"``) and of some kinds."""
    return [
        e for e in events if (cta is None or f"CTA {cta}" in e.actor) and (kinds is None or e.kind in kinds)
    ]


def draw_text(events: list[Event], width: int = 100) -> str:
    """A chart of one row an actor, with a legend of the kinds that occur."""
    if not events:
        return "(no events)"
    low, high = min(e.start for e in events), max(e.end for e in events)
    scale = max(high - low, 1) / (width - 1)
    actors = sorted({e.actor for e in events}, key=_natural)
    margin = max(len(a) for a in actors)
    lines = [f"{'steps':>{margin}} {low} to {high}"]
    order = {"wait": 0, "phase": 2}
    for actor in actors:
        row = [" "] * width
        for event in sorted((e for e in events if e.actor == actor), key=lambda e: order.get(e.kind, 1)):
            start, end = int((event.start - low) / scale), int((event.end - low) / scale)
            for i in range(start, max(end, start) + 1):
                row[i] = _LETTER.get(event.kind, "#")
        lines.append(f"{actor:>{margin}} {''.join(row)}")
    kinds = dict.fromkeys(e.kind for e in events)
    lines.append(
        "legend: " + ", ".join(f"{_LETTER.get(kind, '#')} {_MEANING.get(kind, kind)}" for kind in kinds)
    )
    return "\n".join(lines)


def draw_plot(events: list[Event], path: str | None = None) -> Any:
    """The same chart with matplotlib; saved to ``path`` if given. Returns the figure.

    Raises ImportError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the timeline plot needs matplotlib; draw_text needs nothing") from error
    actors = sorted({e.actor for e in events}, key=_natural)
    figure = Figure(figsize=(12, 0.35 * len(actors) + 1.5))
    axes = figure.subplots()
    for kind in dict.fromkeys(e.kind for e in events):
        spans = [e for e in events if e.kind == kind]
        axes.barh(
            [actors.index(e.actor) for e in spans],
            [max(e.end - e.start, 1) for e in spans],
            left=[e.start for e in spans],
            color=_COLOUR.get(kind, "#2ca02c"),
            label=kind,
            height=0.8,
        )
    axes.set_yticks(range(len(actors)), actors)
    axes.invert_yaxis()
    axes.set_xlabel("emulated steps")
    axes.legend(loc="upper right", ncols=4)
    figure.tight_layout()
    if path is not None:
        figure.savefig(path)
    return figure


def _natural(name: str) -> list:
    import re

    return [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)]
