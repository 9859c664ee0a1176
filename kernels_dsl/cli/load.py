"""`load`: put the kernels of a bundle, made by `compile --bundle`, into this machine's cache."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kernels_dsl.cli.errors import CheckFailed, UsageError


def add_command(commands: Any) -> None:
    """Add `load` to the parser."""
    parser = commands.add_parser("load", help="put a bundle of kernels into the cache", description=__doc__)
    parser.add_argument("bundle", type=Path, help="what `compile --bundle` wrote, from a source you trust")
    parser.add_argument(
        "--verify", type=Path, metavar="PUBKEY", help="refuse it unless one of these SSH keys signed it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, say what was refused and why; CheckFailed where anything was."""
    from lowering import LoweringError, bundle, cache

    if not args.bundle.is_file():
        raise UsageError(f"{args.bundle} is not a file")
    try:
        report = bundle.load(args.bundle, verify=args.verify)
    except LoweringError as error:
        raise CheckFailed(str(error)) from error
    print(f"{report}\ncache {cache.dir()}")
    if report.refused:
        raise CheckFailed(f"{len(report.refused)} kernels of {args.bundle} cannot be used here")
    return 0
