"""The decoding benchmark: our calls in the emulator, its inputs and its numbers."""

from __future__ import annotations

import pytest
import torch

from benchmarks import decode, decode_calls
from benchmarks.harness import OURS, Row
from lowering import emulator
from reference.tolerance import ToleranceError


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(decode_calls, "DEVICE", "cpu")
    monkeypatch.setattr(decode_calls, "GRAPH_CALLS", 2)
    with emulator.run(arch="sm_90a"):
        yield


def test_a_case_checks_itself(on_cpu):
    problem = decode_calls.Problem("one", (32,), 2, kv_heads=1, room=64)
    case = decode.case_of(problem, None)
    assert set(case.calls) == {OURS, "ours_equal", "ours_exact", "sdpa"} and case.flops == 32 * 128 * 4
    case.verify()
    for name in ("ours_equal", "ours_exact", "sdpa"):
        torch.testing.assert_close(case.calls[name](1), case.calls[OURS](1), rtol=2e-2, atol=2e-2)
    with pytest.raises(ToleranceError):
        decode_calls.check(lambda n: case.calls[OURS](1 - n), problem, decode_calls.inputs(problem))


def test_calls_by_other_names(on_cpu):
    problem = decode_calls.Problem("one", (32,), 2, kv_heads=1)
    sets = decode_calls.inputs(problem)
    wanted = decode_calls.ours(sets)(0)
    assert torch.equal(decode_calls.flash_attn_call(sets[0])(), wanted)
    assert torch.equal(decode_calls.flashinfer_call(sets[0])(), wanted[:, 0])
    decode_calls.check_near(lambda _: wanted, problem, sets)
    with pytest.raises(RuntimeError, match="one: differs by"):
        decode_calls.check_near(lambda _: 1.2 * wanted, problem, sets)


def test_rows():
    rows = list(decode.problems(16))
    assert [row.lengths for row in rows[:2]] == [(8192,) * 64, (131072,)] and rows[0].cache_bytes == 1 << 31
    assert rows[0].sets == 2 and rows[-1].sets == 20 and rows[-1].capacity == 131072
    (mixed,) = (row.lengths for row in rows if len(set(row.lengths)) > 1)
    assert 128 <= min(mixed) and 10000 < max(mixed) <= 32768
    row = Row("1x1024", 1 << 22, {OURS: 0.01, "fa3": 0.02, "ours_exact": 0.005}, "graph", "rotating inputs")
    found = decode.numbers(row, rows[-1])
    assert found["us"] == 10 and found["fa3_us"] == 20 and found["x_best"] == 2 and found["sdpa_us"] is None
    assert "x2.000" in decode.said(found)
    fp8 = {**found, "name": "1×1024, fp8 KV", "us": 8.0, "ours_equal_us": 9.0}
    (beside,) = decode.fp8_rows([found, fp8])
    assert beside["name"] == "1×1024" and beside["x_bf16"] == 1.25 and beside["fp8_equal_us"] == 9
    assert beside["fa3_us"] == 20 and beside["fa3_planned_us"] is None
