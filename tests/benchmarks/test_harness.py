"""The harness's arithmetic, its files and its tables; on a GPU, a small suite from end to end."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import first_call, gemm, harness, machine, render
from benchmarks.harness import OURS, Case, Row, best_of
from kernels_dsl.measure import Timing, host_us, interleaved

FACTS = {
    "gpu": "NVIDIA H200",
    "sms": 132,
    "l2_mib": 60,
    "cuda": "13.0",
    "python": "3.12.1",
    "versions": {"torch": "2.11.0"},
    "commit": "abc",
    "driver": "580.1",
}


def _timing(ms):
    return Timing(ms, ms * 0.9, ms * 1.1, 20, "events")


def _row(name="8x8x8", flops=2e9, **ms):
    return Row(name, flops, ms, "events", "same inputs each call")


def test_the_best_configuration_of_a_peer_counts():
    timings = {
        "ours": _timing(1.0),
        "quack/a": _timing(3.0),
        "quack/b": _timing(2.0),
        "quack/c": _timing(2.5),
    }
    folded, chosen = best_of(timings)
    assert {name: timing.ms for name, timing in folded.items()} == {"ours": 1.0, "quack": 2.0}
    assert chosen == {"quack": "b"}


def test_rate_and_ratio():
    row = _row(ours=2.0, cublas=1.0, quack=4.0)
    assert row.tflops("ours") == pytest.approx(1.0)
    assert row.ratio("cublas") == 0.5
    assert row.ratio("quack") == 2.0
    assert row.best_peer == "cublas"
    assert _row(ours=1.0).best_peer is None


def test_summary_has_geomean_and_the_worst_row():
    rows = [_row("a", ours=1.0, cublas=2.0), _row("b", ours=2.0, cublas=1.0), _row("c", ours=1.0)]
    assert harness.summary(rows) == ["against cublas: geometric mean x1.000 over 2, worst x0.500 at b"]


def test_summary_against_the_best_peer_of_each_row():
    rows = [_row("a", ours=1.0, cublas=2.0, quack=4.0), _row("b", ours=2.0, cublas=2.0, quack=1.0)]
    assert harness.summary(rows)[-1] == (
        "against the best peer of each row: geometric mean x1.000, worst x0.500 at b"
    )


def test_a_peer_that_raises_is_left_out_and_named(monkeypatch):
    def refuse(_set):
        raise ValueError("no such shape")

    monkeypatch.setattr(harness, "interleaved", lambda calls, **_: {name: _timing(1.0) for name in calls})
    row = harness.run_case(
        Case("x", 1e9, {OURS: lambda _set: None, "quack/a": refuse, "cublas": lambda _set: None})
    )
    assert sorted(row.ms) == ["cublas", OURS]
    assert row.notes == "quack/a: ValueError"
    with pytest.raises(ValueError, match="no such shape"):
        harness.run_case(Case("x", 1e9, {OURS: refuse}))


def test_a_wrong_result_is_not_timed(monkeypatch):
    def wrong():
        raise AssertionError("wrong by far")

    monkeypatch.setattr(harness, "interleaved", lambda calls, **_: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="wrong by far"):
        harness.run_case(Case("x", 1e9, {OURS: lambda _set: None}, verify=wrong))


def test_rows_survive_the_file(tmp_path):
    row = Row("a", 2e9, {"ours": 1.0}, "graph", "l2", {"quack": "b"}, {"ours": (0.9, 1.1)}, "note")
    path = harness.write("gemm_bf16", FACTS, [harness.asdict(row)], tmp_path)
    assert path == tmp_path / "h200" / "gemm_bf16.json"
    facts, rows = harness.read(path)
    assert facts == FACTS
    assert rows == [row]


def test_rendering_replaces_its_own_table_and_nothing_else(tmp_path):
    results, page = tmp_path / "results", tmp_path / "results" / "h200" / "gemm.md"
    rows = [_row("8x8x16", ours=1.0, cublas=0.5)]
    harness.write("gemm_bf16", FACTS, [harness.asdict(row) for row in rows], results)
    harness.write("gemm_bf16_host", FACTS, [{"name": "ours", "host_us": 7.123}], results)
    old = "<!-- table h200 gemm_bf16 -->\nold\n<!-- end h200 gemm_bf16 -->"
    page.write_text(f"# Performance\n\n{old}\n\nafter\n")
    render.render(results, tmp_path / "docs")
    text = page.read_text()
    assert "old" not in text
    assert "\nafter\n" in text
    assert "| 8×8×16 | 1.0000 | 2 | 4 | 0.500 | events |" in text
    assert "| ours | 7.12 |" in text
    assert "NVIDIA H200 (132 SMs, L2 60 MiB), driver 580.1" in text
    render.render(results, tmp_path / "docs")
    assert page.read_text() == text


def test_a_page_asks_for_a_short_table(tmp_path):
    results, page = tmp_path / "benchmarks" / "results", tmp_path / "docs" / "gemm.md"
    rows = [
        _row("8x8x16", ours=1.0, cublas=0.5, quack=1.0, ours_other=1.0),
        _row("9x9x9", ours=1.0, cublas=2.0),
    ]
    harness.write("gemm_bf16", FACTS, [harness.asdict(row) for row in rows], results)
    numbers = [
        {"name": "ours", "host_us": 7.123, "more_us": 1.0},
        {"name": "theirs", "host_us": 8.0, "more_us": 2.0},
    ]
    harness.write("gemm_bf16_host", FACTS, numbers, results)
    page.parent.mkdir()
    markers = (
        "<!-- short h200 gemm_bf16 columns=cublas rows=^8 -->\nold\n<!-- end h200 gemm_bf16 -->\n"
        "\nbetween\n\n"
        "<!-- short h200 gemm_bf16_host columns=host_us -->\n<!-- end h200 gemm_bf16_host -->\n"
    )
    page.write_text(markers)
    render.render(results, tmp_path / "docs")
    text = page.read_text()
    assert "old" not in text and "between" in text
    assert "| case | TFLOPS | × cublas |\n|---|---|---|\n| 8×8×16 | 2 | 0.500 |\n\n" in text
    assert "- against cublas: geometric mean x1.000 over 2, worst x0.500 at 8x8x16" in text
    assert "| | host us |\n|---|---|\n| ours | 7.12 |\n| theirs | 8.00 |" in text
    assert "[All 2 rows](../benchmarks/results/h200/gemm.md#h200-gemm_bf16)" in text
    render.render(results, tmp_path / "docs")
    assert page.read_text() == text


def test_committed_pages_and_plots_are_those_of_the_committed_results(tmp_path):
    """`python -m benchmarks.render` would change nothing: no table, no plot."""
    root = harness.RESULTS.parents[1]
    results = tmp_path / "benchmarks" / "results"
    shutil.copytree(root / "docs", tmp_path / "docs")
    shutil.copytree(harness.RESULTS, results)
    for plot in (tmp_path / "docs" / "plots").iterdir():
        plot.unlink()
    assert render.render(results, tmp_path / "docs")
    render.render(results, tmp_path / "docs")  # a page shows a plot where there is one: now there are all
    pages = [*root.glob("docs/*.md"), *root.glob("benchmarks/results/*/*.md")]
    plots = [*root.glob("docs/plots/*.svg")]
    assert len(pages) > 20 and len(plots) > 20
    for page in [*pages, *plots]:
        assert (tmp_path / page.relative_to(root)).read_text() == page.read_text(), page.name
    assert len(plots) == len(list((tmp_path / "docs" / "plots").iterdir()))
    assert "| cuBLASLt |" in (root / "docs" / "performance.md").read_text()


def test_folder_names():
    assert machine.slug("NVIDIA H200") == "h200"
    assert machine.slug("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090"


def test_commit_comes_from_the_environment_first(monkeypatch):
    monkeypatch.setenv("KERNELS_DSL_COMMIT", "fedcba")
    assert machine.commit() == "fedcba"


def test_the_suites_hold_the_shapes_they_promise():
    assert len(gemm.SHAPES) == 6
    assert len(set(gemm.RAGGED)) >= 20
    for shape in ((1000, 2056, 4104), (4095, 4097, 511), (17, 8192, 8192)):
        assert shape in gemm.RAGGED


def test_cold_sets_cover_twice_the_l2():
    assert gemm.sets_for_cold_l2((8192, 8192, 8192), 2, 60 << 20) == 2
    assert gemm.sets_for_cold_l2((1024, 1024, 1024), 2, 60 << 20) == 21
    assert gemm.sets_for_cold_l2((16, 16, 16), 2, 60 << 20) == 64


@pytest.mark.parametrize("arguments", [["--peers", "magic"], ["--rounds", "0"], ["--suite", "none"]])
def test_wrong_arguments_exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        gemm.main(arguments)
    assert stopped.value.code == 2


def test_a_first_use_that_fails_shows_its_processes_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"the first use of nonsuch failed:[^$]*nonsuch"):
        first_call.in_turns(["nonsuch"], tmp_path)


def test_a_first_call_that_fails_shows_the_childs_error(tmp_path, monkeypatch):
    monkeypatch.setattr(first_call, "_CHILD", "raise SystemExit('the child says why')")
    with pytest.raises(RuntimeError, match="the child says why"):
        first_call.child("bf16", str(tmp_path))


@pytest.mark.gpu
def test_interleaved_sees_a_difference():
    import torch

    small, large = (torch.randn(size, size, device="cuda") for size in (256, 4096))
    timings = interleaved(
        {"small": lambda _set: small @ small, "large": lambda _set: large @ large}, rounds=5
    )
    assert timings["large"].ms > 5 * timings["small"].ms
    assert timings["small"].method == timings["large"].method == "graph"
    assert 0.5 < host_us(lambda: torch.add(small, small)) < 500


@pytest.mark.gpu
def test_a_small_suite_runs(tmp_path):
    cases = gemm.cases([(256, 128, 64), (100, 104, 72)], "bf16", ["cublas"])
    rows = harness.run_suite("tiny", cases, rounds=3, results=tmp_path, echo=lambda text: None)
    assert [sorted(row.ms) for row in rows] == [["cublas", "ours"]] * 2
    (path,) = tmp_path.glob("*/tiny.json")
    assert json.loads(path.read_text())["header"]["gpu"]
