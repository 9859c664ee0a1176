"""`inspect`: PTX, SASS and resources of an op's kernels, of those in the cache or of a name. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kernels_dsl.cli import kernels
from kernels_dsl.cli.errors import UsageError


def add_command(commands: Any) -> None:
    """Add `inspect` to the parser."""
    parser = commands.add_parser(
        "inspect", help="PTX, SASS, registers, spills of a kernel", description=__doc__
    )
    parser.add_argument("op", choices=kernels.OPS, help="whose kernels")
    parser.add_argument("--arch", default="sm_90a", help="default %(default)s")
    parser.add_argument("--name", default="", help="only kernels whose name contains this")
    parser.add_argument("--list", action="store_true", help="name the kernels, compile nothing")
    parser.add_argument("--all", action="store_true", help="compile all that the cache lacks")
    parser.add_argument(
        "--ptx", action="store_true", help="print the PTX of the one kernel that --name leaves"
    )
    parser.add_argument("--sass", action="store_true", help="print its SASS")
    parser.add_argument("-o", "--output", type=Path, help="folder for .ptx, .sass and .cubin of each kernel")
    parser.set_defaults(run=run)


def save(compiled: Any, name: str, folder: Path) -> list[Path]:
    """Write PTX, SASS and cubin of a kernel into `folder`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)
    paths = [folder / f"{stem}.{suffix}" for suffix in ("ptx", "sass", "cubin")]
    paths[0].write_text(compiled.ptx())
    paths[1].write_text(compiled.sass())
    paths[2].write_bytes(compiled.cubin())
    return paths


def _cached(shipped: list[kernels.Shipped], args: argparse.Namespace) -> list[kernels.Shipped]:
    """Those that the cache has: without a name, a command that looks should not compile hundreds."""
    found = [kernel for kernel in shipped if kernel.is_cached(args.arch)]
    advice = "--name TEXT compiles those that it names, --all compiles all, --list names them"
    if not found:
        raise UsageError(
            f"none of the {len(shipped)} {args.op} kernels for {args.arch} is in the cache: {advice}"
        )
    print(f"{len(found)} of {len(shipped)} {args.op} kernels for {args.arch} are in the cache; {advice}")
    return found


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; the resources where nothing was."""
    chosen = kernels.shipped(args.arch, (args.op,), args.name)
    if args.list:
        print("\n".join(kernel.name for kernel in chosen))
        return 0
    if not (args.name or args.all):
        chosen = _cached(chosen, args)
    if (args.ptx or args.sass) and len(chosen) > 1:
        names = "\n  ".join(kernel.name for kernel in chosen)
        raise UsageError(f"--ptx and --sass print one kernel; --name leaves {len(chosen)}:\n  {names}")
    for done, kernel in enumerate(chosen, 1):
        if len(chosen) > 1 and sys.stderr.isatty():
            print(f"[{done}/{len(chosen)}]", end="\r", file=sys.stderr, flush=True)
        compiled = kernel.compile(args.arch)
        if args.ptx:
            print(compiled.ptx())
        if args.sass:
            print(compiled.sass())
        if args.output is not None:
            for path in save(compiled, kernel.name, args.output):
                print(f"wrote {path}")
        if not (args.ptx or args.sass):
            print(f"{kernel.name}  ({args.arch}, {kernels.origin(compiled)})")
            for line in kernels.report_lines(compiled):
                print(f"  {line}")
    return 0
