"""`profile`: run one call under Nsight Compute, and say which part of the GPU bounds it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_dsl.cli.advise import extents
from kernels_dsl.cli.errors import CheckFailed, UsageError
from kernels_dsl.profiling import ncu

if TYPE_CHECKING:
    from kernels_dsl.profiling.calls import Asked, Prepared
    from kernels_dsl.profiling.roofline import Report

OPERATIONS = ("gemm", "attention", "bsr", "fp8")
INSTALL = "install NVIDIA's Nsight Compute, a part of the CUDA toolkit"
RIGHTS = (
    "the driver lets administrators alone read its counters: run as root, or set its option "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


def add_command(commands: Any) -> None:
    """Add `profile` to the parser."""
    parser = commands.add_parser(
        "profile", help="a call's roofline, by Nsight Compute (needs a GPU)", description=__doc__
    )
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument(
        "--shape", required=True, metavar="MxNxK", help="of a @ w.t(); attention's is BxSxHxD"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="default %(default)s")
    parser.add_argument("--causal", action="store_true", help="attention's mask")
    parser.add_argument(
        "--kv-heads", type=int, default=0, help="of attention; default: as many as of queries"
    )
    parser.add_argument("--backward", action="store_true", help="attention's gradients")
    parser.add_argument("--density", type=float, default=0.25, help="bsr: share of blocks that are kept")
    parser.add_argument("--block", default="64x64", metavar="RxC", help="bsr: default %(default)s")
    parser.add_argument("--scales", choices=("tensor", "row", "block"), default="row", help="of fp8")
    parser.add_argument("--dry-run", action="store_true", help="print the command line of ncu, run nothing")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--once", action="store_true", help="run the call as ncu is to see it, without ncu")
    parser.set_defaults(run=run)


def asked(args: argparse.Namespace) -> Asked:
    """The call that the arguments name. UsageError where they do not."""
    from kernels_dsl.profiling.calls import Asked

    of_attention = args.operation == "attention"
    if not of_attention and (args.causal or args.kv_heads or args.backward):
        raise UsageError(f"--causal, --kv-heads and --backward are attention's, not {args.operation}'s")
    if not 0 < args.density <= 1:
        raise UsageError(f"--density is {args.density}, must be above 0 and at most 1")
    if args.kv_heads < 0:
        raise UsageError(f"--kv-heads is {args.kv_heads}, must be at least 1")
    rows, columns = extents(args.block, "RxC", "--block")
    return Asked(
        operation=args.operation,
        shape=extents(args.shape, "BxSxHxD" if of_attention else "MxNxK", "--shape"),
        dtype=args.dtype,
        causal=args.causal,
        kv_heads=args.kv_heads,
        backward=args.backward,
        density=args.density,
        block=(rows, columns),
        scales=args.scales,
    )


def program(call: Asked) -> list[str]:
    """The command line of the process that ncu watches."""
    words = [sys.executable, "-m", "kernels_dsl", "profile", call.operation, "--shape", _joined(call.shape)]
    words += ["--dtype", call.dtype]
    if call.operation == "attention":
        words += ["--causal"] * call.causal + ["--backward"] * call.backward
        words += ["--kv-heads", str(call.kv_heads)] if call.kv_heads else []
    elif call.operation == "bsr":
        words += ["--density", str(call.density), "--block", _joined(call.block)]
    elif call.operation == "fp8":
        words += ["--scales", call.scales]
    return [*words, "--once"]


def _joined(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def run(args: argparse.Namespace) -> int:
    """Print the roofline, or the command line. UsageError: wrong options, or neither ncu nor a GPU here."""
    call = asked(args)
    if args.once:
        _once(call)
        return 0
    found = ncu.find_ncu()
    line = shlex.join(ncu.command(found or "ncu", "profile.csv", program(call)))
    if args.dry_run:
        print(line)
        return 0
    missing = [] if found else [f"ncu is neither on the path nor in {' or '.join(ncu.PLACES)}: {INSTALL}"]
    if not _has_gpu():
        missing.append("no NVIDIA GPU is in reach")
    if missing or found is None:
        raise UsageError(f"{'; '.join(missing)}. This would run:\n{line}")
    report = _profiled(found, call)
    print(json.dumps(report.to_json(), indent=1) if args.json else report)
    return 0


def _has_gpu() -> bool:
    from lowering import arch

    return arch.device_count() > 0


def _prepared(call: Asked, device: str) -> Prepared:
    from kernels_dsl.profiling.calls import prepare

    try:
        return prepare(call, device)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{call.operation} cannot run: {error}") from error


def _once(call: Asked) -> None:
    """The call once to warm up, which compiles, and once between the profiler's start and stop."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("--once runs the call on a GPU: none is in reach")
    prepared = _prepared(call, "cuda")
    prepared.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    prepared.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print(json.dumps({"flops": prepared.work.flops, "rate": prepared.work.rate, "text": prepared.work.text}))


def _profiled(path: str, call: Asked) -> Report:
    """Counts under ncu. CheckFailed: what ncu or the program said where there are no counters."""
    from kernels_dsl.profiling.roofline import Gpu, Work, report
    from lowering import arch

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "profile.csv"
        # Numbers are printed by the locale.
        done = subprocess.run(
            ncu.command(path, str(log), program(call)), capture_output=True, text=True,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        text = log.read_text() if log.exists() else ""
    kernels = ncu.counted(text)
    if done.returncode or not kernels:
        said = "\n".join(part.strip() for part in (text, done.stdout, done.stderr) if part.strip())
        why = f"{RIGHTS}\n" * (ncu.NO_RIGHT in said)
        raise CheckFailed(f"ncu ended with {done.returncode} and counted {len(kernels)} kernels: {why}{said}")
    try:
        facts = json.loads(done.stdout.strip().splitlines()[-1])
        work = Work(facts["text"], facts["flops"], facts["rate"])
        gpu = arch.device(0)
        return report(work, Gpu(gpu.name, gpu.arch, gpu.sm_count), kernels)
    except (IndexError, KeyError, ValueError) as error:
        raise CheckFailed(f"ncu's output is not understood: {error}\n{done.stdout}{text}") from error
