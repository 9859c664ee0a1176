"""Checks and measures all steps, or some, in one run on a Hopper GPU, and writes what make_table.py reads.

python tutorials/measure_all.py FOLDER            # 01.json, ..., a1.json; some minutes
python tutorials/measure_all.py FOLDER 08 09 a1   # these steps alone
"""

from __future__ import annotations

import sys
from pathlib import Path

import common
import torch

STEPS = {path.stem.split("_")[0]: path.stem for path in sorted(common.FOLDER.glob("[0-9a]*_*.py"))}


def main(folder: Path, numbers: list[str]) -> None:
    """One step after the other; each is written as soon as it is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers or STEPS:
        print(f"\n## {STEPS[number]}", flush=True)
        step, bench = common.load(STEPS[number]), common.Bench()
        step.check(common.Lab(common.GPU))
        step.measure(bench)
        bench.save(folder / f"{number}.json")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= STEPS.keys():
        sys.exit(f"{__doc__}\nThe steps are {', '.join(STEPS)}.")
    if common.place() != common.GPU:
        sys.exit("measure_all.py: needs a Hopper GPU")
    main(Path(sys.argv[1]), sys.argv[2:])
