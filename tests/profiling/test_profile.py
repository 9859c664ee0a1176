"""`profile`: the command line of ncu, its CSV, the roofline made of it, and the calls that it runs.

The CSV has the form that ncu prints; its figures are made up.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys

import pytest
import torch

from kernels_dsl.cli import profile
from kernels_dsl.cli.main import build_parser, main
from kernels_dsl.profiling import calls, ncu
from kernels_dsl.profiling.calls import Asked
from kernels_dsl.profiling.roofline import Gpu, Work, report
from lowering import arch, recording

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
VALUES = {
    ncu.DURATION: ("ns", "1,000,000"),
    ncu.CLOCK: ("hz", "1,500,000,000.00"),
    ncu.TENSOR: ("%", "80"),
    ncu.DRAM: ("%", "25.5"),
    ncu.READ: ("byte", "900,000,000"),
    ncu.WRITTEN: ("byte", "120000000"),
    ncu.L2: ("%", "40"),
    ncu.L2_BYTES: ("byte", "2,000,000,000"),
    ncu.L1: ("%", "n/a"),
    ncu.ISSUE: ("%", "12.25"),
}
GPU = Gpu("NVIDIA H200", "sm_90a", 132)


def line(kernel: int, metric: str, unit: str, value: str, name: str = "gemm_sm90") -> str:
    """A row of ncu's table."""
    cells = [kernel, 77, "python3.11", "127.0.0.1", name, 1, 7, "(384, 1, 1)", "(132, 1, 1)", 0, "9.0"]
    return ",".join(f'"{cell}"' for cell in (*cells, "Command line profiler metrics", metric, unit, value))


def table(**changed: tuple[str, str]) -> str:
    """A log of ncu for one kernel, with its remarks around the table."""
    rows = [line(0, metric, *pair) for metric, pair in {**VALUES, **changed}.items()]
    before = [
        "==PROF== Connected to process 77 (/usr/bin/python3.11)",
        '==PROF== Profiling "gemm_sm90" - 0: 0%....50%....100% - 3 passes',
    ]
    return "\n".join([*before, HEAD, *rows, "==PROF== Disconnected from process 77"]) + "\n"


def test_the_table_of_ncu():
    (kernel,) = ncu.counted(table())
    assert kernel.name == "gemm_sm90"
    assert kernel.values[ncu.DURATION] == 1e6 and kernel.values[ncu.DRAM] == 25.5
    assert ncu.L1 not in kernel.values  # "n/a"
    two = "\n".join([HEAD, line(1, ncu.DURATION, "ns", "7", "b"), line(0, ncu.DURATION, "ns", "5", "a, b")])
    assert [(x.name, x.values[ncu.DURATION]) for x in ncu.counted(two)] == [("a, b", 5.0), ("b", 7.0)]
    assert ncu.counted("==ERROR== ERR_NVGPUCTRPERM - no permission") == []


def test_the_roofline_of_one_kernel():
    found = report(Work("gemm", 6e14 / 1e3), GPU, ncu.counted(table()))
    (kernel,) = found.kernels
    assert (kernel.bound.part, kernel.bound.used) == ("tensor cores", 80.0)
    assert found.limit == pytest.approx(132 * 4096 * 1.5e9)
    assert found.achieved == pytest.approx(6e14)
    uses = {use.part: use for use in kernel.uses}
    assert list(uses) == ["tensor cores", "DRAM", "L2", "instruction issue"]
    assert uses["DRAM"].achieved == pytest.approx(1.02e12) and uses["DRAM"].limit == pytest.approx(4e12)
    assert uses["L2"].limit == pytest.approx(5e12)
    text = str(found)
    assert "1 kernel, 1 ms, 600 TFLOPS, 74% of 811 TFLOPS" in text
    (bound,) = [row for row in text.splitlines() if row.endswith("<- bound")]
    assert bound.split() == ["tensor", "cores", "80.0", "%", "600", "TFLOPS", "811", "TFLOPS", "<-", "bound"]
    assert "900 MB read, 120 MB written" in text
    assert found.to_json()["kernels"][0]["bound"] == "tensor cores"


