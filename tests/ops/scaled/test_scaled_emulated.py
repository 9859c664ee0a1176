"""`scaled_gemm` through the real kernel, in the emulator: small cases, since it is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.gemm import Schedule, Sm90GemmConfig
from kernels_dsl.config.problem import DEVICES_BY_ARCH, H200
from lowering import emulator
from reference import quantize as quantization
from reference import scaled_gemm as reference
from reference import tolerance
from reference.inputs import integers, normal
from tests.ops.scaled import scaled_cases

E4M3, E5M2 = scaled_cases.E4M3, scaled_cases.E5M2
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""`torch.library.opcheck` but for test_schema, for which PyTorch would have to compute with fp8."""
LONG = 128  # of K: more than the tensor cores sum at a time
KINDS = {
    "block scales": lambda case: case.groups is not None and case.k > LONG,
    "promoted": lambda case: case.groups is None and not case.fast and case.k > LONG,
    "fast": lambda case: case.groups is None and case.fast and case.k > LONG,
    "short": lambda case: 0 < case.k <= LONG,
    "empty": lambda case: case.work == 0,
    "fp8 result": lambda case: case.work and case.out_dtype not in scaled_cases.OUTPUTS,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("arch", "first", "most"), [("sm_90a", 0, 1_000_000), ("sm_89", 200, 300_000)])
def test_generated_cases_in_the_emulator(arch: str, first: int, most: int, kind: str) -> None:
    """Integers and normal values in turn. `most`: multiply-adds of a case."""
    cases: list[scaled_cases.Case] = []
    number = first
    while len(cases) < (4 if kind == "block scales" and arch == "sm_90a" else 2):
        case = scaled_cases.generate(number)
        alternate = kind == "fp8 result" or case.exact == (len(cases) % 2 == 0)
        if case.work <= most and KINDS[kind](case) and alternate:
            cases.append(case)
        number += 1
    for case in cases:
        with emulator.run(arch=arch) as session:
            scaled_cases.run(case, "cpu")
        assert not session.reports, str(case)


@pytest.mark.parametrize(("kind", "dtype"), [("tensor", E5M2), ("row", E4M3)], ids=str)
def test_beside_torch_on_the_cpu(kind: str, dtype: torch.dtype) -> None:
    """At most twice the error of `torch._scaled_mm` with the very same arguments, mixed types among them."""
    (a, scale_a), (b, scale_b) = (
        quantization.quantize(normal(shape, torch.float32, seed=i), (dtype, E4M3)[i], scaling=kind)
        for i, shape in enumerate(((48, 208), (32, 208)))
    )
    arguments = (a, b.mT, scale_a, scale_b.mT if kind == "row" else scale_b)
    peer = torch._scaled_mm(*arguments, out_dtype=torch.bfloat16)
    with emulator.run(arch="sm_90a"):
        found = kernels_dsl.scaled_gemm(*arguments)
    tolerance.check(found, reference.scaled_gemm(*arguments), peer)


