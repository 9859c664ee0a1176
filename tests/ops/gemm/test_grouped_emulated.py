"""`grouped_gemm` and `scaled_grouped_gemm` through the real kernels, in the emulator, and their errors."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.gemm import Schedule, Sm90GemmConfig
from kernels_dsl.ops import operation
from lowering import emulator
from tests.ops.gemm import grouped_cases

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
PLAIN = replace(
    grouped_cases.generate(0), sizes=(70, 0, 1, 64, 3), extra=9, n=200, k=40, dtypes=(BF16, BF16),
    out_dtype=torch.float16, kinds=None, pads=(0, 0), bias="ln", residual=False, activation=None, exact=True,
    out_contiguous=-1, out_pad=0,
)  # fmt: skip


FP8 = replace(
    PLAIN, sizes=(3, 0, 66, 1), extra=2, n=24, k=144, dtypes=(E4M3, torch.float8_e5m2), fast=False,
    kinds=("1x128", "128x128"), out_dtype=torch.float32,
)  # fmt: skip
CASES = {
    "blocks": ("sm_90a", FP8),
    "promoted": ("sm_90a", replace(FP8, kinds=("row", "row"), exact=False, out_dtype=BF16, bias="n")),
    "scales of groups, fp8": ("sm_89", replace(FP8, kinds=("matrix", "matrix"), out_dtype=E4M3, k=48)),
    "scales of columns": ("sm_89", replace(FP8, sizes=(5, 18), kinds=("1x128", "1x128"), pads=(5, None))),
    "40 groups": ("sm_80", replace(PLAIN, sizes=(1, 0, 2, 0) * 10, n=8, k=16, residual=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_cases_in_the_emulator(name: str) -> None:
    arch, case = CASES[name]
    with emulator.run(arch=arch) as session:
        grouped_cases.run(case, "cpu")
    assert not session.reports


@pytest.mark.parametrize("kind", ["16 bits", "promoted", "blocks"])
def test_persistent_ctas_walk_all_groups(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 tiles for three CTAs: groups that end within a tile, and tiles whose rows are all a group's."""
    real = operation.target_of
    small = lambda *a: replace(found := real(*a), device=replace(found.device, sm_count=3))  # noqa: E731
    monkeypatch.setattr(operation, "target_of", small)
    with emulator.run(arch="sm_90a") as session:
        case = replace(PLAIN, sizes=(70, 0, 1, *[0] * 30, 64, 3))  # the last ones are beyond a warp's lanes
        config = Sm90GemmConfig(64, 64, schedule=Schedule.PINGPONG)
        if kind != "16 bits":
            scales = ("row", "row") if kind == "promoted" else ("1x128", "128x128")
            case = replace(case, dtypes=(E4M3, E4M3), kinds=scales, fast=False, k=272)
            with pytest.raises(ValueError, match="schedule is pingpong, must be cooperative"):
                grouped_cases.run(case, "cpu", config=config)
            config = replace(config, schedule=Schedule.COOPERATIVE)
        grouped_cases.run(case, "cpu", config=config)
    assert not session.reports


def _fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(E4M3)


