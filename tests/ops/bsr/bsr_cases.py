"""Cases of the block-sparse products and how one is run and checked, on a GPU or in the emulator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.ops.tile_counter import counter_and_workspace
from kernels_dsl.sparse.tensor import BsrTensor
from reference import buffers, tolerance
from reference.bsr import PATTERNS, Bsr, matmul, random_bsr, sampled, to_dense
from reference.gemm import activation_function, gemm_same_dtype
from reference.inputs import case_seed, integers, normal

FORMS = ("a b", "at b", "b a", "b at")
"""Sparse on the left, its transpose on the left, and the same on the right."""


@dataclass(frozen=True)
class Case:
    """One product. `x` is the extent of the dense mode; `pad` elements lie behind the dense factor's rows."""

    pattern: str
    grid: tuple[int, int]
    block: tuple[int, int]
    x: int
    form: str = "a b"
    kept: int = 2
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int32
    batch: tuple[bool, bool] = (False, False)
    columns_contiguous: bool = False
    pad: int = 0
    linear: bool = False
    sorted_columns: bool = True
    family: str | None = None

    def __str__(self) -> str:
        kinds = f"{self.dtype}-{self.out_dtype}".replace("torch.", "")
        flags = f"{'b'.join(map(str, map(int, self.batch)))}c{int(self.columns_contiguous)}p{self.pad}"
        size = f"{self.grid}x{self.block}x{self.x}k{self.kept}".replace(" ", "")
        return f"{self.family}-{self.pattern}-{size}-{self.form}-{kinds}-{flags}l{int(self.linear)}"


def _flipped(matrix: Bsr) -> Bsr:
    """The transpose as a matrix of its own, made without the code under test."""
    entries = []
    crow = matrix.crow.tolist()
    for row in range(len(crow) - 1):
        entries += [(int(matrix.col[e]), row, e) for e in range(crow[row], crow[row + 1])]
    entries.sort()
    columns = matrix.shape[1] // matrix.values.shape[-1]
    counts = torch.tensor([sum(entry[0] == c for entry in entries) for c in range(columns)])
    flipped = torch.zeros(columns + 1, dtype=torch.int64)
    flipped[1:] = counts.cumsum(0)
    rows = torch.tensor([entry[1] for entry in entries], dtype=torch.int64)
    values = matrix.values[..., [entry[2] for entry in entries], :, :].mT
    device = matrix.col.device
    return Bsr(flipped.to(device), rows.to(device), values, matrix.shape[::-1])


def sparse_of(matrix: Bsr) -> BsrTensor:
    """The matrix for the code under test."""
    return BsrTensor(matrix.crow, matrix.col, matrix.values, matrix.shape)


