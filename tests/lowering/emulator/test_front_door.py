"""Programs that know nothing of the emulator run in it: the command, `emulator.run`, the pytest plugin."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")

import stranger  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_fake_tensor, make_ptr  # noqa: E402

import lowering  # noqa: E402
from lowering import emulator  # noqa: E402
from lowering.emulator import run_script  # noqa: E402
from lowering.emulator.front import memory, progress  # noqa: E402

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[3]
STRANGER = Path(__file__).with_name("stranger.py")
PLUGIN_TEST = """
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

import stranger


def call(plant):
    import cuda.bindings.driver as cuda

    x = torch.randn(4 * stranger.TILE, device="cuda")
    y = torch.zeros_like(x)
    mx, my = (from_dlpack(t, assumed_align=16).mark_layout_dynamic() for t in (x, y))
    stranger.ReverseTiles(plant)(mx, my, 2, cuda.CUstream(0))


@pytest.mark.emulated(arch="sm_80", sms=2)
def test_right():
    call("")


@pytest.mark.emulated(arch="sm_80", sms=2)
def test_wrong():
    call("reuse")
"""


@cute.kernel
def _scale(x: cute.Tensor, y: cute.Tensor):
    i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        y[i] = x[i] * 2.0


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor):
    _scale(x, y).launch(grid=[cute.ceil_div(cute.size(x), 128), 1, 1], block=[128, 1, 1])


@cute.jit
def scale_pointers(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    scale(cute.make_tensor(x, cute.make_layout(n)), cute.make_tensor(y, cute.make_layout(n)))


@cute.kernel
def _last_cta(y: cute.Tensor):
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.atomic_exch(y.iterator, cute.arch.block_idx()[0] + 1)


@cute.jit
def last_cta(y: cute.Tensor):
    _last_cta(y).launch(grid=[8, 1, 1], block=[32, 1, 1])


def _command(arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lowering.emulator", "run", "--arch", "sm_80", *arguments.split()]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def test_the_command_runs_a_strangers_program(tmp_path: Path) -> None:
    record = tmp_path / "found.json"
    done = _command(f"--sms 2 --seeds 2 --json {record} {STRANGER} --tiles 5")
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout
    assert "2 SMs; 2 schedules" in done.stderr
    assert "0 findings" in done.stderr
    found = json.loads(record.read_text())
    assert found["findings"] == []
    assert [launch["grid"] for launch in found["launches"]] == [[2, 1, 1]]


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    record = tmp_path / "found.json"
    arguments = ["run", "--arch", "sm_80", "--sms", "2", "--json", str(record)]
    program = [str(STRANGER), "--plant", "reuse"]
    assert run_script.main([*arguments, *program]) == run_script.FOUND
    assert "RACE" in capsys.readouterr().err
    findings = json.loads(record.read_text())["findings"]
    assert {f["kind"] for f in findings} == {"RACE"}
    assert all(f["severity"] == "error" and "stranger.py:" in f["source"] for f in findings)
    assert run_script.main([*arguments, "--fail-on", "never", *program]) == 1  # the program's own assertion


def test_the_command_says_that_there_is_no_such_file(capsys: pytest.CaptureFixture) -> None:
    assert run_script.main(["run", "nowhere.py"]) == 2
    assert "nowhere.py" in capsys.readouterr().err


def test_ctrl_c_still_gives_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text("raise KeyboardInterrupt")
    assert run_script.main(["run", str(script)]) == run_script.INTERRUPTED
    assert "0 findings" in capsys.readouterr().err


@pytest.fixture
def vectors() -> tuple[Any, Any]:
    return torch.randn(300), torch.zeros(300)


def test_run_catches_what_the_dsl_compiles(vectors: tuple[Any, Any]) -> None:
    x, y = vectors
    mx, my = (from_dlpack(t).mark_layout_dynamic() for t in vectors)
    with emulator.run("sm_80") as session:
        scale(mx, my)
        assert torch.equal(y, 2 * x)
        y.zero_()
        compiled = cute.compile(scale, mx, my)
        compiled(mx, my)
        assert torch.equal(y, 2 * x)
        y.zero_()
        compiled.to(0)(mx, my)
        assert torch.equal(y, 2 * x)
    assert len(session.launches) == 3


def test_a_program_asks_for_the_arch_of_its_session(vectors: tuple[Any, Any]) -> None:
    """Some choose kernels by it before they compile, when the DSL still has that of the compile before."""
    from cutlass.base_dsl import Arch
    from cutlass.cutlass_dsl import CuTeDSL

    given = [from_dlpack(t).mark_layout_dynamic() for t in vectors]
    for arch in ("sm_80", "sm_90a", "sm_89"):
        with emulator.run(arch):
            assert CuTeDSL._get_dsl().get_arch_enum() == Arch.from_string(arch)
            cute.compile(scale, *given)


def test_run_catches_calls_through_tvm_ffi(vectors: tuple[Any, Any]) -> None:
    x, y = vectors
    n = cute.sym_int()
    fake = make_fake_tensor(cutlass.Float32, (n,), stride=(1,))
    with emulator.run("sm_80", raise_on_report=False) as session:
        compiled = cute.compile(scale, fake, fake, options="--enable-tvm-ffi")
        compiled(x, y)
        assert torch.equal(y, 2 * x)
        with pytest.raises(ValueError, match="shape"):
            compiled(x, y[:200])
    assert len(session.launches) == 1
    with pytest.raises(RuntimeError, match=r"lowering\.emulator\.run"):
        compiled(x, y)


def test_what_was_compiled_within_is_not_kept_for_calls_outside(vectors: tuple[Any, Any]) -> None:
    mx, my = (from_dlpack(t).mark_layout_dynamic() for t in vectors)
    from cutlass.cutlass_dsl import CuTeDSL

    dsl = CuTeDSL._get_dsl()
    before = dsl.jit_cache, dsl.envar.disable_file_caching
    with emulator.run("sm_80") as session:
        scale(mx, my)
        with emulator.run("sm_90a"):
            scale(mx, my)
        scale(mx, my)
    assert len(session.launches) == 2
    assert (dsl.jit_cache, dsl.envar.disable_file_caching) == before


def test_sessions_of_threads_may_overlap(vectors: tuple[Any, Any]) -> None:
    mx, my = (from_dlpack(t).mark_layout_dynamic() for t in vectors)
    first, second = emulator.run("sm_80"), emulator.run("sm_80")
    first.__enter__()
    session = second.__enter__()
    first.__exit__(None, None, None)
    scale(mx, my)
    second.__exit__(None, None, None)
    assert len(session.launches) == 1


def test_a_long_launch_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.001)
    monkeypatch.setattr(progress, "NEXT_SECONDS", 0.001)
    x, y = torch.zeros(4096), torch.zeros(4096)
    with emulator.run("sm_80", progress=progress.Progress()):
        scale(*(from_dlpack(t).mark_layout_dynamic() for t in (x, y)))
    assert "of 32 CTAs done" in capsys.readouterr().err


def test_pointers_reach_the_tensors_that_hold_them(vectors: tuple[Any, Any]) -> None:
    x, y = vectors
    px, py = (make_ptr(cutlass.Float32, t.data_ptr(), cute.AddressSpace.gmem) for t in vectors)
    with emulator.run("sm_80", raise_on_report=False) as session:
        scale_pointers(px, py, 300)
        assert torch.equal(y, 2 * x)
        assert not session.reports
        scale_pointers(px, py, 301)
    assert session.reports[0].kind == emulator.Kind.OUT_OF_BOUNDS


def test_addresses_in_a_tensor_count_as_arguments() -> None:
    target = torch.zeros(77)
    table = torch.tensor([target.data_ptr()])
    found = memory.reachable(None, [table], {}, memory.live_tensors)
    assert (target.data_ptr(), 77 * 4) in [(e.start, e.size) for e in found]


def test_a_result_that_depends_on_the_schedule_is_a_finding() -> None:
    y = torch.zeros(1, dtype=torch.int32)
    with emulator.run("sm_80", seeds=6, raise_on_report=False) as session:
        last_cta(from_dlpack(y))
    assert [r.kind for r in session.reports] == [emulator.Kind.SCHEDULE_DEPENDENT]
    with emulator.run("sm_80", seeds=6, order_matters=True) as session:
        last_cta(from_dlpack(y))
    assert not session.reports
    kept = int(y)
    with emulator.run("sm_80"):
        last_cta(from_dlpack(y))
    assert int(y) == kept  # the session's own seed


def test_a_function_compiled_outside_says_where_to_compile_it(vectors: tuple[Any, Any]) -> None:
    mx, my = (from_dlpack(t).mark_layout_dynamic() for t in vectors)
    compiled = cute.compile(scale, mx, my, options="--gpu-arch sm_80")
    with emulator.run("sm_80"), pytest.raises(emulator.EmulatorError, match=r"call cute\.compile within it"):
        compiled(mx, my)


@pytest.mark.parametrize("seeds", [0, 1.5, True])
def test_a_number_of_schedules_is_a_whole_number(seeds: Any) -> None:
    with pytest.raises(emulator.EmulatorError, match="seeds is"), emulator.run(seeds=seeds):
        pass


def test_the_pytest_plugin_fails_a_test_with_the_report(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_theirs=PLUGIN_TEST, stranger=STRANGER.read_text())
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    # In this process pytester would drop the modules of torch that the run imports first.
    done = pytester.runpytest_subprocess("-p", "lowering.emulator.pytest", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["RACE: *", "*stranger.py:*"])


@dataclasses.dataclass(frozen=True)
class FrozenReverse(stranger.ReverseTiles):
    plant: str = ""


def host(x: cute.Tensor, y: cute.Tensor, plant: cutlass.Constexpr, sms: cutlass.Constexpr, stream) -> None:
    stranger.ReverseTiles(plant)(x, y, sms, stream)


@pytest.mark.parametrize("function", [FrozenReverse(), host], ids=["frozen object", "the lines of the error"])
def test_a_kernel_object_comes_through_lowering_jit(function: Any) -> None:
    x = torch.randn(4 * stranger.TILE)
    y = torch.zeros_like(x)
    constants = {"plant": ""} if function is host else {}
    with emulator.run("sm_80", sms=2):
        lowering.jit(function)(x, y, sms=2, **constants)
    assert torch.equal(y, x.view(-1, stranger.TILE).flip(1).flatten())


def test_a_kernel_object_that_is_no_key_says_what_to_write() -> None:
    x = torch.zeros(stranger.TILE)
    with emulator.run("sm_80"), pytest.raises(lowering.ArgumentTypeError, match=r"def host\(x: cute.Tensor"):
        lowering.jit(stranger.ReverseTiles(""))(x, x, sms=2)
