"""Cases of the block-sparse products of fp8 factors and how one is run and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels_dsl.ops.bsr.scaled import bsr_scaled_gemm
from kernels_dsl.sparse.tensor import BsrTensor
from reference import buffers, inputs, tolerance
from reference.bsr import Bsr, random_bsr, to_dense

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Case:
    """One product. `x`: extent of the dense mode. `rows`: the dense factor has a scale a row or column.

    `k_contiguous`: of the dense factor; `pad` elements lie behind its rows. `exact`: small integers and
    scales that are powers of two, compared bit for bit; else normal values, by the tolerance rule.
    """

    pattern: str
    grid: tuple[int, int]
    block: tuple[int, int]
    x: int
    form: str = "a b"
    kept: int = 2
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    out_dtype: torch.dtype = torch.bfloat16
    batch: tuple[bool, bool] = (False, False)
    rows: bool = False
    linear: bool = False
    k_contiguous: bool = True
    pad: int = 0
    exact: bool = True

    def __str__(self) -> str:
        kinds = "-".join(str(x).split("_")[-1] for x in (*self.dtypes, self.out_dtype)).replace("torch.", "")
        flags = f"{'b'.join(map(str, map(int, self.batch)))}r{int(self.rows)}l{int(self.linear)}p{self.pad}"
        size = f"{self.grid}x{self.block}x{self.x}k{self.kept}".replace(" ", "")
        return f"{self.pattern}-{size}-{self.form}-{kinds}-{flags}k{int(self.k_contiguous)}e{int(self.exact)}"

    @property
    def left(self) -> bool:
        """The dense factor is the left one."""
        return self.form.startswith("b")

    @property
    def block_k(self) -> int:
        """A block's extent along the summed mode."""
        return self.block[0 if self.transposed != self.left else 1]

    @property
    def transposed(self) -> bool:
        """The sparse factor is used transposed."""
        return self.form.endswith("t") or self.form.startswith("at")


def _scales(shape: tuple[int, ...], seed: int, exact: bool, device: str) -> torch.Tensor:
    if exact:
        return torch.exp2(inputs.integers(shape, torch.float32, seed=seed, limit=2, zeros=0.2)).to(device)
    return inputs.normal(shape, torch.float32, seed=seed, device=device).abs() + 0.25


def _dense(case: Case, panel: torch.Tensor) -> torch.Tensor:
    """panel (.., x, K) between NaNs, in the orientation of the case; K contiguous or not."""
    contiguous = -1 if case.k_contiguous else -2
    pad = case.pad + (-panel.shape[contiguous] % 16 if case.k_contiguous else 0)
    return buffers.embed(panel, contiguous=contiguous, pad=pad)


def run(case: Case, device: str, **forced: Any) -> None:
    """Run a case and check all of D: its values, that all of it is written and nothing else.

    What of the dense factor meets no kept block is NaN.
    """
    seed = inputs.case_seed(str(case))
    matrix = random_bsr(
        case.pattern, case.grid, case.block, case.kept, dtype=torch.float32, seed=seed, exact=case.exact,
        sorted_columns=True, index_dtype=torch.int32, device=device,
    )  # fmt: skip
    values = matrix.values.to(case.dtypes[0])
    values = torch.stack([values, (-values.float()).to(values.dtype)]) if case.batch[0] else values
    scales = _scales((*values.shape[:-2], 1, 1), seed + 1, case.exact, device)
    whole = Bsr(matrix.crow, matrix.col, values.double() * scales.double(), matrix.shape)
    weights = to_dense(whole).mT if case.transposed else to_dense(whole)
    weights = weights if case.left else weights.mT  # (.., K, blocked): panel @ weights
    lead = (2,) if case.batch[1] else ()
    make = inputs.integers if case.exact else inputs.normal
    panel = make((*lead, case.x, weights.shape[-2]), torch.float32, seed=seed + 2, device=device)
    panel = panel.to(case.dtypes[1])
    other = _scales((*lead, case.x, 1) if case.rows else (), seed + 3, case.exact, device)
    wide = panel.double() * other.double()
    expected = wide @ weights
    peer = (wide.float() @ weights.float()).to(case.out_dtype)
    unread = (weights if weights.dim() == 2 else weights[0]).abs().sum(-1) == 0
    poisoned = panel.float().masked_fill(_met_by_none(matrix, case, unread), float("nan")).to(panel.dtype)
    dense = _dense(case, poisoned)
    if not case.left:
        dense, other, expected, peer = dense.mT, other.mT if case.rows else other, expected.mT, peer.mT
    options: dict[str, Any] = {}
    if case.linear:
        n = expected.shape[-1]
        options = {"bias": make((n,), case.out_dtype, seed=seed + 4, device=device), "activation": "relu"}
        expected = torch.relu(expected + options["bias"].double())
        peer = torch.relu(peer + options["bias"])
    out = buffers.poisoned(tuple(expected.shape), case.out_dtype, device=device)
    sparse = BsrTensor(matrix.crow, matrix.col, values, matrix.shape)
    sparse = sparse.t() if case.transposed else sparse
    factors = (dense, sparse, other, scales) if case.left else (sparse, dense, scales, other)
    bsr_scaled_gemm(*factors, out=out.tensor, **options, **forced)
    if device == "cuda":
        torch.cuda.synchronize()
    buffers.check_output(out)
    if case.exact:
        tolerance.check_exact(out.tensor, expected, case=str(case))
    else:
        tolerance.check(out.tensor, expected, peer, case=str(case))


def _met_by_none(matrix: Bsr, case: Case, like: torch.Tensor) -> torch.Tensor:
    """bool (K,): the elements of K that no kept block meets."""
    met = torch.zeros_like(like)
    crow, col = matrix.crow.tolist(), matrix.col.tolist()
    rows, columns = matrix.values.shape[-2:]
    along_rows = case.transposed != case.left  # K runs along the stored matrix' rows
    for row in range(len(crow) - 1):
        for entry in range(crow[row], crow[row + 1]):
            at, step = (row, rows) if along_rows else (col[entry], columns)
            met[at * step : (at + 1) * step] = True
    return ~met


CASES = [
    Case("uniform", (3, 4), (64, 64), 40, rows=True),  # ping-pong
    Case("power_law", (3, 4), (128, 128), 24, form="b at", dtypes=(E5M2, E4M3), rows=True, linear=True),
    Case("uniform", (3, 4), (16, 16), 40, dtypes=(E4M3, E5M2), out_dtype=torch.float32),
    Case("empty_rows", (3, 4), (48, 80), 21, form="b at", rows=True, pad=16),
    Case("uniform", (3, 4), (32, 32), 40, form="at b", k_contiguous=False),  # both factors are copied
    Case("uniform", (2, 3), (64, 32), 40, form="b a", out_dtype=torch.float16),
    Case("none", (2, 3), (64, 64), 24, linear=True),
    Case("uniform", (2, 3), (16, 48), 24, batch=(True, True), rows=True),
    Case("uniform", (2, 3), (128, 144), 24, batch=(False, True), pad=3),
    Case("full", (1, 70), (16, 32), 264, kept=70, rows=True),  # four blocks a stage, two in the last
    Case("full", (1, 70), (64, 16), 24, kept=70),  # more blocks in a list than lanes
    Case("uniform", (3, 4), (64, 64), 40, rows=True, exact=False),
    Case("uniform", (3, 4), (32, 80), 40, form="b at", rows=True, exact=False, dtypes=(E5M2, E4M3)),
]
