"""Code that all steps share: where to run, how to check, how to time, and how to print.

A step is a file with `check(lab)` and `measure(bench)`, and ends in

    if __name__ == "__main__":
        common.main(check, measure)

`lab` is where a step runs: on a Hopper GPU if there is one, else in the emulator, else nowhere, in which
case its kernels are compiled for one and nothing more. `bench` needs the GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
for _place in (FOLDER.parent, FOLDER):  # the project's packages, and the steps themselves
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))

ARCH = "sm_90a"
GPU, EMULATOR, COMPILE = "GPU", "emulator", "compile only"


def load(name: str) -> ModuleType:
    """Another step as a module: a file name that begins with a digit cannot be imported by a statement."""
    return importlib.import_module(name)


def place() -> str:
    """GPU, EMULATOR or COMPILE: the best place there is for SM90 code."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return GPU
    try:
        emulator = importlib.import_module("lowering.emulator")
    except ImportError:
        return COMPILE
    return EMULATOR if hasattr(emulator, "run") else COMPILE


class Lab:
    """Makes inputs, launches kernels and compares, wherever there is something to launch on."""

    def __init__(self, where: str | None = None) -> None:
        self.where = where or place()
        self.device = "cuda" if self.where == GPU else "cpu"
        self.timeline: Any = None
        """Of the last emulated launch."""
        self._seed = 0

    def pick(self, gpu: Any, small: Any) -> Any:
        """A size: the emulator is some 10⁵ times slower than a GPU and gets the small one."""
        return gpu if self.where == GPU else small

    def integers(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Small integers: their sums of products are exact in float32, so a result is right or wrong."""
        from reference.inputs import integers

        self._seed += 1
        return integers(shape, dtype, seed=self._seed, device=self.device)

    def poison(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An output full of NaN: what a kernel forgets to write is noticed."""
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def launch(self, host: Any, *args: Any, **constants: Any) -> None:
        """`host(*args, **constants)` on the GPU or in the emulator; without either, compile it."""
        if self.where == GPU:
            host(*args, **constants)
        elif self.where == EMULATOR:
            from lowering import emulator

            with emulator.run(arch=ARCH) as session:
                host(*args, **constants)
            self.timeline = getattr(session, "timeline", None)
        else:
            host.compile(*[_meta(arg) for arg in args], arch=ARCH, **constants)

    def equal(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Bit for bit, after rounding `expected` to the dtype of `actual`; says which element differs."""
        from reference.tolerance import check_exact

        if self.where == COMPILE:
            print(f"  compiled  {what}   (for {ARCH}; no GPU and no emulator to run it on)")
            return
        check_exact(actual, expected, case=what)
        print(f"  correct   {what}   ({self.where})")

    def close(self, what: str, actual: torch.Tensor, expected: torch.Tensor, peer: torch.Tensor) -> None:
        """Within twice the error that PyTorch's own result `peer` has against float64 `expected`."""
        from reference.tolerance import check

        if self.where == COMPILE:
            print(f"  compiled  {what}   (for {ARCH}; no GPU and no emulator to run it on)")
            return
        report = check(actual, expected, peer, case=what)
        print(f"  correct   {what}   ({self.where}; error {report.error:.2g}, bound {report.bound:.2g})")


def _meta(arg: Any) -> Any:
    """A tensor without memory stands for a tensor; lowering compiles from what it looks like."""
    if isinstance(arg, tuple):
        return tuple(_meta(item) for item in arg)
    return arg.to("meta") if isinstance(arg, torch.Tensor) else arg


@dataclass
class Table:
    """Measured rows: name -> microseconds a call, and bytes or FLOPs of one call."""

    title: str
    unit: str
    baseline: str
    work: dict[str, float]
    microseconds: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        """In GB/s or TFLOPS."""
        return self.work[name] / self.microseconds[name] / (1e3 if self.unit == "GB/s" else 1e6)

    def lines(self) -> list[str]:
        """The table as Markdown."""
        text = [
            "",
            f"**{self.title}**",
            "",
            f"| | µs | {self.unit} | × {self.baseline} | |",
            "|---|--:|--:|--:|---|",
        ]
        for name, us in self.microseconds.items():
            ratio = self.rate(name) / self.rate(self.baseline)
            text.append(
                f"| {name} | {us:.1f} | {self.rate(name):.0f} | {ratio:.2f} | {self.notes.get(name, '')} |"
            )
        return text


class Bench:
    """Times calls against each other on the GPU and keeps the tables."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.remarks: list[str] = []

    def compare(
        self,
        title: str,
        calls: Mapping[str, Callable[[], object]],
        *,
        baseline: str,
        bytes: float | Mapping[str, float] = 0,
        flops: float | Mapping[str, float] = 0,
        notes: Mapping[str, str] | None = None,
        seconds: float = 0.5,
    ) -> Table:
        """Time `calls` in turns, so that clocks and heat are the same for all; print and keep the table.

        For about `seconds`: a cool GPU runs faster at first, and in the middle of a few rounds slows down.
        `bytes` or `flops`: of one call; one number for all, or one for each. `baseline`: a row.
        """
        from kernels_dsl.measure import interleaved

        timings = interleaved({name: _ignoring_set(call) for name, call in calls.items()}, seconds=seconds)
        work = bytes or flops
        each = dict(work) if isinstance(work, Mapping) else dict.fromkeys(calls, float(work))
        table = Table(title, "GB/s" if bytes else "TFLOPS", baseline, each, notes=dict(notes or {}))
        table.microseconds = {name: timing.ms * 1e3 for name, timing in timings.items()}
        self.tables.append(table)
        print("\n".join(table.lines()))
        return table

    def remark(self, text: str) -> None:
        """A measured fact that is no row of a table."""
        self.remarks.append(text)
        print(f"\n{text}")

    def save(self, path: Path) -> None:
        """Machine, tables and remarks as JSON."""
        from benchmarks import machine

        tables = [asdict(table) for table in self.tables]
        facts = {"machine": machine.header(), "tables": tables, "remarks": self.remarks}
        path.write_text(json.dumps(facts, indent=1) + "\n")


def _ignoring_set(call: Callable[[], object]) -> Callable[[int], object]:
    return lambda _set: call()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """N(0, 1) on the GPU. Zeros would be faster: power depends on the data, and clocks on power."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def sm_count() -> int:
    """Streaming multiprocessors of the GPU; those of a full H100 or H200 where there is none."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


def registers(host: Any, *args: Any, **constants: Any) -> str:
    """ "n registers", a thread of the kernel that these arguments compile to; "" without a disassembler."""
    from lowering import LoweringError

    compiled = host.compile(*[_meta(arg) for arg in args], arch=ARCH, **constants)
    try:
        return f"{compiled.resources()[0].registers} registers"
    except LoweringError:
        return ""


def plot(tables: list[Table], path: Path) -> None:
    """Bars of the rates of all tables."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.4 * sum(len(t.microseconds) + 2 for t in tables) + 1), layout="constrained")
    for table, axes in zip(tables, figure.subplots(len(tables), 1, squeeze=False)[:, 0]):
        names = list(table.microseconds)
        axes.barh(names, [table.rate(name) for name in names])
        axes.invert_yaxis()
        axes.set_title(f"{table.title} [{table.unit}]", fontsize=9)
    figure.savefig(path)


def draw_timeline(lab: Lab, path: Path | None) -> None:
    """The last emulated launch: as text, and as a picture where `path` says so."""
    if lab.timeline is None:
        return
    from lowering.emulator.timeline import draw_plot, draw_text, select

    corner = "(0, 0, 0)"
    events = [
        event._replace(actor=event.actor.removeprefix(f"CTA {corner} "))
        for event in select(lab.timeline.events, cta=corner)
    ]
    print("\nTimeline of CTA (0, 0, 0), in emulated steps (order is real, durations are not):")
    print("L load, S store, W WGMMA under way; | a phase of the barrier at that address ends; . a warp waits")
    print(draw_text(events))
    if path is not None:
        draw_plot(events, str(path))


def main(
    check: Callable[[Lab], None],
    measure: Callable[[Bench], None],
    timeline: Callable[[Lab], None] | None = None,
) -> None:
    """Command line of a step: check, draw the timeline if there is one to draw, measure on a GPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the tables, or the timeline without a GPU"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the tables for tutorials/make_table.py"
    )
    parser.add_argument("--no-measure", action="store_true", help="check only")
    args = parser.parse_args()
    lab, bench = Lab(), Bench()
    print(f"check, on: {lab.where}")
    check(lab)
    if lab.where == EMULATOR and timeline is not None:
        timeline(lab)
        draw_timeline(lab, args.plot)
    elif args.plot and lab.where != GPU:
        print(f"\n{args.plot} is not drawn: this step has no timeline, and its tables need a Hopper GPU")
    if lab.where != GPU:
        print("\nmeasure: left out, it needs a Hopper GPU")
        return
    if args.no_measure:
        return
    measure(bench)
    if args.json:
        bench.save(args.json)
    if args.plot:
        plot(bench.tables, args.plot)