def test_conventions_of_block_scales() -> None:
    """DeepGEMM's, and PyTorch's, with the strides that each of them asks for; exact sums."""
    m, n, k = 37, 264, 300
    groups, of_n = -(-k // 128), -(-n // 128)
    a, b = integers((m, k), E4M3, seed=1), integers((n, k), E4M3, seed=2)
    # DeepGEMM: D = A Bᵀ; scales of A (M, K / 128) with contiguous M at multiples of 16 bytes, of B
    # (N / 128, K / 128) contiguous.
    of_a = torch.empty(groups, m + -m % 4).mT[:m]
    of_a.copy_(torch.arange(m)[:, None].remainder(3).exp2() * torch.tensor([1.0, 0.5, 2.0]))
    of_b = torch.tensor([[1.0, 4.0, 0.5], [2.0, 0.25, 1.0], [0.5, 8.0, 2.0]])
    exact = torch.zeros(m, n, dtype=torch.float64)
    for i in range(m):
        for j in range(of_n):
            for g in range(groups):
                columns, part = slice(128 * j, 128 * j + 128), slice(128 * g, 128 * g + 128)
                product = b[columns, part].double() @ a[i, part].double()
                exact[i, columns] += of_a[i, g].double() * of_b[j, g].double() * product
    # PyTorch: b (K, N), its scales (K / 128, N / 128), the rows of their transpose at multiples of 16 bytes.
    of_torch = torch.empty(of_n, groups + -groups % 4)[:, :groups].mT.copy_(of_b.mT)
    with emulator.run(arch="sm_90a"):
        for scale_b in (of_b.mT, of_torch):
            assert scale_b.shape == (groups, of_n)
            found = kernels_dsl.scaled_gemm(a, b.mT, of_a, scale_b, out_dtype=torch.float32)
            tolerance.check_exact(found, exact)


@pytest.mark.parametrize("blocks", [True, False])
def test_many_tiles_of_one_cta(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    """A tile's first K tile is multiplied beside the stores of the one before: 1, 3 and 4 K tiles."""
    monkeypatch.setitem(DEVICES_BY_ARCH, "sm_90a", replace(H200, sm_count=2))
    with emulator.run(arch="sm_90a") as session:
        for k in (112, 496) if blocks else (384,):
            scaled_cases.check_integers(130, 40, k, "cpu", blocks, config=Sm90GemmConfig(64, 16))
    assert not session.reports


@pytest.mark.parametrize("blocks", [True, False])
def test_tiles_cut_along_k(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    """Sums of pieces of tiles that three clusters share, two or three of them in a tile."""
    monkeypatch.setitem(DEVICES_BY_ARCH, "sm_90a", replace(H200, sm_count=6 if blocks else 3))
    config = Sm90GemmConfig(128, 16, cluster_m=2) if blocks else Sm90GemmConfig(64, 16)
    with emulator.run(arch="sm_90a") as session:
        for n in (16, 32, 60):
            scaled_cases.check_integers(200, n, 640, "cpu", blocks, config=replace(config, stream_k=True))
    assert not session.reports


@pytest.mark.parametrize("blocks", [True, False])
def test_k_shared_by_a_cluster(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    """Two clusters of two CTAs, each with several tiles."""
    monkeypatch.setitem(DEVICES_BY_ARCH, "sm_90a", replace(H200, sm_count=4))
    with emulator.run(arch="sm_90a") as session:
        part = Sm90GemmConfig(128, 32, last_m=48, l2_prefetch=True, evict_first_b=True)
        for config in (Sm90GemmConfig(64, 16), Sm90GemmConfig(128, 32, overlap=not blocks), part):
            scaled_cases.check_integers(300, 40, 640, "cpu", blocks, config=replace(config, cluster_k=2))
        ring = Sm90GemmConfig(64, 128 if blocks else 72, cluster_k=2, turned=not blocks)
        scaled_cases.check_integers(300 if blocks else 70, 70, 640, "cpu", blocks, config=ring)
    assert not session.reports


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_results_saturate(dtype: torch.dtype) -> None:
    """Large values and infinities become the largest of their sign; NaN stays."""
    a, b = torch.tensor([[448.0], [-448.0], [float("nan")], [1.0]]).to(E4M3), torch.ones(1, 16).to(E4M3)
    b[0, 0] = 448.0
    huge = torch.tensor([[2.0**100], [2.0**100], [1.0], [1.0]])
    with emulator.run(arch="sm_90a"):
        for scale_a in (huge, huge * 2.0**27):
            found = kernels_dsl.scaled_gemm(a, b, scale_a, torch.ones(1, 1), out_dtype=dtype).float()
            largest = torch.finfo(dtype).max
            assert bool((found[0] == largest).all()) and bool((found[1] == -largest).all())
            assert bool(found[2].isnan().all())


@pytest.mark.parametrize(("arch", "dtype"), [("sm_90a", E4M3), ("sm_90a", E5M2), ("sm_89", E5M2)])
def test_every_value_of_an_operand(arch: str, dtype: torch.dtype) -> None:
    with emulator.run(arch=arch):
        scaled_cases.check_every_pattern(dtype, "cpu")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_odd_scales_of_blocks(arch: str) -> None:
    with emulator.run(arch=arch):
        scaled_cases.check_odd_block_scales("cpu")


@pytest.mark.parametrize(("arch", "split"), [("sm_90a", 1), ("sm_90a", 2), ("sm_89", 1)])
def test_the_largest_magnitude(arch: str, split: int) -> None:
    """Of the result before its scale and rounding, of elements within the result alone; NaN if one is."""
    a, b = torch.full((70, 256), 2.0).to(E4M3), torch.ones(24, 256).to(E4M3).mT
    a[69, 0] = -448.0
    scale_a, scale_b = torch.full((70, 1), 0.25), torch.full((1, 24), 0.5)
    amax, fp8, graph = (torch.full(shape, -1.0) for shape in ((), (1, 1), (1,)))
    config = Sm90GemmConfig(64, 16, split_k=split) if arch == "sm_90a" else None
    with emulator.run(arch=arch) as session:
        # Beyond the edges the epilogue makes 1000 of sums of 0: more than within, of 64 and 7.75.
        found = kernels_dsl.scaled_gemm(
            a, b, scale_a, scale_b, epilogue=lambda acc: acc * -10.0 + 1000.0, amax=amax, config=config
        )
        assert amax == 922.5 and found[69, 0] == 924  # bf16 has eight bits of it
        if (arch, split) == ("sm_90a", 1):
            out = kernels_dsl.scaled_gemm(
                a,
                b,
                scale_a,
                scale_b,
                scale_result=torch.tensor(8.0),
                amax=fp8,
                out_dtype=E4M3,
                config=config,
            )
            assert fp8 == 64 and out[0, 0].float() == 448
            a[3, 100] = float("nan")
            kernels_dsl.scaled_gemm(a, b, scale_a, scale_b, amax=graph, config=config)
            assert bool(graph.isnan().all())
            kernels_dsl.scaled_gemm(a[:0], b, scale_a[:0], scale_b, amax=graph)
            assert graph == 0
    assert not session.reports


def test_an_own_epilogue_follows_the_scales() -> None:
    a, b = torch.full((8, 16), 2.0).to(E4M3), torch.ones(16, 8).to(E4M3)
    scales = torch.tensor(0.5), torch.tensor([[0.25]])
    with emulator.run(arch="sm_90a"):
        found = kernels_dsl.scaled_gemm(
            a, b, *scales, epilogue=lambda acc, x, y: acc * x + y, epilogue_args=(torch.arange(8.0), 3.0)
        )
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (4.0 * torch.arange(8.0) + 3.0).expand(8, 8).bfloat16())


def test_every_row_and_column_has_its_own_scale() -> None:
    """Two waves of 64 rows a warpgroup, columns that end within 64, a result that ends in its tile."""
    m, n = 123, 75
    a, b = torch.ones(m, 16).to(E4M3), torch.ones(n, 16).to(E4M3).mT
    scales = torch.arange(1.0, m + 1)[:, None], torch.arange(1.0, n + 1)[None]
    bias = torch.arange(n) * 7.0
    config = Sm90GemmConfig(128, 80, schedule=Schedule.PINGPONG)
    with emulator.run(arch="sm_90a") as session:
        found = kernels_dsl.scaled_gemm(a, b, *scales, bias=bias, out_dtype=torch.float32, config=config)
    assert not session.reports
    assert torch.equal(found, 16.0 * scales[0] * scales[1] + bias)


def test_the_operator() -> None:
    """The operator as torch.compile sees it: the fake has the shape and dtype of the result, out= is
    mutated."""
    a, b = torch.ones(8, 32).to(E4M3), torch.ones(24, 32).to(E5M2).mT
    scales = torch.ones(8, 1), torch.ones(1, 24)
    arguments = (a, b, *scales)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in arguments]
        fake = kernels_dsl.scaled_gemm(*fakes, out_dtype=torch.float16)
    assert fake.shape == (8, 24) and fake.dtype == torch.float16
    compiled = torch.compile(
        lambda *x: kernels_dsl.scaled_gemm(*x, bias=torch.ones(24)) * 2, backend="eager", fullgraph=True
    )
    with emulator.run(arch="sm_90a"):
        out = {"out": torch.zeros(8, 24), "amax": torch.zeros(1)}
        torch.library.opcheck(torch.ops.kernels_dsl.scaled_gemm.default, arguments, test_utils=OPCHECKS)
        torch.library.opcheck(
            torch.ops.kernels_dsl.scaled_gemm_out.default, arguments, out, test_utils=OPCHECKS
        )
        assert torch.equal(compiled(*arguments), torch.full((8, 24), 66.0).bfloat16())
        out = torch.zeros(8, 24)
        torch.ops.kernels_dsl.scaled_gemm_out(*arguments, out=out)
        assert torch.equal(out, torch.full((8, 24), 32.0))
        amax = torch.zeros(1)
        measured = torch.compile(
            lambda *x: kernels_dsl.scaled_gemm(*x, amax=amax) + amax, backend="aot_eager", fullgraph=True
        )
        assert torch.equal(measured(*arguments), torch.full((8, 24), 64.0).bfloat16()) and amax == 32
        bias = torch.zeros(24, requires_grad=True)
        with pytest.raises(ValueError, match="amax is given and a tensor requires grad"):
            kernels_dsl.scaled_gemm(*arguments, bias=bias, amax=amax)
        with pytest.raises(RuntimeError, match="scaled_gemm has no gradient"):
            kernels_dsl.scaled_gemm(*arguments, bias=bias).sum().backward()
