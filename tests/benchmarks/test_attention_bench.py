"""The attention benchmark: our calls in the emulator, its arithmetic, its tables."""

from __future__ import annotations

import json

import pytest

from benchmarks import attention, attention_calls, attention_sparse, render
from benchmarks.attention_calls import Shape
from benchmarks.harness import OURS
from lowering import emulator
from reference.attention import Masking
from reference.tolerance import ToleranceError


@pytest.fixture
def on_cpu(monkeypatch):
    for module in (attention, attention_calls, attention_sparse):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    with emulator.run(arch="sm_90a"):
        yield


@pytest.mark.parametrize("causal", [False, True])
def test_a_dense_case_checks_itself(on_cpu, causal):
    case = attention.dense_case(Shape(1, 2, 130, 64), causal)
    assert sorted(case.calls) == ["cudnn", "fa2", "fa3", "fa4", OURS]
    assert case.flops == 4 * 2 * 64 * 130 * 130 / (2 if causal else 1)
    case.verify()


def test_a_wrong_result_is_refused(on_cpu):
    q, k, v = attention_calls.tensors(Shape(1, 2, 130, 64))
    call = attention_calls.ours(q, k, v)
    attention_calls.verifier(call, q, k, v, Masking())()
    with pytest.raises(ToleranceError):
        attention_calls.verifier(call, q, k, v, Masking(right=0))()


def test_random_lists_check_themselves(on_cpu, monkeypatch):
    monkeypatch.setattr(attention_sparse, "HEADS", 1)
    case = attention_sparse._lists_case("lists", 256, 1, ("fa4",))
    assert case.flops == 4 * 128 * 256 * 128
    case.verify()


def test_pairs_of_a_window():
    for length, width in ((7, 3), (7, 7), (3, 7), (1, 1)):
        expected = sum(min(i + 1, width) for i in range(length))
        assert attention_calls.window_pairs(length, width) == expected


def test_the_shapes_are_those_promised():
    assert len(set(attention.SHAPES)) == 10 and len(set(attention.SMALL)) == 5
    assert attention_sparse.LENGTHS[-1] == 524288
    assert min(attention.PACKED_LENGTHS) == 500 and max(attention.PACKED_LENGTHS) == 8192


def test_attention_has_a_page_of_its_own(tmp_path):
    results, page = tmp_path / "results", tmp_path / "results" / "h200" / "attention.md"
    header = {"gpu": "NVIDIA H200", "sms": 132, "l2_mib": 60, "cuda": "13", "python": "3", "versions": {}}
    rows = [{"name": "fp16, D 64", "ours_rms": 0.1234567, "fa4_rms": None, "lists_mib": 0.0}]
    (results / "h200").mkdir(parents=True)
    stored = {"suite": "attention_error", "header": {**header, "commit": "abc"}, "rows": rows}
    (results / "h200" / "attention_error.json").write_text(json.dumps(stored))
    render.render(results, tmp_path / "docs")
    assert page.read_text().startswith("# Results: attention, h200\n")
    assert "| fp16, D 64 | 0.123 | – | 0.00 |" in page.read_text()
