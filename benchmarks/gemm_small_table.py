"""The tables of `gemm_small`: one for each kind of operands, with a line a layer and a column for each M."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import harness, machine

NAMES = {
    "bf16": "bf16",
    "tensor": "fp8, one scale",
    "row": "fp8, scales of rows and columns",
    "block": "fp8, scales of 1×128 and 128×128",
    "tensor-fast": "fp8, one scale, fast sums",
}
LEAST = 0.97
"""Ratio to the best peer that is our goal for each row."""


def table(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of all rows: microseconds, and in brackets the best peer's time divided by ours."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    text = ["; ".join(machine.header_lines(facts)) + ". Weights rotate, so that they come from HBM."]
    for kind in kinds:
        own = [row for row in rows if row["kind"] == kind]
        text += ["", f"{NAMES[kind]}, µs (× the best of cuBLAS and cuBLASLt), N×K by M:", "", *_of_kind(own)]
    return "\n".join(text)


def _of_kind(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = sorted({row["m"] for row in rows})
    cells = {(row["n"], row["k"], row["m"]): _cell(row) for row in rows}
    text = ["| N×K | " + " | ".join(map(str, columns)) + " |", "|" + "---|" * (len(columns) + 1)]
    for n, k in dict.fromkeys((row["n"], row["k"]) for row in rows):
        text.append(f"| {n}×{k} | " + " | ".join(cells.get((n, k, m), "–") for m in columns) + " |")
    means = []
    for m in columns:
        ratios = [row["ratio"] for row in rows if row["m"] == m and "ratio" in row]
        means.append(f"× {harness.geomean(ratios):.3f}" if ratios else "–")
    text.append("| geometric mean | " + " | ".join(means) + " |")
    return [*text, "", *_summary(rows)]


def _cell(row: dict[str, Any]) -> str:
    ratio = f" ({row['ratio']:.2f})" if "ratio" in row else ""
    return f"{row['us']:.1f}{ratio}"


def _summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if not ratios:
        return []
    below = sum(ratio < LEAST for ratio in ratios)
    mean = harness.geomean(ratios)
    return [f"- geometric mean {mean:.3f} over {len(ratios)}, worst {min(ratios):.3f}, {below} below {LEAST}"]
