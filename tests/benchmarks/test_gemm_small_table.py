"""The tables of products of few rows: a line a layer, means, and rows without a peer."""

from __future__ import annotations

from typing import Any

from benchmarks.gemm_small_table import table

FACTS: dict[str, Any] = {
    **dict.fromkeys(("driver", "cuda", "python", "commit", "power_cap_w", "memory_clock_mhz"), "1"),
    **dict.fromkeys(("sm_clock_mhz", "sm_clock_max_mhz"), "1980"),
    "gpu": "NVIDIA H200", "sms": 132, "l2_mib": 60, "versions": {},
}  # fmt: skip


def _row(kind: str, m: int, us: float, ratio: float | None) -> dict[str, Any]:
    row = {"kind": kind, "m": m, "n": 4096, "k": 7168, "us": us}
    return row if ratio is None else {**row, "ratio": ratio}


def test_tables_of_two_kinds() -> None:
    rows = [_row("bf16", 64, 20.0, 1.2), _row("bf16", 4, 10.0, 0.9), _row("block", 129, 12.0, None)]
    text = table(FACTS, rows).splitlines()
    assert "| N×K | 4 | 64 |" in text
    assert "| 4096×7168 | 10.0 (0.90) | 20.0 (1.20) |" in text
    assert "| geometric mean | × 0.900 | × 1.200 |" in text
    assert "- geometric mean 1.039 over 2, worst 0.900, 1 below 0.97" in text
    assert "| 4096×7168 | 12.0 |" in text and "| geometric mean | – |" in text
