"""Finds the accumulation model that reproduces a GPU's matrix products bit for bit.

`python -m lowering.emulator.crosscheck.calibrate DIR` takes results that `--record DIR` kept and prints, for
each instruction and type, how many of the random results each candidate of `tensor_core.Accumulation`
matches.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

from ..semantics import tensor_core
from ..semantics.tensor_core import Accumulation
from . import cases, record, runner

GROUPS = (4, 8, 16, 32)
BITS = ((13, 13), (13, 23), (14, 13), (14, 23), (23, 23), (24, 23), (25, 23), (26, 23))


def candidates() -> list[Accumulation | None]:
    """The models that are tried; None is *nearest*."""
    return [None, *(Accumulation(g, *bits) for g, bits in itertools.product(GROUPS, BITS))]


def matrix_instruction(case: cases.Case) -> tuple[str, str] | None:
    """("wgmma" or "mma", type of A) of a case with f32 accumulators; None for other cases."""
    if case.name.startswith("wgmma") and case.constants["case"].kinds[2] == "f32":
        return "wgmma", case.constants["case"].kinds[0]
    if case.name.startswith("mma") and ".col.f32" in case.name:
        return "mma", case.name.split(".col.f32.")[1].split(".")[0]
    return None


def matches(case: cases.Case, key: tuple[str, str], model: Accumulation | None, theirs: np.ndarray) -> float:
    """Fraction of the case's random results that are equal with `model`."""
    before = tensor_core.ACCUMULATION.pop(key, None)
    try:
        if model is not None:
            tensor_core.ACCUMULATION[key] = model
        ours = runner.run_case(case, "cpu")
    finally:
        tensor_core.ACCUMULATION.pop(key, None)
        if before is not None:
            tensor_core.ACCUMULATION[key] = before
    part = next(part for name, _, part in case.rows if name.endswith("random"))
    return float(np.mean(ours[part] == theirs[part]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lowering.emulator.crosscheck.calibrate", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where the GPU's results were recorded")
    options = parser.parse_args(argv)
    results = record.recorded(options.folder)
    for case in cases.all_cases():
        key = matrix_instruction(case)
        if key is None or not any(name.endswith("random") for name, _, _ in case.rows):
            continue
        try:
            theirs = results(case)
        except KeyError:
            continue
        scores = [(matches(case, key, model, theirs), model) for model in candidates()]
        best = sorted(scores, key=lambda s: -s[0])[:3]
        print(case.name, "nearest", f"{scores[0][0]:.4f}", *(f"{m}: {s:.4f}" for s, m in best), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