A, B, OFFS = _fp8(12, 256), _fp8(3, 20, 256).mT, torch.tensor([4, 4, 10], dtype=torch.int32)
ONE = torch.ones(())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_offsets_beyond_reason_reach_no_foreign_memory(arch: str) -> None:
    """Ends that decrease, are negative or beyond M, and no rows or groups at all.

    The second group and the last claim rows 3 to 5, so they race to write them: nothing else may be reported.
    """
    a, b = torch.ones(12, 32, dtype=BF16), torch.ones(4, 32, 16, dtype=BF16)
    out = torch.full((12, 16), -1.0, dtype=BF16)
    with emulator.run(arch=arch, raise_on_report=False) as session:
        offs = torch.tensor([-5, 6, 3, 1000], dtype=torch.int32)
        kernels_dsl.grouped_gemm(a, b, offs, out=out)
        assert kernels_dsl.grouped_gemm(a[:0], b, offs).shape == (0, 16)
        assert kernels_dsl.grouped_gemm(a, b[:0], offs[:0], out=out.clone()).shape == (12, 16)
    rows_of_both = range(3 * 32, 6 * 32)  # bytes
    for report in session.reports:
        place = re.search(r"write of argument 'd', byte (\d+), does not wait for the write", str(report))
        assert place is not None and int(place[1]) in rows_of_both, str(report)
    assert bool((out == 32).all())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_an_out_without_a_contiguous_mode_keeps_rows_of_no_group(arch: str) -> None:
    a, b = torch.ones(12, 32, dtype=BF16), torch.ones(2, 32, 16, dtype=BF16)
    memory = torch.full((12, 32), -1.0, dtype=BF16)
    with emulator.run(arch=arch) as session:
        offs = torch.tensor([4, 9], dtype=torch.int32)
        kernels_dsl.grouped_gemm(a, b, offs, out=memory[:, ::2])
    assert not session.reports
    assert bool((memory[:9, ::2] == 32).all()) and bool((memory[9:] == -1).all())
    assert bool((memory[:, 1::2] == -1).all())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_the_largest_magnitude_of_all_groups(arch: str) -> None:
    """Of rows of groups alone, whatever the epilogue makes of what lies beyond their tiles' edges."""
    a, b = torch.full((12, 144), 2.0).to(E4M3), torch.ones(3, 24, 144).to(E4M3).mT
    a[10:] = 448.0  # of no group
    a[7, 3] = -10.0
    amax, scales = torch.full((), torch.nan), (torch.ones(12), torch.full((3, 24), 0.5))
    with emulator.run(arch=arch) as session:
        found = kernels_dsl.scaled_grouped_gemm(
            a, b, *scales, OFFS, epilogue=lambda acc: acc * -10.0 + 1500.0, out_dtype=torch.float32, amax=amax
        )
        assert amax == found[:10].abs().max() == 120  # beyond the edges 1500
        kernels_dsl.scaled_grouped_gemm(a[:0], b, scales[0][:0], scales[1], OFFS, amax=amax)
        assert amax == 0
    assert not session.reports


def _scaled(a=A, b=B, scale_a=ONE, scale_b=ONE, offs=OFFS, **options):
    return lambda: kernels_dsl.scaled_grouped_gemm(a, b, scale_a, scale_b, offs, **options)


def _plain(a=torch.ones(12, 16), b=torch.ones(3, 16, 8), offs=OFFS, **options):  # noqa: B008
    return lambda: kernels_dsl.grouped_gemm(a, b, offs, **options)


