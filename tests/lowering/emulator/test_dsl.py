"""Kernels of a user's own file, through `lowering.jit`: results, findings with Python lines, printf."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import dsl_kernels  # noqa: E402

from lowering import emulator  # noqa: E402
from lowering.errors import ArgumentTypeError  # noqa: E402


def _call(synchronised: bool) -> torch.Tensor:
    x = torch.randn(256)
    y = torch.full((256,), float("nan"))
    dsl_kernels.reverse(x, y, synchronised=synchronised)
    assert torch.equal(y.view(2, 128), x.view(2, 128).flip(1))
    return y


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_a_kernel_runs_on_cpu_tensors(arch: str) -> None:
    with emulator.run(arch=arch) as session:
        _call(True)
    assert [(x.grid, x.block, x.smem) for x in session.launches] == [((2, 1, 1), (128, 1, 1), 512)]


def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentTypeError, match=r"on the CPU.*emulator"):
        _call(True)
    monkeypatch.setenv("KERNELS_DSL_EMULATE", "sm_90a")
    _call(True)


def test_a_missing_barrier_is_reported_at_its_python_line() -> None:
    line = next(
        i
        for i, text in enumerate(Path(dsl_kernels.__file__).read_text().splitlines(), 1)
        if "the read that needs the barrier" in text
    )
    x, y = torch.randn(256), torch.empty(256)
    with emulator.run(raise_on_report=False) as session:
        for seed in range(6):
            session.seed = seed
            dsl_kernels.reverse(x, y, synchronised=False)
    reads = [r for r in session.reports if r.kind is emulator.Kind.RACE]
    assert any(r.source == f"{dsl_kernels.__file__}:{line}" for r in reads), session.reports


def test_a_finding_is_an_error_by_default() -> None:
    x, y = torch.randn(256), torch.empty(256)
    with pytest.raises(emulator.EmulatorError, match="RACE"), emulator.run():
        dsl_kernels.reverse(x, y, synchronised=False)


def test_an_argument_that_is_too_short_is_named() -> None:
    with pytest.raises(emulator.EmulatorError, match=r"past the end of argument 'mY'"), emulator.run():
        dsl_kernels.reverse(torch.randn(256), torch.empty(200), synchronised=True)


def test_reads_of_an_uninitialised_tensor() -> None:
    x, y = torch.randn(256), torch.empty(256)
    with emulator.run(raise_on_report=False) as session:
        session.mark_uninitialised(x)
        dsl_kernels.reverse(x, y, synchronised=True)
    assert [r.kind for r in session.reports] == [emulator.Kind.UNINITIALISED]


def test_printf(capsys: pytest.CaptureFixture[str]) -> None:
    # The DSL ends a text with a line break of its own.
    with emulator.run():
        dsl_kernels.greet(torch.tensor([1.5, -2.0, 3.0]))
    assert capsys.readouterr().out == "thread 0 has 1.500000\n\nthread 1 has -2.000000\n\n"
