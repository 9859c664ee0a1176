"""`advise`: which call, format and density is the fastest for a shape on this GPU; measured once and kept."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from kernels_dsl.cli.errors import UsageError


def extents(text: str, form: str, option: str) -> tuple[int, ...]:
    """The positive numbers in an option's text, "64x64x64" for the form "MxNxK". UsageError: other text."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or text.count("x") != form.count("x"):
        raise UsageError(f"{option} is {text!r}, must be {form}, as {re.sub('[A-Z]', '64', form)}")
    return tuple(map(int, text.split("x")))


def add_command(commands: Any) -> None:
    """Add `advise` to the parser."""
    parser = commands.add_parser("advise", help="which call is the fastest for a shape", description=__doc__)
    parser.add_argument(
        "--shape", required=True, action="append", metavar="MxNxK", help="of a @ w.t(); may be repeated"
    )
    parser.add_argument("--density", type=float, help="share of w's blocks that are kept, 0 to 1")
    parser.add_argument(
        "--block", action="append", metavar="RxC", help="may be repeated; default 16x16 to 128x128"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="default %(default)s")
    parser.add_argument("--again", action="store_true", help="measure what is kept anew")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the advice for each shape. UsageError: wrong options, or no figures and no GPU."""
    from kernels_dsl.advice.advise import BLOCKS, advise
    from kernels_dsl.advice.calls import DTYPES

    shapes = [extents(text, "MxNxK", "--shape") for text in args.shape]
    blocks = [extents(text, "RxC", "--block") for text in args.block or ()] or BLOCKS
    found = []
    for m, n, k in shapes:
        try:
            found.append(
                advise(
                    m, n, k, density=args.density, blocks=blocks, dtype=DTYPES[args.dtype], again=args.again
                )
            )
        except (LookupError, ValueError) as error:
            raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps([advice.to_json() for advice in found], indent=1))
        return 0
    print("\n\n".join(map(str, found)))
    return 0
