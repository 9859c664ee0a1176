"""Runs competitors in turns, prints time, rate and ratio, and keeps the rows as JSON.

A case has one `ours` and any number of peers. A peer with several configurations counts with its best one,
chosen from this very run. Losses stay in the table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from kernels_dsl.measure import Call, Timing, interleaved

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "ours"
_say = partial(print, flush=True)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Case:
    """One row: `calls` by competitor; a competitor's configurations are named "peer/configuration". What
    is named "ours_…" is another form of ours: it is in the table, but not what is to be beaten.

    flops: useful floating-point operations of one call. sets: input sets that the calls rotate through.
    verify: raises where our result is wrong; called before the timing, since a wrong kernel can be fast.
    graph: as of `kernels_dsl.measure.interleaved`.
    """

    name: str
    flops: float
    calls: Mapping[str, Call]
    sets: int = 1
    notes: str = ""
    verify: Callable[[], object] | None = None
    graph: bool | None = None


@dataclass(frozen=True)
class Row:
    """A measured case. `chosen` says which configuration of a peer was its best; `picojoules` has the energy
    of an operation, where it was measured."""

    name: str
    flops: float
    ms: dict[str, float]
    method: str
    l2: str
    chosen: dict[str, str] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: str = ""
    picojoules: dict[str, float] = field(default_factory=dict)

    def tflops(self, competitor: str) -> float:
        return self.flops / self.ms[competitor] / 1e9

    def ratio(self, peer: str) -> float:
        """Our rate divided by the peer's: above 1 we are faster."""
        return self.ms[peer] / self.ms[OURS]

    @property
    def title(self) -> str:
        """The name as tables have it, sizes with a times sign between them."""
        return re.sub(r"(?<=\d)x(?=\d)", "×", self.name)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.ms if name != OURS]

    @property
    def best_peer(self) -> str | None:
        foreign = [name for name in self.peers if not name.startswith(f"{OURS}_")]
        return min(foreign, key=self.ms.__getitem__, default=None)


def best_of(timings: Mapping[str, Timing]) -> tuple[dict[str, Timing], dict[str, str]]:
    """Fold "peer/configuration" into the peer's fastest; timings by competitor, and what was chosen."""
    folded: dict[str, Timing] = {}
    chosen: dict[str, str] = {}
    for name, timing in timings.items():
        competitor, _, configuration = name.partition("/")
        if competitor in folded and folded[competitor].ms <= timing.ms:
            continue
        folded[competitor] = timing
        if configuration:
            chosen[competitor] = configuration
    return folded, chosen


def run_case(case: Case, *, rounds: int = 30, seconds: float = 0.0) -> Row:
    """Measure one case on the current device, `seconds` as of `kernels_dsl.measure.interleaved`.

    A peer that raises is left out and named in the notes.
    """
    if case.verify is not None:
        case.verify()
    calls, refused = {}, []
    for name, call in case.calls.items():
        try:
            call(0)
        except Exception as error:  # what a peer raises for a shape that it does not take is its own choice
            if name == OURS:
                raise
            refused.append(f"{name}: {type(error).__name__}")
            continue
        calls[name] = call
    timings, chosen = best_of(
        interleaved(calls, sets=case.sets, rounds=rounds, graph=case.graph, seconds=seconds)
    )
    return Row(
        name=case.name,
        flops=case.flops,
        ms={name: timing.ms for name, timing in timings.items()},
        method="/".join(sorted({timing.method for timing in timings.values()})),
        l2="rotating inputs" if case.sets > 1 else "same inputs each call",
        chosen=chosen,
        spread={name: (timing.low_ms, timing.high_ms) for name, timing in timings.items()},
        notes="; ".join([case.notes] * bool(case.notes) + refused),
    )


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN for no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def line(row: Row) -> str:
    """One row for the terminal: ours, then each peer with the ratio."""
    parts = [f"{row.name:>22}  ours {row.ms[OURS]:8.4f} ms {row.tflops(OURS):7.1f} TFLOPS"]
    for peer in row.peers:
        parts.append(f"{peer} {row.tflops(peer):7.1f}  x{row.ratio(peer):.3f}")
    return "  |  ".join(parts) + (f"  ({row.notes})" if row.notes else "")


def summary(rows: list[Row]) -> list[str]:
    """The geometric mean and the worst row against each peer, and against the best peer of each row."""
    lines = []
    for peer in sorted({peer for row in rows for peer in row.peers}):
        compared = [row for row in rows if peer in row.ms]
        worst = min(compared, key=lambda row: row.ratio(peer))
        mean = geomean(row.ratio(peer) for row in compared)
        lines.append(
            f"against {peer}: geometric mean x{mean:.3f} over {len(compared)}, "
            f"worst x{worst.ratio(peer):.3f} at {worst.name}"
        )
    best = [(row.ratio(row.best_peer), row.name) for row in rows if row.best_peer is not None]
    if len(lines) > 1 and best:
        lines.append(
            f"against the best peer of each row: geometric mean x{geomean(ratio for ratio, _ in best):.3f}, "
            f"worst x{min(best)[0]:.3f} at {min(best)[1]}"
        )
    return lines


def as_they_come(rows: Callable[[], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All rows of a name and numbers, each printed as soon as it is there."""
    found = []
    for row in rows():
        words = (f"{key} {v:.4g}" if isinstance(v, float) else str(v) for key, v in row.items())
        print("  ".join(words), flush=True)
        found.append(row)
    return found


def run_suite(
    suite: str,
    cases: Iterable[Case],
    *,
    rounds: int = 30,
    seconds: float = 0.0,
    results: Path = RESULTS,
    echo: Callable[[str], None] = _say,
) -> list[Row]:
    """Measure all cases, print them as they come, and write `results`/<gpu>/<suite>.json after each."""
    facts = machine.header()
    for text in machine.header_lines(facts):
        echo(text)
    rows = []
    for case in cases:
        row = run_case(case, rounds=rounds, seconds=seconds)
        rows.append(row)
        echo(line(row))
        write(suite, facts, [asdict(row) for row in rows], results)  # a run may be cut
    for text in summary(rows):
        echo(text)
    facts.update({f"{key}_after": value for key, value in machine.driver_facts().items() if key != "driver"})
    path = write(suite, facts, [asdict(row) for row in rows], results)
    echo(f"wrote {path}")
    return rows


def write(suite: str, facts: dict[str, Any], rows: list[dict[str, Any]], results: Path = RESULTS) -> Path:
    """Write one suite's JSON: {"suite", "header", "rows"}; returns its path."""
    folder = results / machine.slug(facts["gpu"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{suite}.json"
    path.write_text(json.dumps({"suite": suite, "header": facts, "rows": rows}, indent=1) + "\n")
    return path


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The header and the rows of a suite that `run_suite` wrote."""
    stored = json.loads(path.read_text())
    rows = []
    for row in stored["rows"]:
        spread = {name: (low, high) for name, (low, high) in row.pop("spread").items()}
        rows.append(Row(**row, spread=spread))
    return stored["header"], rows