def memory_of_pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(counters, workspace) of each launch to come whose lists may come in pieces, the latter of NaN."""
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def poisoned(index: int, elements: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(counter_and_workspace(index, elements, words))
        given[-1][1].fill_(float("nan"))
        return given[-1]

    monkeypatch.setattr("kernels_dsl.ops.bsr.plan.counter_and_workspace", poisoned)
    return given


def check_pieces(given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """There was one such launch, with pieces; the counters are as before."""
    ((counters, workspace),) = given
    assert not counters.any() and not workspace.isnan().all()


def run(case: Case, device: str, *, exact: bool = True, **options: Any) -> None:
    """Run a case and check all of D: its values, that all of it is written and nothing else.

    `options`: of the call. Rows of the dense factor that meet no kept block hold NaN.
    """
    seed = case_seed(str(case))
    matrix = random_bsr(
        case.pattern, case.grid, case.block, case.kept, dtype=case.dtype, seed=seed, exact=exact,
        sorted_columns=case.sorted_columns, index_dtype=case.index_dtype, device=device,
    )  # fmt: skip
    if case.batch[0]:
        matrix = Bsr(matrix.crow, matrix.col, torch.stack([matrix.values, -matrix.values]), matrix.shape)
    left, transposed = case.form.startswith("b"), case.form.endswith("t") or case.form.startswith("at")
    # With S the sparse factor as it is used: S @ dense, or (Sᵀ @ denseᵀ)ᵀ where the dense one is on the left.
    used = _flipped(matrix) if transposed != left else matrix
    make = integers if exact else normal
    lead = (2,) if case.batch[1] else ()
    panel = make((*lead, used.shape[1], case.x), case.dtype, seed=seed + 2, device=device)
    unread = torch.ones(used.shape[1], dtype=torch.bool)
    for column in used.col.tolist():
        unread[column * used.values.shape[-1] : (column + 1) * used.values.shape[-1]] = False
    panel[..., unread.to(device), :] = float("nan")
    expected = matmul(used, panel)
    peer = gemm_same_dtype(to_dense(used).to(case.dtype), panel.nan_to_num(0.0), out_dtype=case.out_dtype)
    if left:
        panel, expected, peer = panel.mT, expected.mT, peer.mT
    dense = buffers.embed(panel, contiguous=-2 if case.columns_contiguous else -1, pad=case.pad)
    if case.linear:
        options |= {
            "alpha": 0.5,
            "bias": make((expected.shape[-1],), case.dtype, seed=seed + 3, device=device),
        }
        options["residual"] = make(tuple(expected.shape), case.dtype, seed=seed + 4, device=device)
        options["activation"] = "relu"
        expected = activation_function("relu")(0.5 * expected + options["bias"].double())
        expected = expected + options["residual"].double()
    out = buffers.poisoned(tuple(expected.shape), case.out_dtype or case.dtype, device=device)
    sparse = sparse_of(matrix)
    sparse = sparse.t() if transposed else sparse
    factors = (dense, sparse) if left else (sparse, dense)
    bsr_gemm(*factors, out=out.tensor, out_dtype=case.out_dtype, family=case.family, **options)
    if device == "cuda":
        torch.cuda.synchronize()
    buffers.check_output(out)
    if exact:
        tolerance.check_exact(out.tensor, expected, case=str(case))
    else:
        tolerance.check(out.tensor, expected, peer, case=str(case))


def run_sampled(case: Case, k: int, device: str) -> None:
    """A sampled product of integers at the case's pattern, exactly; a is (M, k), b is (k, N)."""
    seed = case_seed(str(case))
    matrix = random_bsr(
        case.pattern, case.grid, case.block, case.kept, dtype=case.dtype, seed=seed, device=device
    )
    a = integers((matrix.shape[0], k), case.dtype, seed=seed + 1, device=device)
    b = integers((k, matrix.shape[1]), case.dtype, seed=seed + 2, device=device)
    a, b = (buffers.embed(x, contiguous=-2 if case.columns_contiguous else -1, pad=case.pad) for x in (a, b))
    found = bsr_sddmm(a, b, sparse_of(matrix))
    tolerance.check_exact(found.values, sampled(a, b, matrix), case=str(case))


def generate(number: int, family: str | None) -> Case:
    """Case `number`: everything about it follows from the number."""
    draw = random.Random(number)
    block = (
        draw.choice((16, 32, 48, 64, 96, 112, 128, 256, 512)),
        draw.choice((16, 32, 64, 80, 112, 128, 256)),
    )
    grid = (draw.randint(1, 9), draw.randint(1, 9))
    return Case(
        draw.choice(sorted(PATTERNS)), grid, block, draw.choice((1, 7, 64, 129, 200, 264, 520)),
        form=draw.choice(FORMS), kept=draw.randint(1, grid[1]),
        dtype=draw.choice((torch.bfloat16, torch.float16)),
        out_dtype=draw.choice((None, torch.float32)), index_dtype=draw.choice((torch.int32, torch.int64)),
        batch=draw.choice(((False, False), (True, True), (True, False), (False, True))),
        columns_contiguous=draw.random() < 0.3, pad=draw.choice((0, 0, 1, 8)), linear=draw.random() < 0.4,
        sorted_columns=draw.random() < 0.7, family=family,
    )  # fmt: skip