def test_memory_and_latency_bind_too():
    bound_by = {
        "DRAM": {ncu.DRAM: ("%", "91")},
        "L2": {ncu.TENSOR: ("%", "30"), ncu.L2: ("%", "75")},
        "latency": {ncu.TENSOR: ("%", "59.9")},
    }
    for part, changed in bound_by.items():
        found = report(Work("gemm", 1e9), GPU, ncu.counted(table(**changed)))
        assert found.to_json()["kernels"][0]["bound"] == part
        assert ("bound by latency" in str(found)) == (part == "latency")


def test_several_kernels_share_the_operations():
    """No kernel's own rate is known; the call's is."""
    rows = [line(i, *row, name=f"k{i}") for i in range(2) for row in ((m, *v) for m, v in VALUES.items())]
    found = report(Work("backward", 1e12, rate=2), GPU, ncu.counted("\n".join([HEAD, *rows])))
    assert found.ms == 2.0 and found.achieved == pytest.approx(5e14)
    assert found.limit == pytest.approx(2 * 132 * 4096 * 1.5e9)
    assert all(use.achieved is None for kernel in found.kernels for use in kernel.uses[:1])
    unknown = report(Work("gemm", 1e12), Gpu("other", "sm_120a", 100), ncu.counted(table()))
    assert unknown.limit is None and "% of" not in str(unknown).splitlines()[1]


def test_a_kernel_without_duration_is_an_error():
    with pytest.raises(ValueError, match=r"no gpu__time_duration.sum for gemm_sm90"):
        report(Work("gemm", 1.0), GPU, ncu.counted(table(**{ncu.DURATION: ("ns", "n/a")})))


CASES = {
    ("gemm", "96x64x80"): "gemm_sm90",
    ("attention", "1x128x4x64", "--causal", "--kv-heads", "2"): "attention_sm90",
    ("bsr", "64x128x128", "--density", "0.5", "--block", "32x32"): "bsr_sm90",
    ("fp8", "64x128x256", "--scales", "block"): "gemm_sm90",
}


def _asked(*arguments: str) -> Asked:
    operation, shape, *more = arguments
    args = ["profile", operation, "--shape", shape, *more]
    return profile.asked(build_parser().parse_args(args))


