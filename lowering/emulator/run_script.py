"""The command that runs an unmodified CuTe DSL program in the emulator.

Exit status: the program's own; 3 if the emulator found something; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowering.emulator import session as sessions
from lowering.emulator.reports import EmulatorError, Report
from lowering.emulator.session import Session
from lowering.errors import LoweringError

from .front.progress import Progress

FOUND = 3
INTERRUPTED = 130
_JSON_VERSION = 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m lowering.emulator", description="Run CuTe DSL programs on the CPU."
    )
    commands = made.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a program: every kernel that it launches is emulated")
    run.add_argument("--arch", default="sm_90a", help="the GPU that it sees: sm_80, sm_89, sm_90a (default)")
    run.add_argument("--sms", type=int, help="its SMs; a few make persistent kernels loop at small sizes")
    run.add_argument("--seed", type=int, default=0, help="the schedule whose results the program sees")
    run.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="schedules that each launch runs under"
    )
    run.add_argument(
        "--order-matters", action="store_true", help="schedules may leave different results (float atomics)"
    )
    run.add_argument("--json", metavar="FILE", help="write launches and findings there")
    run.add_argument(
        "--fail-on",
        choices=("error", "warning", "never"),
        default="error",
        help="findings that set the status",
    )
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.add_argument("script", help="the program, a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parser().parse_args(argv)
    script = Path(options.script)
    if not script.is_file():
        print(f"emulator: there is no file {script}", file=sys.stderr)
        return 2
    settings: dict[str, Any] = {
        "arch": options.arch,
        "seed": options.seed,
        "seeds": options.seeds,
        "sms": options.sms,
        "order_matters": options.order_matters,
        "raise_on_report": False,
        "progress": None if options.quiet else Progress(),
    }
    begun = time.perf_counter()
    _say(_plan(script, options))
    try:
        with sessions.run(torch_cuda=True, **settings) as session:
            status = _program(script, options.arguments)
    except (LoweringError, EmulatorError) as error:
        print(f"emulator: {error}", file=sys.stderr)
        return 2
    counted = _counted(session, options.fail_on)
    _summary(session, time.perf_counter() - begun)
    if options.json:
        _write(options.json, script, session, status)
    return FOUND if counted and status != INTERRUPTED else status


def _say(text: str) -> None:
    print(f"emulator: {text}", file=sys.stderr, flush=True)


def _plan(script: Path, options: argparse.Namespace) -> str:
    schedules = f"{options.seeds} schedules of each launch" if options.seeds > 1 else "one schedule"
    return (
        f"{script.name} with the CPU as its GPU, an {options.arch} of "
        f"{options.sms or sessions.FULL_SMS} SMs; {schedules}, seed {options.seed}; "
        "times it prints mean nothing"
    )


def _program(script: Path, arguments: Sequence[str]) -> int:
    """Run a file as the main program; returns its exit status."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path[0:0] = [str(script.resolve().parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        _say("interrupted; findings so far:")
        return INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except BaseException as error:
        _traceback(error, script)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def _traceback(error: BaseException, script: Path) -> None:
    """Print a traceback from the program's own first frame on."""
    frame = error.__traceback__
    while frame is not None and os.path.basename(frame.tb_frame.f_code.co_filename) != script.name:
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame or error.__traceback__)


def _counted(session: Session, fail_on: str) -> list[Report]:
    if fail_on == "never":
        return []
    return [r for r in session.reports if fail_on == "warning" or not r.warning]


def _summary(session: Session, seconds: float) -> None:
    for i, report in enumerate(session.reports):
        seed = f" (seed {session.seed_of[i]})" if session.seeds > 1 and i < len(session.seed_of) else ""
        times = session.log.count(report)
        print(f"\n{report}" + (f"\n  {times} times" if times > 1 else "") + seed, file=sys.stderr)
    warnings = sum(r.warning for r in session.reports)
    kernels = len({launch.kernel for launch in session.launches})
    _say(
        f"{len(session.launches)} launches of {kernels} kernels in {seconds:.1f} s; "
        f"{len(session.reports) - warnings} findings, {warnings} warnings"
    )
    if not session.launches:
        _say("the program launched no kernel")


def _write(path: str, script: Path, session: Session, status: int) -> None:
    """Write launches and findings as JSON, to stdout for "-"."""
    findings = []
    for i, report in enumerate(session.reports):
        found = report.as_dict()
        found["seed"] = session.seed_of[i] if i < len(session.seed_of) else session.seed
        found["times"] = session.log.count(report)
        findings.append(found)
    launches = [
        {
            "kernel": launch.kernel,
            "grid": launch.grid,
            "block": launch.block,
            "cluster": launch.cluster,
            "shared_bytes": launch.smem,
        }
        for launch in session.launches
    ]
    record = {
        "version": _JSON_VERSION,
        "script": str(script),
        "arch": session.arch,
        "sms": session.device_sms,
        "seed": session.seed,
        "seeds": session.seeds,
        "script_status": status,
        "launches": launches,
        "findings": findings,
    }
    text = json.dumps(record, indent=1, default=str) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)
