"""The README's table: each family's rate beside its peers', from the files of results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Row


@dataclass(frozen=True)
class Line:
    """A line of the table: a suite, and whom it is held against.

    peer: a competitor of the suite; None is the fastest foreign one of each row, which `against` names.
    """

    suite: str
    what: str
    page: str
    against: str
    peer: str | None = None


BEST = "the best of cuDNN, FlashAttention-2, flash-attn-4"
LINES = (
    Line("gemm_bf16", "dense GEMM, bf16", "performance", "the best of cuBLAS and quack"),
    Line("gemm_bf16_ragged", "the same, ragged sizes", "performance", "cuBLAS"),
    Line("attention_forward", "attention forward, bf16", "attention", BEST),
    Line("attention_small", "the same, small launches", "attention", BEST),
    Line("attention_sparse", "windows and block lists, to S = 524288", "attention", "flash-attn-4", "fa4"),
    Line("bsr_rows", "block-sparse GEMM, blocks of 16 to 128", "bsr", "torch's BSR product", "torch"),
    Line("fp8_gemm", "fp8 GEMM, all kinds of scales", "fp8", "cuBLASLt"),
    Line("fp8_grouped", "fp8 GEMM of groups", "fp8", "`torch._scaled_grouped_mm`", "torch"),
    Line("fp8_attention", "fp8 attention", "fp8", "our own in bf16", "ours_bf16"),
)


def _ratio(row: Row, peer: str | None) -> float | None:
    """How many times as fast as the peer we are; None where it is not in the row."""
    name = row.best_peer if peer is None else peer
    return row.ratio(name) if name in row.ms else None


def table(folder: Path) -> str:
    """Markdown of all suites that `folder`, one GPU's results, has."""
    text = ["| | held against | cases | times as fast, geometric mean | least, at |", "|---|---|---|---|---|"]
    machines = set()
    for line in LINES:
        path = folder / f"{line.suite}.json"
        if not path.exists():
            continue
        facts, rows = harness.read(path)
        machines.add(
            f"one {facts['gpu']}, driver {facts['driver']}, torch {facts['versions']['torch']}, "
            f"nvidia-cutlass-dsl {facts['versions']['nvidia-cutlass-dsl']}, commit {facts['commit']}"
        )
        found = [(ratio, row.title) for row in rows if (ratio := _ratio(row, line.peer)) is not None]
        least, name = min(found)
        mean = harness.geomean(ratio for ratio, _ in found)
        text.append(
            f"| [{line.what}](docs/{line.page}.md) | {line.against} | {len(found)} | {mean:.2f} | "
            f"{least:.2f}, {name} |"
        )
    head = "Each line is of one run in which all took turns, and losses are in it"
    return "\n".join([f"{head}: {'; '.join(sorted(machines))}.", "", *text])