@pytest.mark.parametrize("arguments", CASES, ids=lambda case: case[0])
def test_each_call_is_one_launch_and_the_dry_run_names_it(arguments, capsys):
    assert main(["profile", arguments[0], "--shape", *arguments[1:], "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0].endswith("ncu") and words[words.index("--clock-control") + 1] == "none"
    again = words[words.index("kernels_dsl") + 1 :]
    assert again[-1] == "--once" and words[words.index("-m") - 1] == sys.executable
    call = _asked(*arguments)
    assert profile.asked(build_parser().parse_args(again)) == call
    with recording.record("sm_90a"):
        prepared = calls.prepare(call, "cpu")
    with recording.record("sm_90a") as launches:
        prepared.call()
    assert [launch.function.name for launch in launches] == [CASES[arguments]]


def test_operations_of_a_call():
    def flops(*arguments: str) -> float:
        with recording.record("sm_90a"):
            return calls.prepare(_asked(*arguments), "cpu").work.flops

    assert flops("gemm", "96x64x80") == 2 * 96 * 64 * 80
    assert flops("bsr", "64x128x128", "--density", "0.5", "--block", "32x32") == 64 * 128 * 128
    assert flops("attention", "2x128x4x64") == 4 * 2 * 4 * 128 * 128 * 64
    assert flops("attention", "2x128x4x64", "--causal", "--backward") == 5 * 2 * 4 * 128 * 128 * 64


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gemm", "--shape", "64x64"], "--shape is '64x64', must be MxNxK, as 64x64x64"),
        (["gemm", "--shape", "64x0x64"], "--shape is '64x0x64', must be"),
        (["attention", "--shape", "64x64x64"], "must be BxSxHxD, as 64x64x64x64"),
        (["gemm", "--shape", "64x64x64", "--causal"], "--causal, --kv-heads and --backward are attention's"),
        (["bsr", "--shape", "64x64x64", "--density", "0"], "--density is 0.0, must be above 0 and at most 1"),
    ],
)
def test_wrong_options(arguments, text, capsys):
    assert main(["profile", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_missing_ncu_says_what_to_install_and_what_would_run(monkeypatch, capsys):
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    assert main(["profile", "gemm", "--shape", "64x64x64"]) == 2
    message = capsys.readouterr().err
    assert "install NVIDIA's Nsight Compute" in message
    assert message.splitlines()[-1].startswith("ncu --csv --log-file profile.csv")


def test_ncu_is_found_below_the_toolkit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ncu.find_ncu(tmp_path) is None
    for version in ("cuda-12.8", "cuda-13.2"):
        place = tmp_path / "usr/local" / version / "bin/ncu"
        place.parent.mkdir(parents=True)
        place.touch()
    assert ncu.find_ncu(tmp_path) == str(tmp_path / "usr/local/cuda-13.2/bin/ncu")


@pytest.fixture
def a_gpu_and_ncu(tmp_path, monkeypatch):
    """An H200, and an ncu that writes the returned file as its table."""
    answer, script = tmp_path / "answer", tmp_path / "ncu"
    said = json.dumps({"text": "gemm 64x64x64 bf16", "flops": 6e11, "rate": 1})
    script.write_text(
        f"#!{sys.executable}\nimport os, shutil, sys\nassert os.environ['LC_ALL'] == 'C'\n"
        f"shutil.copy({str(answer)!r}, sys.argv[sys.argv.index('--log-file') + 1])\n"
        f"print({said!r})\nsys.exit('ERROR' in open({str(answer)!r}).read())\n"
    )
    script.chmod(0o755)
    gpu = argparse.Namespace(name=GPU.name, arch=GPU.arch, sm_count=GPU.sms)
    monkeypatch.setattr(ncu, "find_ncu", lambda: str(script))
    monkeypatch.setattr(arch, "device_count", lambda: 1)
    monkeypatch.setattr(arch, "device", lambda index: gpu)
    return answer


def test_a_profile_from_ncu_to_the_text(a_gpu_and_ncu, capsys):
    a_gpu_and_ncu.write_text(table())
    assert main(["profile", "gemm", "--shape", "64x64x64"]) == 0
    assert capsys.readouterr().out.startswith("gemm 64x64x64 bf16 on NVIDIA H200 (sm_90a, 132 SMs)\n1 kernel")
    assert main(["profile", "gemm", "--shape", "64x64x64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flops"] == pytest.approx(6e14)


def test_counters_that_the_driver_withholds(a_gpu_and_ncu, capsys):
    a_gpu_and_ncu.write_text("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    assert main(["profile", "gemm", "--shape", "64x64x64"]) == 1
    message = capsys.readouterr().err
    assert "counted 0 kernels" in message and "NVreg_RestrictProfilingToAdminUsers=0" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the call runs")
def test_once_needs_a_gpu(capsys):
    assert main(["profile", "gemm", "--shape", "64x64x64", "--once"]) == 2
    assert "none is in reach" in capsys.readouterr().err


@pytest.mark.gpu
def test_once_on_a_gpu(capsys):
    assert main(["profile", "gemm", "--shape", "64x64x64", "--once"]) == 0
    assert json.loads(capsys.readouterr().out)["flops"] == 2 * 64**3


def test_what_an_operation_refuses_is_said():
    with pytest.raises(profile.UsageError, match=r"attention cannot run: .*512"):
        profile._prepared(Asked("attention", (1, 64, 2, 512)), "cpu")
