"""A family's plot: one row a case, a dot a peer at our speed in relation to it, and a line at 1.

`PLOTS` says for each suite of results which competitors its plot compares and what they are called. The bold
figure at the right is the ratio to the fastest of the rivals, which is also where the row's stem ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks import svg
from benchmarks.harness import OURS, Row
from benchmarks.svg import WIDTH

RIGHT, TOP, ROW = 150, 104, 21
STEPS = (
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.7,
    0.8,
    0.9,
    1.0,
    1.1,
    1.25,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    16.0,
    32.0,
    50.0,
)
CLOSEST = 34
"""Pixels between two ticks, so that their numbers do not touch."""


@dataclass(frozen=True)
class Plot:
    """The competitors of a suite's plot, and their names.

    title: of the picture. rivals: competitor -> its name in the legend; the fastest of them in a row counts.
    others: competitors that are drawn and not counted, such as a dense product beside a sparse one.
    unit: of the rate at the right.
    """

    title: str
    rivals: dict[str, str]
    others: dict[str, str] = field(default_factory=dict)
    unit: str = "TFLOPS"


_ATTENTION = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa4": "flash-attn-4"}
PLOTS = {
    "attention_forward": Plot("Attention, forward, bf16", _ATTENTION),
    "attention_small": Plot("Attention, small launches, fp16 and bf16", _ATTENTION),
    "attention_sparse": Plot(
        "Windows and block lists", {"fa4": "flash-attn-4"}, {"cudnn dense": "cuDNN, all keys"}
    ),
    "attention_density": Plot(
        "Block lists by density, S 32768", {"fa4": "flash-attn-4"},
        {"ours dense": "ours, all keys", "cudnn dense": "cuDNN, all keys"},
    ),
    "attention_backward": Plot(
        "Attention, backward, bf16",
        {**_ATTENTION, "fa4_deterministic": "flash-attn-4, deterministic"},
    ),
    "attention_backward_lists": Plot(
        "Attention, backward, block lists", {"fa4": "flash-attn-4"},
        {"ours_deterministic": "ours, deterministic"},
    ),
    "attention_sm80": Plot("Attention, forward, kernels for sm_80", {"fa2": "FlashAttention-2"}),
    "attention_backward_sm80": Plot("Attention, backward, kernels for sm_80", {"fa2": "FlashAttention-2"}),
    "bsr_rows": Plot(
        "Block-sparse GEMM, blocks of 16 to 128",
        {"torch": "torch.sparse_bsr", "addmm": "bsr_dense_addmm", "bmm": "gathered bmm"},
        {"dense": "dense cuBLAS"},
    ),
    "bsr_patterns": Plot(
        "Block-sparse GEMM by pattern", {"torch": "torch.sparse_bsr"}, {"ours_whole": "ours, lists not split"}
    ),
    "bsr_fp8": Plot(
        "Block-sparse GEMM, fp8 blocks", {"dense_fp8": "dense cuBLASLt, fp8"},
        {"bf16": "ours, bf16 blocks", "dense": "dense cuBLAS, bf16"},
    ),
    "fp8_attention": Plot(
        "fp8 attention beside bf16", {"ours_bf16": "ours, bf16", "cudnn_bf16": "cuDNN, bf16"}
    ),
    "fp8_gemm": Plot("fp8 GEMM by kind of scales", {"cublas": "cuBLASLt"}),
    "fp8_grouped": Plot(
        "fp8 grouped GEMM (MoE)", {"torch": "torch, fp8"},
        {"torch_bf16": "torch, bf16", "ours_bf16": "ours, bf16"},
    ),
    "fp8_linear": Plot("fp8 linear layer", {"bf16": "torch, bf16"}),
    "gemm_bf16": Plot("GEMM, bf16", {"cublas": "cuBLAS", "quack": "quack"}),
    "gemm_bf16_ragged": Plot("GEMM, bf16, ragged sizes", {"cublas": "cuBLAS"}),
    "decode": Plot(
        "Decoding from paged caches, bf16", {"fa3": "FlashAttention-3"},
        {"sdpa": "torch SDPA, cache not paged"}, unit="TB/s",
    ),
    "decode_fp8": Plot(
        "Decoding from fp8 caches", {"fa3": "FlashAttention-3, fp8 queries"}, {"bf16": "ours, bf16 cache"},
        unit="TB/s",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A row of a plot: its title, ratio by competitor, and our rate in the plot's unit."""

    title: str
    ratios: dict[str, float]
    rate: float


