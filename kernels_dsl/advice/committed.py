"""Advice from results that are part of the source checkout, for machines without a GPU: of the shapes that
were measured, on the GPU that they were measured on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kernels_dsl.advice.records import Advice, Choice, Crossover, Question, block_text

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
_DENSE = ("gemm_bf16.json", "gemm_bf16_ragged.json")
_SQUARE = 8192
"""Rows, columns and K of the products with block-sparse matrices."""
_OF_BLOCKS = re.compile(r"(\d+)x(\d+), (\d+) of (\d+)")
_SCALES = {"tensor": "tensor", "row": "row", "1x128, 128x128": "block"}


class _Run(NamedTuple):
    """The rows of a file by name, and their commit and GPU."""

    rows: dict[str, dict[str, Any]]
    commit: str
    gpu: str


def _run(name: str, folder: Path) -> _Run | None:
    try:
        data = json.loads((folder / name).read_text())
        rows = {row["name"].replace("×", "x"): row for row in data["rows"]}
        return _Run(rows, data["header"]["commit"], data["header"]["gpu"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _dense(question: Question, folder: Path) -> Iterator[tuple[Choice, _Run]]:
    """Dense products in bf16 of this shape, ours and cuBLAS's."""
    for name in _DENSE:
        run = _run(name, folder)
        row = run.rows.get(question.shape) if run else None
        if run and row:
            ours = row["ms"]["ours"]
            yield Choice("gemm(a, w.t())", "dense", ours, ours), run
            yield Choice("torch.mm(a, w.t())", "dense", row["ms"]["cublas"], ours), run
            return


def _scaled(question: Question, dense_ms: float, folder: Path) -> Iterator[tuple[Choice, _Run]]:
    run = _run("fp8_gemm.json", folder)
    for name, row in run.rows.items() if run else ():
        shape, _, words = name.partition(", ")
        scales = words.removesuffix(", fast")
        if run and shape == question.shape and scales in _SCALES:
            fast = ", use_fast_accum=True" * words.endswith(", fast")
            call = f"scaled_gemm, scales by {_SCALES[scales]}{fast}"
            yield Choice(call, "fp8 dense", row["ms"]["ours"], dense_ms), run


def _sparse(question: Question, folder: Path) -> Iterator[tuple[Choice, _Run]]:
    """Block-sparse products at the question's density, each beside the dense one of its own run."""
    run = _run("bsr_density.json", folder)
    for name, row in run.rows.items() if run else ():
        if run and name.endswith("%") and float(name[:-1]) / 100 == question.density:
            for block in question.blocks:
                if block[0] == block[1] and f"{block[0]}_ms" in row:
                    call = f"bsr_gemm(w, b), blocks of {block_text(block)}, {name} kept"
                    yield Choice(call, "sparse", row[f"{block[0]}_ms"], row["dense_ms"]), run
    run = _run("bsr_fp8.json", folder)
    for name, row in run.rows.items() if run else ():
        if run and (found := _OF_BLOCKS.fullmatch(name)):
            rows, columns, kept, total = map(int, found.groups())
            if (rows, columns) in question.blocks and kept / total == question.density:
                call = f"bsr_scaled_gemm(w, b), blocks of {rows}x{columns}, {kept} of {total} a row kept"
                yield Choice(call, "fp8 sparse", row["ms"]["ours"], row["ms"]["dense"]), run


def _crossovers(question: Question, folder: Path) -> Iterator[Crossover]:
    run = _run("bsr_density.json", folder)
    row = run.rows.get("crossover") if run else None
    for block in question.blocks if row else ():
        per_cent = row.get(f"{block[0]}_ms") if row and block[0] == block[1] else None
        if per_cent is not None:
            yield Crossover(block, per_cent / 100)


def from_results(question: Question, folder: Path = FOLDER) -> Advice | None:
    """The advice that the committed results give; None where they have none of this shape or dtype."""
    if question.dtype != "bf16":
        return None
    found = list(_dense(question, folder))
    if found:
        found += list(_scaled(question, found[0][0].ms, folder))
    crossovers: tuple[Crossover, ...] = ()
    refused = []
    if (question.m, question.n, question.k) == (_SQUARE,) * 3:
        found += list(_sparse(question, folder))
        crossovers = tuple(_crossovers(question, folder))
    if not found:
        return None
    has = {
        block
        for block in question.blocks
        if any(f"blocks of {block_text(block)}," in c.call for c, _ in found)
    }
    if question.density is not None:
        refused = [
            f"blocks of {block_text(block)}: the results have none at {question.density:.4g} of this shape"
            for block in question.blocks
            if block not in has
        ]
    commits = ", ".join(sorted({run.commit for _, run in found}))
    source = (
        f"no GPU here: figures of one {found[0][1].gpu} from commit {commits}, of runs apart; fp8 times are "
        "without quantize(a)"
    )
    choices = sorted((choice for choice, _ in found), key=lambda choice: -choice.speedup)
    return Advice(question, source, False, tuple(choices), crossovers, tuple(refused))
