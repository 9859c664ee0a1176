"""Notebooks of the steps, made from their files, with the outputs of a run in the emulator on this CPU.

    python tutorials/notebooks.py                       # all, into build/notebooks: two minutes
    python tutorials/notebooks.py 03 07 --out FOLDER    # some
    python tutorials/notebooks.py --no-run              # without outputs: seconds

Prose, code and pictures come from the step and its section of README.md. Needs the extra `notebooks`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import step_cells
from step_cells import FOLDER, Cell

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = FOLDER.parent
SECONDS_OF_A_CELL = 600
_PROGRESS = re.compile(r"^(compiling|compiled) \S+ for sm_\w+.*\n?", re.MULTILINE)


def percent(cells: list[Cell]) -> str:
    """`cells` in jupytext's format of scripts, in which `# %%` begins a cell."""
    parts = []
    for cell in cells:
        if cell.is_code:
            parts.append(f"# %%\n{cell.text}\n")
        else:
            lines = (f"# {line}".rstrip() for line in cell.text.split("\n"))
            parts.append("\n".join(["# %% [markdown]", *lines, ""]))
    return "\n".join(parts)


def notebook(step: Path, out: Path) -> NotebookNode:
    """The notebook of a step that is to lie in `out`, without outputs; the same for the same files.

    In this checkout it finds the tutorials by a path relative to itself, outside of it by an absolute one.
    """
    import jupytext

    out = out.resolve()
    folder = os.path.relpath(FOLDER, out) if out.is_relative_to(ROOT) else str(FOLDER)
    made = jupytext.reads(percent(step_cells.cells(step, Path(folder).as_posix())), fmt="py:percent")
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # jupytext's are random
        cell.metadata = {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return made


def run(made: NotebookNode, out: Path) -> None:
    """Run all cells in a kernel of Jupyter that sees no GPU, in the folder `out`, and keep their outputs.

    nbclient's CellExecutionError, with the traceback, where a cell fails; CellTimeoutError or DeadKernelError
    where it does not end.
    """
    from nbclient import NotebookClient

    client = NotebookClient(
        made,
        timeout=SECONDS_OF_A_CELL,
        resources={"metadata": {"path": str(out)}},
        record_timing=False,
        coalesce_streams=True,  # what a cell prints is one output, however it arrives
        extra_arguments=["--log-level=ERROR"],  # no warning that it listens, on this machine alone, over TCP
    )
    client.execute(env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    drop_progress(made)


def drop_progress(made: NotebookNode) -> None:
    """Remove the lines that a long compile leaves: they tell of this machine's cache, not of the step."""
    for cell in made.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                output.text = _PROGRESS.sub("", output.text)
        if cell.get("outputs"):
            cell.outputs = [output for output in cell.outputs if output.get("text") != ""]


def write(made: NotebookNode, target: Path) -> None:
    """Check `made` by the schema of notebooks, and write it."""
    import nbformat

    nbformat.validate(made)
    nbformat.write(made, target)


def main(arguments: list[str] | None = None) -> int:
    """Command line: 0 where all is written, 1 where a cell failed, 2 where the extra is missing."""
    steps = step_cells.steps()
    parser = argparse.ArgumentParser(description="Notebooks of the tutorial's steps, run on this CPU.")
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help=f"of {', '.join(steps)}; all if none is named"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "notebooks", help="folder to write to")
    parser.add_argument("--no-run", action="store_true", help="leave the outputs out")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.steps if name not in steps]:
        parser.error(f"STEP is {unknown[0]!r}, must be one of {', '.join(steps)}")
    try:
        import ipykernel  # noqa: F401
        import jupytext  # noqa: F401
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    except ImportError as error:
        print(f"notebooks.py: {error}; pip install '.[notebooks]' brings it", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in args.steps or steps:
        start, target = time.perf_counter(), args.out / f"{steps[name].stem}.ipynb"
        made = notebook(steps[name], args.out)
        if not args.no_run:
            try:
                run(made, args.out)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                print(f"{target} is not written: {error}", file=sys.stderr)
                failed = True
                continue
        write(made, target)
        print(f"{target}  ({time.perf_counter() - start:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