def of_rates(rows: Iterable[Row]) -> list[Case]:
    """Cases of a suite of rates."""
    return [Case(row.title, {peer: row.ratio(peer) for peer in row.peers}, row.tflops(OURS)) for row in rows]


def of_decoding(rows: Iterable[dict[str, Any]]) -> list[Case]:
    """Cases of the suites `decode` and `decode_fp8`, whose rows have microseconds by competitor."""
    cases = []
    for row in rows:
        ours = row.get("fp8_us", row.get("us"))
        times = {
            key: row[f"{key}_us"] for key in ("fa3", "fa3_planned", "sdpa", "bf16") if row.get(f"{key}_us")
        }
        if times:
            if "fa3_planned" in times:
                times["fa3"] = min(times["fa3"], times.pop("fa3_planned"))
            rate = row["fp8_tb_s"] if "fp8_tb_s" in row else row["tb_s"]
            cases.append(Case(row["name"], {peer: time / ours for peer, time in times.items()}, rate))
    return cases


def split(title: str) -> tuple[str, str]:
    """A title's shape and its kind among rows of that shape: `("B 4 · H 16 · S 4096 · D 128", "causal")`."""
    dense = re.fullmatch(r"(\d+),([\d/]+),(\d+),([\d/]+)(?: (?:bf16|fp16))?(.*)", title)
    if dense:
        batch, heads, length, dim, rest = dense.groups()
        return f"B {batch} · H {heads} · S {length} · D {dim}", rest.strip() or "full"
    cache = re.fullmatch(r"(.*, H [\d/]+), (pages of \d+)", title)
    if cache:
        return cache.group(1), cache.group(2)
    product = re.fullmatch(r"(\d+×\d+×\d+|\d+×\d+→\d+|[\d×]+, H [\d/]+), (.*)", title)
    if product:
        return product.group(1), product.group(2)
    return re.sub(r", H ([\d/]+), D (\d+), causal", r", causal", title), ""


class Axis(NamedTuple):
    """The ratios at an axis's ends, and their places."""

    low: float
    high: float
    left: float
    right: float = WIDTH - RIGHT


def axis_of(values: Sequence[float], left: float) -> Axis:
    """The axis from `left` on that holds `values`, 1 and some room below it."""
    low, high = min([*values, 0.95]), max([*values, 1.2])
    first = max([step for step in STEPS if step <= low], default=STEPS[0])
    return Axis(first, min([step for step in STEPS if step >= high], default=STEPS[-1]), left)


def ticks(axis: Axis) -> list[float]:
    """1, and those steps of an axis whose numbers touch no other's."""
    taken = [1.0]
    for step in (axis.low, axis.high, *(step for step in STEPS if axis.low < step < axis.high)):
        if all(abs(place(step, axis) - place(other, axis)) >= CLOSEST for other in taken):
            taken.append(step)
    return sorted(taken)


def place(ratio: float, axis: Axis) -> float:
    """Horizontal place of a ratio: logarithmic, so that twice and half as fast are as far from 1."""
    share = math.log(min(max(ratio, axis.low), axis.high) / axis.low) / math.log(axis.high / axis.low)
    return axis.left + share * (axis.right - axis.left)


