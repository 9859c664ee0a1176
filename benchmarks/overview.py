"""The table of docs/performance.md: each family's rate beside its peers', from the files of results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness, machine, ratio_plot
from benchmarks.harness import Row


@dataclass(frozen=True)
class Line:
    """A line of the table: a suite, and the peer it is compared with.

    peer: a competitor of the suite; None is the fastest foreign one of each row, which `against` names. Rows
    of `gemm_small` know their best peer: there it is their kind.
    """

    suite: str
    what: str
    page: str
    against: str
    peer: str | None = None


BEST = "the best of cuDNN, FA2, flash-attn-4"
LINES = (
    Line("gemm_bf16", "dense GEMM, bf16", "gemm", "the best of cuBLAS and quack"),
    Line("gemm_bf16_ragged", "dense GEMM, ragged sizes", "gemm", "cuBLAS"),
    Line("gemm_small", "GEMM of 1 to 256 rows, bf16", "gemm", "the best of cuBLAS and cuBLASLt", "bf16"),
    Line("gemm_small", "fp8 GEMM of 1 to 256 rows", "fp8_gemm", "cuBLASLt", "tensor"),
    Line("attention_forward", "attention forward, bf16", "attention", BEST),
    Line("attention_small", "attention, small launches", "attention", BEST),
    Line("attention_backward", "attention backward, bf16", "attention", BEST),
    Line("decode", "decoding from paged caches", "decoding", "FlashAttention-3", "fa3"),
    Line("attention_sparse", "windows and block lists", "attention", "flash-attn-4", "fa4"),
    Line("bsr_rows", "block-sparse GEMM", "bsr", "torch's BSR product", "torch"),
    Line("fp8_gemm", "fp8 GEMM, all kinds of scales", "fp8_gemm", "cuBLASLt"),
    Line("fp8_grouped", "fp8 grouped GEMM (MoE)", "fp8_gemm", "`torch._scaled_grouped_mm`", "torch"),
    Line("fp8_attention", "fp8 attention", "attention_fp8", "our own in bf16", "ours_bf16"),
)


def _ratio(row: Row, peer: str | None) -> float | None:
    """Number of times as fast as the peer we are; None where it is not in the row."""
    name = row.best_peer if peer is None else peer
    return row.ratio(name) if name in row.ms else None


@dataclass(frozen=True)
class Summary:
    """A line with the ratios of its cases, each with the case's title; the mean is geometric."""

    line: Line
    ratios: list[tuple[float, str]]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return harness.geomean(ratio for ratio, _ in self.ratios)


def _ratios(path: Path, peer: str | None) -> tuple[dict[str, Any], list[tuple[float, str]]]:
    """The header of a file of results, and the ratio and title of each of its cases that has `peer`."""
    stored = json.loads(path.read_text())
    if "ms" in stored["rows"][0]:
        facts, rows = harness.read(path)
        named = [(_ratio(row, peer), row.title) for row in rows]
        return facts, [(ratio, title) for ratio, title in named if ratio is not None]
    if stored["suite"] == "gemm_small":
        kind = [row for row in stored["rows"] if row["kind"] == peer and "ratio" in row]
        return stored["header"], [(row["ratio"], f"{row['m']}×{row['n']}×{row['k']}") for row in kind]
    cases = ratio_plot.of_decoding(stored["rows"])
    return stored["header"], [(case.ratios[peer], case.title) for case in cases if peer in case.ratios]


def summaries(folder: Path) -> tuple[list[Summary], list[dict[str, Any]]]:
    """All lines whose suites `folder`, one GPU's results, has, and the headers of their files."""
    found, headers = [], []
    for line in LINES:
        path = folder / f"{line.suite}.json"
        if path.exists():
            facts, ratios = _ratios(path, line.peer)
            found.append(Summary(line, ratios))
            headers.append(facts)
    return found, headers


def table(folder: Path) -> str:
    """Markdown of all suites that `folder`, one GPU's results, has."""
    text = ["| | compared with | cases | geometric mean of the ratio | worst case |", "|---|---|---|---|---|"]
    lines, headers = summaries(folder)
    for found in lines:
        least, name = min(found.ratios)
        text.append(
            f"| [{found.line.what}]({found.line.page}.md) | {found.line.against} "
            f"| {len(found.ratios)} | {found.mean:.2f} | {least:.2f}, {name} |"
        )
    machines = sorted({machine.short_header(facts) for facts in headers})
    commits = sorted({facts["commit"] for facts in headers})
    where = f"{'; '.join(machines)}, commits {', '.join(commits)}"
    head = f"Our rate divided by the peer's, all competitors in turns in one run, losses included. {where}."
    return "\n".join([head, "", *text])
