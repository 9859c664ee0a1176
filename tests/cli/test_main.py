"""Commands, their exit codes and what they print, with made-up kernels where a compile would be slow."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kernels_dsl.cli import compile as compile_command
from kernels_dsl.cli import demo, doctor, kernels
from kernels_dsl.cli.main import build_parser, main

ROOT = Path(__file__).parents[2]


@dataclass
class Resources:
    entry: str = "gemm_0"
    registers: int = 168
    stack_bytes: int = 0
    static_smem: int = 0
    dynamic_smem: int | None = 230400
    spill_loads: int = 0
    spill_stores: int = 0
    instructions: dict = field(
        default_factory=lambda: {
            "HGMMA.64x256x16.F32.BF16": 16,
            "UTMALDG.2D": 3,
            "UTMALDG.2D.MULTICAST": 1,
            "MOV": 9,
        }
    )


class Compiled:
    def __init__(self, name, source, resources):
        self.name, self.source, self.key, self.seconds = name, source, f"key-{name}", 1.25
        self._resources = resources

    def resources(self):
        return [self._resources]

    def ptx(self):
        return f".version 9.4 // {self.name}"

    def sass(self):
        return "HGMMA"

    def cubin(self):
        return b"\x7fELF"


class Function:
    """Stands in for a JitFunction: the first compile is one, the second a hit."""

    def __init__(self, name, resources=None, error=None):
        self.name, self.resources, self.error, self.calls = name, resources or Resources(), error, 0

    def compile(self, *args, arch, **constexprs):
        if self.error:
            raise self.error
        self.calls += 1
        return Compiled(self.name, "compiled" if self.calls == 1 else "memory", self.resources)

    def key(self, *args, arch, **constexprs):
        return f"key-{self.name}"


@pytest.fixture
def two_kernels(monkeypatch):
    """`kernels.shipped` gives two quick kernels, named as arguments choose; the functions are returned."""
    functions = [Function("gemm_a"), Function("gemm_b")]

    def shipped(arch, ops=kernels.OPS, name="", listing="configurations"):
        found = [kernels.Shipped(f.name, f, (), {}) for f in functions if name in f.name]
        if not found:
            raise kernels.UsageError(f"no kernel for {arch} has {name!r} in its name")
        return found

    monkeypatch.setattr(kernels, "shipped", shipped)
    monkeypatch.setattr(kernels.Shipped, "is_cached", lambda self, arch: self.function.calls > 0)
    return functions


def test_compile_leaves_the_log_as_it_was(two_kernels, monkeypatch):
    log = logging.getLogger("lowering")
    monkeypatch.setattr(log, "level", logging.WARNING)
    assert main(["compile", "--arch", "sm_90a", "--jobs", "1"]) == 0
    assert log.level == logging.WARNING


def test_every_command_has_help(capsys):
    for command in ("demo", "doctor", "compile", "load", "inspect", "advise", "bench", "profile"):
        with pytest.raises(SystemExit) as stopped:
            build_parser().parse_args([command, "--help"])
        assert stopped.value.code == 0
        assert command in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["compile"], ["inspect", "conv"], ["bench", "nothing"]]
)
def test_wrong_usage_exits_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_as_a_module():
    command = [sys.executable, "-m", "kernels_dsl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout.startswith("kernels-dsl ")


def test_doctor_is_well_here(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELS_DSL_CACHE_DIR", str(tmp_path / "kernels"))
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["errors"] == []
    assert facts["cache"] == {
        **facts["cache"],
        "folder": str(tmp_path / "kernels"),
        "state": "in use",
        "kernels": 0,
    }
    assert main(["doctor"]) == 0
    assert f"cache      folder: {tmp_path / 'kernels'}" in capsys.readouterr().out


def test_doctor_says_that_the_cache_is_off(monkeypatch):
    from lowering import cache

    monkeypatch.setattr(cache, "_enabled", False)
    assert doctor.cache_facts()["state"] == "switched off"


def test_doctor_fails_for_a_bad_combination(capsys, monkeypatch):
    real = doctor.packages.installed()
    monkeypatch.setattr(doctor.packages, "installed", lambda: {**real, "nvidia-cutlass": "4.2"})
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "ERROR      nvidia-cutlass is installed too" in captured.out
    assert "1 problems found" in captured.err


def test_doctor_names_a_gpu_that_is_too_old(monkeypatch):
    gpu = {"name": "V100", "arch": "sm_70", "sms": 80, "smem_per_block": 98304, "memory_gib": 32.0}
    monkeypatch.setattr(doctor, "gpu_facts", lambda: [{**gpu, "families": []}])
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "12.6")
    assert any("V100 (sm_70) runs none" in error for error in doctor.examine()["errors"])
    assert doctor.families("sm_90a") == ["sm90", "sm80"]
    assert doctor.families("sm_89") == ["sm80"]


def test_compile_reports_progress_and_hits(two_kernels, capsys):
    assert main(["compile", "--arch", "sm_90a", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 to compile, about 5 s with 1 process and 0 MiB of disk" in out
    assert "[1/2] gemm_a  compiled (" in out
    assert "2 compiled, 0 already there, 0 failed" in out
    assert main(["compile", "--arch", "sm_90a", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "nothing to compile" in out
    assert "0 compiled, 2 already there, 0 failed" in out
    assert [function.calls for function in two_kernels] == [1, 1]


def test_the_forecast_of_a_compile():
    assert compile_command.forecast(983, 8) == "about 5 min with 8 processes and 112 MiB of disk"
    assert compile_command.forecast(3, 8) == "about 2 s with 3 processes and 0 MiB of disk"


@pytest.mark.parametrize(("op", "arch"), [("bsr", "sm_80"), ("fp8", "sm_89")])
def test_each_op_has_common_kernels(op, arch, capsys):
    assert main(["compile", "--arch", arch, "--common", "--op", op, "--list"]) == 0
    common = capsys.readouterr().out
    assert main(["compile", "--arch", arch, "--op", op, "--list"]) == 0
    assert 0 < len(common.splitlines()) < len(capsys.readouterr().out.splitlines())


def test_compile_names_what_failed_and_builds_the_rest(two_kernels, capsys):
    two_kernels[0].error = RuntimeError("no such instruction")
    assert main(["compile", "--arch", "sm_90a", "--jobs", "1"]) == 1
    captured = capsys.readouterr()
    assert "gemm_a  FAILED: RuntimeError: no such instruction" in captured.out
    assert "gemm_b  compiled" in captured.out
    assert "1 kernels could not be built: gemm_a" in captured.err


def test_compile_check_refuses_spills(two_kernels, capsys):
    two_kernels[1].resources = Resources(spill_loads=3, stack_bytes=24)
    assert main(["compile", "--arch", "sm_90a", "--jobs", "1"]) == 0
    assert main(["compile", "--arch", "sm_90a", "--jobs", "1", "--check"]) == 1
    assert "1 kernels spill registers: gemm_b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--jobs", "0"], "--jobs is 0, must be at least 1"),
        (["--name", "attention"], "no kernel for sm_90a has 'attention' in its name"),
    ],
)
def test_compile_with_wrong_values_exits_with_two(arguments, text, two_kernels, capsys):
    assert main(["compile", "--arch", "sm_90a", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_compile_list_compiles_nothing(two_kernels, capsys):
    assert main(["compile", "--arch", "sm_90a", "--list"]) == 0
    assert capsys.readouterr().out == "gemm_a\ngemm_b\n"
    assert [function.calls for function in two_kernels] == [0, 0]


def test_a_bundle_gets_every_key(two_kernels, tmp_path, monkeypatch, capsys):
    written = []
    monkeypatch.setattr(compile_command, "write_bundle", lambda *args: written.append(args))
    bundle, key = tmp_path / "k.zip", tmp_path / "key"
    command = ["compile", "--arch", "sm_90a", "--jobs", "1"]
    assert main([*command, "--bundle", str(bundle)]) == 0
    assert main([*command, "--bundle", str(bundle), "--sign", str(key)]) == 0
    assert written == [(bundle, ["key-gemm_a", "key-gemm_b"], sign) for sign in (None, key)]
    assert main([*command, "--sign", str(key)]) == 2
    assert "--bundle" in capsys.readouterr().err


def test_load_of_what_is_no_bundle(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KERNELS_DSL_CACHE_DIR", str(tmp_path / "kernels"))
    assert main(["load", str(tmp_path / "absent.zip")]) == 2
    (tmp_path / "text.zip").write_text("no archive")
    assert main(["load", str(tmp_path / "text.zip")]) == 1
    assert "text.zip is not a bundle of compiled kernels" in capsys.readouterr().err


def test_inspect_shows_resources(two_kernels, capsys):
    assert main(["inspect", "gemm", "--name", "gemm_a"]) == 0
    out = capsys.readouterr().out
    assert "gemm_a  (sm_90a, compiled in 1.25 s)" in out
    assert "gemm_0: 168 registers, no spills, 225.0 KiB shared memory" in out
    assert "matrix instructions: HGMMA 16; copies: UTMALDG 4" in out


def test_inspect_prints_one_kernel_only(two_kernels, capsys):
    assert main(["inspect", "gemm", "--ptx", "--all"]) == 2
    assert "--name leaves 2" in capsys.readouterr().err
    assert main(["inspect", "gemm", "--ptx", "--name", "gemm_b"]) == 0
    assert capsys.readouterr().out == ".version 9.4 // gemm_b\n"


def test_inspect_without_a_name_compiles_nothing(two_kernels, capsys):
    assert main(["inspect", "gemm"]) == 2
    assert "none of the 2 gemm kernels for sm_90a is in the cache: --name" in capsys.readouterr().err
    assert main(["inspect", "gemm", "--name", "gemm_a"]) == 0
    capsys.readouterr()
    assert main(["inspect", "gemm"]) == 0
    assert "1 of 2 gemm kernels for sm_90a are in the cache" in capsys.readouterr().out
    assert [function.calls for function in two_kernels] == [2, 0]


def test_inspect_saves_files(two_kernels, tmp_path, capsys):
    assert main(["inspect", "gemm", "--all", "-o", str(tmp_path / "out")]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"gemm_{which}.{kind}" for which in "ab" for kind in ("cubin", "ptx", "sass")]


def test_demo_refuses_a_kernel_that_spills(two_kernels):
    two_kernels[0].resources = Resources(spill_stores=1)
    with pytest.raises(demo.CheckFailed, match="gemm_a spills registers on sm_89"):
        demo.compile_and_show("sm_89", 2)


def test_demo_notices_a_second_lookup_that_compiles(two_kernels, monkeypatch, capsys):
    demo.compile_and_show("sm_89", 1)
    assert "gemm_a: compiled in 1.25 s" in capsys.readouterr().out
    monkeypatch.setattr(
        Function, "compile", lambda self, *a, **k: Compiled(self.name, "compiled", self.resources)
    )
    with pytest.raises(demo.CheckFailed, match="not served from memory"):
        demo.compile_and_show("sm_89", 1)


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m kernels_dsl doctor | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("Python")