COLOURS = (
    ("cu", 3),
    ("dense cu", 3),
    ("flash-attn", 2),
    ("FlashAttention-3", 2),
    ("ours", 0),
    ("quack", 2),
    ("bsr_", 2),
)
"""Beginning of a competitor's name -> number of its colour, the same in all plots; 1 is for the others."""


def colours_of(names: Sequence[str]) -> list[int]:
    """The colours of a plot's competitors; the second of one colour gets the neutral one."""
    chosen: list[int] = []
    for name in names:
        colour = next((number for start, number in COLOURS if name.startswith(start)), 1)
        chosen.append(4 if colour in chosen else colour)
    return chosen


def legend(names: Sequence[str], y: float) -> list[str]:
    """A dot and a name for each competitor, in a line."""
    marks, x = [], 23.0
    for colour, name in zip(colours_of(names), names):
        marks += [svg.dot(x, y - 4, 5, f"f{colour}"), svg.text(x + 11, y, name, "small")]
        x += 40 + 6.6 * len(name)
    return marks


def draw(plot: Plot, cases: Sequence[Case], where: str) -> str:
    """The SVG of a suite; `where` names the GPU it was measured on."""
    names = plot.rivals | plot.others
    colours = dict(zip(names, colours_of(list(names.values()))))
    shown = [(case, {peer: case.ratios[peer] for peer in colours if peer in case.ratios}) for case in cases]
    labels = [split(case.title) for case in cases]
    left = 32 + max(6.5 * len(shape) + 6.2 * len(kind) + 14 * bool(kind) for shape, kind in labels)
    axis = axis_of([ratio for _, ratios in shown for ratio in ratios.values()], max(left, 180))
    bottom = TOP + ROW * len(shown)
    marks = legend(list(names.values()), 70)
    before = ""
    for number, (case, ratios) in enumerate(shown):
        y = TOP + ROW * number + ROW / 2
        shape, kind = labels[number]
        if shape != before and number:
            marks.append(svg.line(18, y - ROW / 2, WIDTH - 18, y - ROW / 2, "grid"))
        marks += _labels(shape, kind, (axis.left, y), first=shape != before)
        before = shape
        counted = [ratios[peer] for peer in plot.rivals if peer in ratios]
        if counted:
            marks.append(svg.line(place(1.0, axis), y, place(min(counted), axis), y, "stem s4"))
            marks.append(svg.text(WIDTH - 100, y + 4, f"{min(counted):.2f}×", "small bold", "end"))
        rate = f"{case.rate:.0f}" if case.rate >= 10 else f"{case.rate:.2f}"
        marks.append(svg.text(WIDTH - 20, y + 4, f"{rate} {plot.unit}", "faint", "end"))
        for peer, ratio in reversed(ratios.items()):
            title = f"{names[peer]}: {ratio:.2f}×"
            marks.append(svg.dot(place(ratio, axis), y, 4.5, f"f{colours[peer]}", title))
    grid = [mark for tick in ticks(axis) for mark in _tick(tick, place(tick, axis), bottom)]
    subtitle = f"Our speed ÷ the peer's on one {where}: right of the line at 1 we are faster"
    return svg.document(plot.title, bottom + 14, [*grid, *marks], subtitle=subtitle)


def _tick(tick: float, x: float, bottom: float) -> list[str]:
    """A line of the axis and its number."""
    kind = "one" if tick == 1.0 else "grid"
    words = svg.text(x, TOP - 8, f"{tick:g}×", "small bold" if tick == 1.0 else "faint", "middle")
    return [svg.line(x, TOP - 2, x, bottom, kind), words]


def _labels(shape: str, kind: str, at: tuple[float, float], *, first: bool) -> list[str]:
    """Left of a row: its shape, once for neighbours that share it, and what tells them apart."""
    left, y = at
    marks = [svg.text(18, y + 4, shape, "small")] if first else []
    if kind:
        marks.append(svg.text(left - 12, y + 4, kind, "faint", "end"))
    return marks