ERRORS = [
    (_plain(offs=[1, 2, 3]), TypeError, "offs is a list, must be a torch.Tensor"),
    (_plain(offs=OFFS.long()), TypeError, "offs has dtype torch.int64, must be one of torch.int32"),
    (_plain(offs=OFFS[:2]), ValueError, r"offs has shape \(2,\), must be \(3,\)"),
    (_plain(offs=OFFS.to("meta")), ValueError, "offs is on meta, must be on a's device, cpu"),
    (_plain(a=torch.ones(1, 12, 16)), ValueError, r"a has shape \(1, 12, 16\), must be \(M, K\)"),
    (_plain(b=torch.ones(16, 8)), ValueError, r"b has shape \(16, 8\), must be \(G, K, N\)"),
    (_plain(b=torch.ones(3, 15, 8)), ValueError, r"b has shape \(3, 15, 8\), must have 16 rows"),
    (_plain(a=A), TypeError, "a has dtype torch.float8_e4m3fn, must be one of torch.bfloat16"),
    (_plain(bias=torch.ones(2, 8)), ValueError, r"bias has shape \(2, 8\), must be \(8,\) or \(3, 8\)"),
    (_plain(config=Sm90GemmConfig(64, 32, split_k=2)), ValueError, "split_k is 2, must be 1 with groups"),
    (_plain(config=Sm90GemmConfig(64, 32, turned=True)), ValueError, "turned tiles have their rows along N"),
    (_scaled(scale_a=1.0), TypeError, "scale_a is a float, must be a torch.Tensor"),
    (_scaled(scale_b=ONE.half()), TypeError, "scale_b has dtype torch.float16, must be one of torch.float32"),
    (
        _scaled(scale_a=torch.ones(11)),
        ValueError,
        r"scale_a has shape \(11,\), must be .*\(12,\) .*\(12, 2\)",
    ),
    (
        _scaled(scale_a=torch.ones(12, 2)),
        ValueError,
        r"scale_a has shape \(12, 2\), must be .* both scales then",
    ),
    (_scaled(scale_b=torch.ones(1, 20)), ValueError, r"scale_b has shape \(1, 20\), must be .*\(3, 20\)"),
    (
        _scaled(scale_b=torch.ones(3, 2, 1)),
        ValueError,
        r"scale_b has shape \(3, 2, 1\), must be .* both then",
    ),
    (_scaled(scale_result=ONE), ValueError, "scale_result is given and the result is torch.bfloat16"),
    (_scaled(amax=torch.ones(3)), ValueError, r"amax has shape \(3,\), must be one element"),
    (_scaled(amax=ONE), ValueError, "amax shares memory with scale_a, must be a tensor of its own"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(call, error, message) -> None:
    with emulator.run(arch="sm_90a"), pytest.raises(error, match=message):
        call()


def test_supports_says_what_a_call_would() -> None:
    a, b = torch.ones(12, 16), torch.ones(3, 16, 8)
    with emulator.run(arch="sm_80"):
        assert kernels_dsl.grouped_gemm_supports(a, b, OFFS) is None
        assert "must be (3,)" in kernels_dsl.grouped_gemm_supports(a, b, OFFS[:1])
        assert "need 8.9" in kernels_dsl.scaled_grouped_gemm_supports(A, B, ONE, ONE, OFFS)
    with emulator.run(arch="sm_89"):
        assert kernels_dsl.scaled_grouped_gemm_supports(A, B, torch.ones(12), torch.ones(3, 20), OFFS) is None
        assert "bogus is given" in kernels_dsl.scaled_grouped_gemm_supports(A, B, ONE, ONE, OFFS, bogus=1)


def test_the_operator() -> None:
    """The operator as torch.compile sees it: the fake has the shape and dtype of the result, out= is
    mutated."""
    scales = torch.ones(12), torch.ones(3, 20)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (A, B, *scales, OFFS)]
        fake = kernels_dsl.scaled_grouped_gemm(*fakes, out_dtype=torch.float16)
    assert fake.shape == (12, 20) and fake.dtype == torch.float16
    compiled = torch.compile(
        lambda *x: kernels_dsl.scaled_grouped_gemm(*x, bias=torch.ones(20)) * 2,
        backend="eager",
        fullgraph=True,
    )
    with emulator.run(arch="sm_90a"):
        assert torch.equal(compiled(A, B, *scales, OFFS)[:10], torch.full((10, 20), 514.0).bfloat16())
        out = torch.zeros(12, 20, dtype=BF16)
        torch.ops.kernels_dsl.grouped_gemm_out(A, B, OFFS, *scales, out=out)
        assert bool((out[:10] == 256).all()) and bool((out[10:] == 0).all())
        amax = torch.zeros(1)
        measured = torch.compile(
            lambda *x: kernels_dsl.scaled_grouped_gemm(*x, amax=amax) + amax, backend="aot_eager"
        )
        assert bool((measured(A, B, *scales, OFFS)[:10] == 512).all()) and amax == 256
        bias = torch.zeros(20, requires_grad=True)
        all_rows = torch.tensor([4, 4, 12], dtype=torch.int32)  # no element of the result is left unwritten
        plain = torch.ones(12, 32).half(), torch.ones(3, 32, 16).half(), all_rows
        utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        operators = torch.ops.kernels_dsl
        torch.library.opcheck(operators.grouped_gemm.default, (A, B, all_rows, *scales), test_utils=utils)
        torch.library.opcheck(
            operators.grouped_gemm_out.default, plain, {"out": torch.zeros(12, 16)},
            test_utils=("test_schema", *utils),
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="grouped_gemm has no gradient"):
            kernels_dsl.scaled_grouped_gemm(A, B, *scales, OFFS, bias=bias).sum().backward()
