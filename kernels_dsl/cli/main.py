"""The command line's entry: parses, runs one command, turns errors into exit codes.

Exit codes: 0 all well, 1 a check failed or a kernel could not be built, 2 the command line is wrong or asks
for something that this machine lacks, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kernels_dsl._version import __version__
from kernels_dsl.cli import advise, bench, compile, demo, doctor, inspect, load, profile
from kernels_dsl.cli.errors import CheckFailed, UsageError
from lowering.errors import LoweringError

_COMMANDS = (demo, doctor, compile, load, inspect, advise, bench, profile)
_PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports it


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands; each command's module adds its own arguments and `run`."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels_dsl",
        description="GPU kernels written in CuTe DSL: compile, inspect, check and measure them.",
        epilog="Exit codes: 0 all well, 1 a check failed, 2 wrong usage or something missing here.",
    )
    parser.add_argument("--version", action="version", version=f"kernels-dsl {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is compiled and loaded")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (argparse itself exits with 2 on wrong arguments)."""
    args = build_parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    try:
        return args.run(args)
    except UsageError as error:
        print(f"kernels_dsl: {error}", file=sys.stderr)
        return 2
    except (CheckFailed, LoweringError) as error:
        print(f"kernels_dsl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kernels_dsl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) went away. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
