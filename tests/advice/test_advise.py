"""Advice: by a modelled timer on recorded calls, from the committed results, and kept on disk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import kernels_dsl
from kernels_dsl.advice import advise as module
from kernels_dsl.advice import calls, committed
from kernels_dsl.advice.records import Crossover, Question, answer, crossing
from kernels_dsl.cli.main import main
from lowering import cache, recording

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the answer is measured")
DENSE_MS, QUANTIZE_MS, FP8_MS = 2.0, 0.125, {"tensor": 1.0, "row": 1.25, "block": 1.5}
SLOPE = {"16x16": 16.0, "64x64": 1.0}
"""Milliseconds of a block-sparse product with all blocks; of others that many times the density."""


def modelled(timed):
    """Runs each call once, and gives it a time by its name."""
    ms = {}
    for name, call in timed.items():
        call(0)
        if name.startswith("bsr_gemm"):
            block, density = name.split("blocks of ")[1].removesuffix(" kept").split(", ")
            ms[name] = SLOPE[block] * float(density)
        elif name.startswith("bsr_scaled_gemm"):
            ms[name] = 0.25 if "64x64" in name else 8.0
        elif name.startswith("scaled_gemm"):
            ms[name] = FP8_MS[name.split("scales by ")[1].split(",")[0]]
        else:
            ms[name] = {calls.OURS: DENSE_MS, calls.TORCH: DENSE_MS + 1}.get(name, QUANTIZE_MS)
    return ms


def _question(density=0.25, blocks=((16, 16), (64, 64)), m=64):
    return Question(m, 128, 256, "bf16", density, blocks)


def _measured(question, arch="sm_90a"):
    with recording.record(arch) as launches:
        found = module.measured(question, "modelled", modelled, device="cpu")
    return found, Counter(launch.function.name for launch in launches)


@pytest.fixture(scope="module")
def hopper():
    """The advice of modelled times on Hopper, and the launches."""
    return _measured(_question())


def test_choices_are_sorted_and_have_their_times(hopper):
    found, launches = hopper
    assert [(choice.kind, choice.ms, choice.before_ms) for choice in found.choices] == [
        ("sparse", 0.25, 0.0),
        ("fp8 sparse", 0.25, QUANTIZE_MS),
        ("fp8 dense", 1.0, QUANTIZE_MS),
        ("fp8 dense", 1.25, QUANTIZE_MS),
        ("fp8 dense", 1.5, QUANTIZE_MS),
        ("dense", 2.0, 0.0),
        ("dense", 3.0, 0.0),
        ("sparse", 4.0, 0.0),
        ("fp8 sparse", 8.0, QUANTIZE_MS),
    ]
    assert found.fastest().speedup == DENSE_MS / 0.25
    assert found.measured and not found.refused
    assert launches["gemm_sm90"] >= 3 and any(name.startswith("bsr") for name in launches)
    assert any(name.startswith("quantize") for name in launches)


def test_exact_choices_leave_fp8_out():
    found, _ = _measured(_question(density=None, blocks=()))
    assert found.fastest().kind == "fp8 dense"
    assert found.fastest(exact=True).call == calls.OURS


def test_crossovers_lie_where_the_modelled_lines_cross(hopper):
    found, _ = hopper
    # 16 ms times the density is 2 ms, the faster dense product, at 12.5 %; 1 ms never is.
    assert found.crossover((16, 16)).density == pytest.approx(0.125)
    assert found.crossover([64, 64]) == Crossover((64, 64), None)
    assert found.crossover((32, 32)) is None
    text = str(found)
    assert "16x16 from 12.5% on" in text and "64x64 at no density" in text and "25% of w's blocks" in text


def test_a_crossover_below_the_lowest_density_says_so():
    found = crossing((16, 16), [0.05, 0.1], [3.0, 6.0], [2.0, 2.0])
    assert found == Crossover((16, 16), 0.05, at_most=True) and "at most 5.0%" in str(found)


def test_without_a_density_sparse_calls_are_no_choice():
    found, _ = _measured(_question(density=None, blocks=((64, 64),)))
    assert {choice.kind for choice in found.choices} == {"dense", "fp8 dense"}
    assert found.crossover((64, 64)) is not None


def test_refusals_have_reasons():
    found, _ = _measured(_question(blocks=((48, 16),)), arch="sm_80")
    assert {choice.kind for choice in found.choices} == {"dense"}
    reasons = "\n".join(found.refused)
    assert "blocks of 48x16: they do not divide w, which is (128, 256)" in reasons
    assert all(f"fp8 with scales by {name}: " in reasons for name in FP8_MS) and "8.9" in reasons


def test_an_answer_survives_its_file(hopper):
    found, _ = hopper
    data = json.loads(json.dumps(found.to_json()))
    assert answer(found.question, found.source, data) == found
    with pytest.raises((KeyError, TypeError, ValueError)):
        answer(found.question, found.source, {**data, "choices": [{"ms": 1.0}]})


@pytest.fixture
def kept(monkeypatch, tmp_path, hopper):
    """A GPU that is not there, whose measurements are counted; a cache folder of its own."""
    count = []
    monkeypatch.setattr(module, "_place", lambda: "GPU A, driver 1")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "measured", lambda *_: count.append(1) or hopper[0])
    with cache.use(tmp_path):
        yield count


def test_an_answer_is_measured_once(kept, monkeypatch, tmp_path):
    arguments = {"density": 0.25, "blocks": ((16, 16), (64, 64))}
    first, second = (kernels_dsl.advise(64, 128, 256, **arguments) for _ in range(2))
    assert len(kept) == 1 and second.choices == first.choices and "kept in" in second.source
    kernels_dsl.advise(64, 128, 256, again=True, **arguments)
    kernels_dsl.advise(64, 128, 272, **arguments)
    monkeypatch.setattr(module, "_place", lambda: "GPU A, driver 2")
    kernels_dsl.advise(64, 128, 256, **arguments)
    assert len(kept) == 4
    record = module.RecordFile(tmp_path / "advice.json")
    record.put(
        "GPU A, driver 2/" + Question(64, 128, 256, "bf16", 0.25, ((16, 16), (64, 64))).key, {"choices": 1}
    )
    kernels_dsl.advise(64, 128, 256, **arguments)
    assert len(kept) == 5


@no_gpu
def test_the_committed_results_answer_for_their_shapes():
    found = kernels_dsl.advise(8192, 8192, 8192, density=0.25)
    assert not found.measured and "H200" in found.source and "no GPU" in found.source
    rows = {
        row["name"]: row for row in json.loads((committed.FOLDER / "bsr_density.json").read_text())["rows"]
    }
    commit = json.loads((committed.FOLDER / "bsr_density.json").read_text())["header"]["commit"]
    assert commit in found.source
    sparse = {choice.call: choice for choice in found.choices if choice.kind == "sparse"}
    small = sparse["bsr_gemm(w, b), blocks of 16x16, 25% kept"]
    assert small.ms == rows["25%"]["16_ms"]
    assert small.speedup == pytest.approx(rows["25%"]["dense_ms"] / rows["25%"]["16_ms"])
    assert found.crossover((16, 16)).density == pytest.approx(rows["crossover"]["16_ms"] / 100)
    speeds = [choice.speedup for choice in found.choices]
    assert speeds == sorted(speeds, reverse=True) and len(sparse) == 4
    with_fp8 = kernels_dsl.advise(64, 8192, 8192)
    assert with_fp8.fastest().kind == "fp8 dense" and not with_fp8.crossovers


@no_gpu
def test_other_shapes_need_a_gpu(capsys, tmp_path):
    with pytest.raises(LookupError, match="advise needs a GPU for a @ w"):
        kernels_dsl.advise(100, 200, 300)
    assert committed.from_results(_question(), tmp_path) is None
    assert main(["advise", "--shape", "100x200x300"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
    found = kernels_dsl.advise(8192, 8192, 8192, density=0.22, blocks=((64, 64),))
    assert any("none at 0.22" in reason for reason in found.refused)


@no_gpu
def test_the_command_prints_it(capsys):
    assert main(["advise", "--shape", "8192x8192x8192", "--density", "0.25", "--block", "16x16"]) == 0
    text = capsys.readouterr().out
    assert "blocks of 16x16, 25% kept" in text and "64x64" not in text and "from 39.8% on" in text
    assert main(["advise", "--shape", "2048x2048x2048", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["measured"] is False


@pytest.mark.parametrize("shape", ["64x64", "64x64x0.5", "x64x64", "64x64x64x64"])
def test_a_wrong_shape_exits_with_two(shape, capsys):
    assert main(["advise", "--shape", shape]) == 2
    assert f"--shape is '{shape}', must be MxNxK" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"m": 0}, "m is 0, must be at least 1"),
        ({"k": 1.5}, "k is 1.5, must be an int"),
        ({"density": 0.0}, "density is 0.0, must be greater than 0"),
        ({"density": 1.5}, "density is 1.5, must be above 0 and at most 1"),
        ({"blocks": [(16, 24)]}, r"blocks\[0\] is \(16, 24\), must be two multiples of 16 up to 512"),
        ({"blocks": "16x16"}, "blocks is '16x16', must be list"),
        ({"dtype": torch.float32}, "dtype is torch.float32, must be torch.bfloat16 or torch.float16"),
        ({"again": 1}, "again is 1, must be True or False"),
    ],
)
def test_arguments_are_checked(arguments, text):
    with pytest.raises((TypeError, ValueError), match=text):
        kernels_dsl.advise(**{"m": 64, "n": 64, "k": 64, **arguments})


@pytest.mark.gpu
def test_it_measures_on_a_gpu(tmp_path: Path):
    with cache.use(tmp_path):
        found = kernels_dsl.advise(2048, 2048, 2048, density=0.1, blocks=((64, 64),))
        assert found.measured and all(choice.ms > 0 for choice in found.choices)
        assert kernels_dsl.advise(2048, 2048, 2048, density=0.1, blocks=((64, 64),)).choices == found.choices
