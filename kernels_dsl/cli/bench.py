"""`bench`: run a benchmark of the source checkout against its peers on this machine's GPU."""

from __future__ import annotations

import argparse
from typing import Any

from kernels_dsl.cli.errors import UsageError

BENCHMARKS = ("gemm", "attention", "bsr", "fp8")


def add_command(commands: Any) -> None:
    """Add `bench` to the parser."""
    parser = commands.add_parser("bench", help="measure against the peers (needs a GPU)", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS, help="what to measure")
    passed_on = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="passed on; `bench gemm --help` lists what it takes"
    )
    passed_on.required = False  # argparse would name it among what is missing
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Hand over to `benchmarks.<name>`."""
    import importlib

    try:
        module = importlib.import_module(f"benchmarks.{args.name}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("benchmarks"):
            raise
        raise UsageError(
            "the benchmarks are part of the source checkout: run this from its folder"
        ) from error
    return int(module.main(args.arguments))
