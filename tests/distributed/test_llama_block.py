"""A Llama block of our layers on two ranks against one, and the comparison and the table of its benchmark."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import llama_block
from benchmarks.llama_block import Row
from benchmarks.llama_check import Expected, Results, compare
from reference.tolerance import ToleranceError
from tests.distributed.ranks import run_ranks

RANKS = "tests.distributed.llama_ranks:"


def test_scaled_linear():
    run_ranks(RANKS + "fp8", arch="sm_90a")


def test_bsr_linear():
    run_ranks(RANKS + "sparse", arch="sm_90a")


def _rounded(results: Results, shift: float = 1.0) -> Results:
    """Losses are float32 and not rounded: they are wrong by a factor instead."""
    losses = {name: x.float() * shift for name, x in results.items() if name.startswith("loss")}
    return {**{name: x.bfloat16() for name, x in results.items()}, **losses}


def _exact() -> Results:
    torch.manual_seed(0)
    losses = 2 + torch.rand(2, 16, dtype=torch.float64)
    gradient, out = torch.randn(2, 64, 96, dtype=torch.float64)
    return {"out": out, "losses": losses, "loss": losses.mean(), "gradient of mlp.up": gradient}


def test_rounding_is_within_the_rule():
    exact = _exact()
    found, peer = _rounded(exact, 1.001), _rounded(exact, 1.002)
    assert 0 < compare(found, peer, Expected(_rounded(exact), exact), "rounded") <= 1


@pytest.mark.parametrize("name", list(_exact()))
@pytest.mark.parametrize("against", ["float64", "one GPU"])
def test_a_wrong_result_is_named(name, against):
    exact = _exact()
    found, one, peer = (_rounded(exact, shift) for shift in (1.0, 1.0, 1.002))
    for wrong in (found, one) if against == "float64" else (one,):
        wrong[name] = wrong[name] * 1.03
    with pytest.raises(ToleranceError, match=f"planted: {name}, against {against}"):
        compare(found, peer, Expected(one, exact), "planted")


def _rows() -> list[Row]:
    forms = (("one", 1.0), ("tp", 0.5), ("fsdp", 0.8))
    speed = (("torch", 40.0), ("fp8", 32.0), ("sparse", 20.0))
    return [Row(kind, form, 8192, ms * part, 1.0, 99.0, 3) for form, part in forms for kind, ms in speed]


def test_table_has_both_ratios():
    lines = llama_block.table(_rows())
    (line,) = (x for x in lines if x.startswith("fp8      tp"))
    assert line.split()[:5] == ["fp8", "tp", "512,000", "1.25x", "2.00x"]


def test_results_are_kept(tmp_path):
    path = tmp_path / "new" / "llama.json"
    llama_block.write(path, {"gpu": "none"}, {"fp8, tp": 0.5}, _rows())
    kept = json.loads(path.read_text())
    assert kept["suite"] == "llama_block" and kept["checked"] == {"fp8, tp": 0.5}
    assert len(kept["rows"]) == len(llama_block.CONTENDERS)
    assert kept["rows"][0]["tokens_per_s"] == 8192 / 40 * 1e3
