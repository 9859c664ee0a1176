"""Products of block rows that share tiles, through the real kernels in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.config import bsr_together
from kernels_dsl.config.bsr import MatchRule, Sm90BsrConfig
from kernels_dsl.config.gemm import Schedule
from kernels_dsl.ops.bsr import plan
from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.sparse.tensor import BsrTensor
from lowering import emulator
from reference.inputs import integers
from tests.ops.bsr import bsr_cases
from tests.ops.bsr.bsr_cases import Case


def wide(rows: int, k: int, **changes) -> Sm90BsrConfig:
    """Tiles of 64 x 512 in pairs, for so many rows together of blocks with `k` elements along K."""
    unit_k = min(k, 32)
    config = Sm90BsrConfig(64, 512, True, unit_k, 32 // unit_k, cluster_x=2, pairs=True, rows_together=rows)
    return replace(config, **changes)


@pytest.fixture(autouse=True)
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that share anything are pairs."""
    monkeypatch.setattr("kernels_dsl.sparse.lists.RULE", MatchRule(cost=0))


HALF = {"tile_x": 256, "units": 4, "schedule": Schedule.PINGPONG, "pairs": False}
CASES = [
    (Case("uniform", (8, 5), (16, 16), 520, kept=3), wide(4, 16)),
    (Case("power_law", (9, 6), (16, 16), 576, kept=3), wide(4, 16, deep_boxes=True)),  # a ragged group
    (Case("empty_rows", (10, 4), (16, 16), 264, form="at b"), wide(4, 16, pairs=False)),
    (Case("full", (3, 3), (32, 32), 520, form="b at", columns_contiguous=True), wide(2, 32)),
    (
        Case("uniform", (4, 5), (32, 32), 640, form="b a", columns_contiguous=True),
        wide(2, 32, deep_boxes=True),
    ),
    (Case("power_law", (6, 4), (16, 32), 264, batch=(True, True)), wide(4, 32)),
    (Case("one_heavy_row", (7, 5), (16, 16), 264, sorted_columns=False), wide(4, 16, **HALF)),
    (Case("uniform", (1, 3), (16, 16), 200, index_dtype=torch.int64, pad=3), wide(4, 16)),  # one row
    (
        Case("uniform", (5, 3), (16, 80), 264, out_dtype=torch.float32),
        wide(4, 32, pairs=False),
    ),  # three loads
]


@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda x: str(x) if isinstance(x, Case) else "")
def test_integers_match_bit_for_bit(case: Case, config: Sm90BsrConfig) -> None:
    """Rows of the dense matrix that meet no kept block are NaN, and so is D before the call."""
    with emulator.run(arch="sm_90a", seed=3) as session:
        bsr_cases.run(case, "cpu", config=config)
    assert not session.reports


def test_an_epilogue_reads_its_operands() -> None:
    matrix = BsrTensor.top_k(integers((80, 64), torch.bfloat16, seed=1), (16, 16), 2)
    b, c = integers((64, 264), torch.bfloat16, seed=2), integers((80, 264), torch.bfloat16, seed=3)
    bias = integers((80,), torch.bfloat16, seed=4)
    options = {"c": c, "beta": 2.0, "bias": bias, "bias_axis": "m", "out_dtype": torch.float32}
    with emulator.run(arch="sm_90a"):
        found = bsr_gemm(matrix, b, config=wide(4, 16), **options)
        with pytest.raises(ValueError, match="must have rows_together 1 with out and an epilogue"):
            bsr_gemm(matrix, b, config=wide(4, 16), out=torch.empty(80, 264), **options)
    expected = matrix.to_dense().double() @ b.double() + 2.0 * c.double() + bias.double()[:, None]
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("deep", [False, True])
def test_what_is_not_finite_stays_where_it_belongs(deep: bool) -> None:
    """Rows share a tile with others that keep a column of inf and NaN, and do not see it; then all is finite
    again, and the word that said so is cleared."""
    mask = torch.zeros(6, 4, dtype=torch.bool)
    mask[0, 1] = mask[1, 0] = mask[1, 1] = mask[2, 2] = mask[5, 3] = True
    matrix = BsrTensor.from_dense(integers((96, 64), torch.bfloat16, seed=1), mask, (16, 16))
    b = integers((64, 576), torch.bfloat16, seed=2)
    wrong = b.clone()
    wrong[3, 5], wrong[40, 70], wrong[60, 570] = float("inf"), float("nan"), float("-inf")
    with emulator.run(arch="sm_90a") as session:
        config = wide(4, 16, deep_boxes=deep)
        found, again = (bsr_gemm(matrix, x, config=config, out_dtype=torch.float32) for x in (wrong, b))
        alone = bsr_gemm(matrix, wrong, family="sm90", out_dtype=torch.float32)
    assert not session.reports
    assert torch.equal(found.nan_to_num(1e6, 2e6, 3e6), alone.nan_to_num(1e6, 2e6, 3e6))
    assert found[:16].isfinite().all() and found[48:80].isfinite().all()
    assert not found[16:48].isfinite().all() and not found[80:].isfinite().all()
    assert torch.equal(again.double(), matrix.to_dense().double() @ b.double())


def test_large_products_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wish of the caller's, too; not where out may be an operand."""
    taken: list[Sm90BsrConfig | None] = []
    choose = bsr_together.choose_together

    def noted(problem, ctas):
        taken.append(choose(problem, ctas))
        return taken[-1]

    monkeypatch.setattr(bsr_together, "LEAST_ITEMS", 1)
    monkeypatch.setattr(bsr_together, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(plan, "choose_together", noted)
    with emulator.run(arch="sm_90a") as session:
        bsr_cases.run(Case("uniform", (8, 6), (16, 16), 576, kept=3), "cpu")
    assert not session.reports
    (config,) = taken
    assert config is not None and config.rows_together == 4 and config.deep_boxes
    with emulator.run(arch="sm_90a"):
        bsr_cases.run(Case("uniform", (4, 6), (16, 16), 576, kept=2, linear=True), "cpu")
    assert len(taken) == 1


def test_indices_out_of_range_touch_no_other_memory() -> None:
    crow, col = torch.tensor([1, 3, 2, 9], dtype=torch.int32), torch.tensor([5, -1, 2, 1], dtype=torch.int32)
    matrix = BsrTensor(crow, col, integers((4, 16, 16), torch.bfloat16, seed=1), (48, 64))
    with emulator.run(arch="sm_90a") as session:
        bsr_gemm(matrix, integers((64, 64), torch.bfloat16, seed=2), config=wide(4, 16))
    assert not session.reports
