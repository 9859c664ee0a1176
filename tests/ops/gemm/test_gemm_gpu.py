"""`gemm` on a GPU: generated cases, exactness, determinism, and how it lives inside PyTorch.

TEST_GEMM_CASES sets how many cases are generated for each family of kernels (default 60).
"""

from __future__ import annotations

import os
import time

import pytest
import torch

import lowering
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.gemm_table import SM80_CANDIDATES, SM90_CANDIDATES, adapted
from kernels_dsl.ops.gemm.gemm import gemm, plan_for, supports
from reference import gemm as reference
from reference import tolerance
from reference.buffers import check_output, poisoned
from reference.inputs import integers, normal
from tests.ops.gemm import gemm_cases

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FAMILIES = [pytest.param("sm90", marks=pytest.mark.sm90), "sm80"]
CASES = int(os.environ.get("TEST_GEMM_CASES", "60"))


def _integers(*shape: int, dtype: torch.dtype = BF16, seed: int = 1) -> torch.Tensor:
    return integers(shape, dtype, seed=seed, device="cuda")


def _normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 1) -> torch.Tensor:
    return normal(shape, dtype, seed=seed, device="cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(CASES))
def test_generated_cases(family: str, number: int) -> None:
    gemm_cases.run(gemm_cases.generate(number, family), "cuda")


def _table() -> list:
    made = [
        pytest.param(c.config, marks=pytest.mark.sm90, id=f"sm90 {i}") for i, c in enumerate(SM90_CANDIDATES)
    ]
    return made + [pytest.param(c.config, id=f"sm80 {i}") for i, c in enumerate(SM80_CANDIDATES)]


@pytest.mark.parametrize("config", _table())
@pytest.mark.parametrize("shape", [(1000, 776, 520), (129, 2056, 264), (3, 8, 8)])
def test_every_configuration_is_exact(config, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = _integers(m, k), _integers(n, k, seed=2).t()
    reason = supports(a, b, config=config)
    if reason is not None:
        pytest.skip(reason)  # a configuration for GPUs with more shared memory
    out = poisoned((m, n), FP32, device="cuda")
    gemm(a, b, config=config, out=out.tensor)
    check_output(out)
    tolerance.check_exact(out.tensor, reference.gemm(a, b), case=str(config))


@pytest.mark.sm90
@pytest.mark.parametrize(
    "config",
    [
        Sm90GemmConfig(128, 128, raster_along_m=False, raster_group=3),
        Sm90GemmConfig(128, 128, cluster_n=2),
        Sm90GemmConfig(128, 128, cluster_m=2, cluster_n=2),
        Sm90GemmConfig(64, 128, schedule=Schedule.PINGPONG, stages=3),
        Sm90GemmConfig(192, 128),
        Sm90GemmConfig(128, 128, split_k=3),
        Sm90GemmConfig(128, 64, split_k=16),
        Sm90GemmConfig(128, 128, epi_tma=False),
        Sm90GemmConfig(64, 64, cluster_k=2, l2_prefetch=True, overlap=True),
        Sm90GemmConfig(128, 80, cluster_k=4),
    ],
    ids=str,
)
def test_other_sm90_configurations(config: Sm90GemmConfig) -> None:
    a, b = _integers(3, 500, 1032), _integers(1032, 648, seed=2)
    bias, residual = _integers(648, seed=3), _integers(3, 500, 648, seed=4)
    out = poisoned((3, 500, 648), BF16, device="cuda")
    gemm(a, b, bias=bias, residual=residual, activation="relu", config=config, out=out.tensor)
    check_output(out)
    expected = reference.gemm(a, b, bias=bias, residual=residual, activation="relu")
    tolerance.check_exact(out.tensor, expected, case=str(config))


@pytest.mark.sm90
@pytest.mark.parametrize(
    ("m", "config"),
    [
        (4, Sm90GemmConfig(64, 16, l2_prefetch=True, overlap=True)),
        (7, Sm90GemmConfig(64, 16, cluster_k=2, l2_prefetch=True, overlap=True)),
        (16, Sm90GemmConfig(64, 16, l2_prefetch=True, late=True, evict_first=True)),
        (4, Sm90GemmConfig(64, 16, tile_k=128, l2_prefetch=True, late=True, evict_first=True)),
        (4, Sm90GemmConfig(64, 16, stages=10, l2_prefetch=True, late=True, evict_first=True)),
        (33, Sm90GemmConfig(128, 48, cluster_k=2, turned=True, late=True, evict_first=True)),
        (64, Sm90GemmConfig(128, 64, cluster_m=2, turned=True, l2_prefetch=True, evict_first=True)),
        (129, Sm90GemmConfig(64, 144, cluster_k=2, turned=True, l2_prefetch=True)),
        (200, Sm90GemmConfig(128, 208, cluster_k=4, turned=True)),
        (100, Sm90GemmConfig(192, 112, cluster_k=3, turned=True, l2_prefetch=True)),
        (200, Sm90GemmConfig(192, 104, cluster_n=2, cluster_k=2, turned=True, l2_prefetch=True)),
        (129, Sm90GemmConfig(64, 136, cluster_m=2, cluster_k=3, turned=True, l2_prefetch=True)),
        (129, Sm90GemmConfig(192, 72, cluster_n=2, stream_k=True, turned=True)),
        (129, Sm90GemmConfig(64, 72, cluster_n=2, last_n=64, turned=True, l2_prefetch=True)),
        (200, Sm90GemmConfig(128, 112, cluster_m=2, last_m=72, l2_prefetch=True, evict_first_b=True)),
        (100, Sm90GemmConfig(128, 72, last_m=104, l2_prefetch=True, late=True, evict_first_b=True)),
    ],
    ids=str,
)
def test_few_rows_of_many_tiles(m: int, config: Sm90GemmConfig) -> None:
    """One kernel after the other, of more tiles than run at one time: exact, so the same bits, every time."""
    a, b = _integers(m, 640), _integers(28672, 640, seed=2).t()
    exact = reference.gemm(a, b)
    for result in [gemm(a, b, config=config) for _ in range(10)]:
        tolerance.check_exact(result, exact, case=str(config))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split_k", [2, 5])
def test_split_k(family: str, split_k: int) -> None:
    if family == "sm90":
        config = Sm90GemmConfig(64, 64, split_k=split_k)
    else:
        config = Sm80GemmConfig(64, 64, 64, 4, 2, 2, split_k=split_k)
    a, b, bias = _normal(100, 2000), _normal(2000, 72, seed=2), _normal(72, seed=3)
    options = {"bias": bias, "alpha": 0.5, "activation": "gelu"}
    for column_major in (False, True):
        out = poisoned((100, 72), BF16, device="cuda", contiguous=-2 if column_major else -1)
        gemm(a, b, **options, config=config, out=out.tensor)
        check_output(out)
        peer = reference.gemm_same_dtype(a, b, **options)
        tolerance.check(out.tensor, reference.gemm(a, b, **options), peer)


@pytest.mark.parametrize("family", FAMILIES)
def test_custom_epilogue(family: str) -> None:
    def scaled(acc, scale, shift):
        return acc * scale + shift

    a, b, scale = _integers(200, 136), _integers(136, 264, seed=2), _integers(200, 1, dtype=FP32, seed=3)
    result = gemm(a, b, epilogue=scaled, epilogue_args=(scale, 3), out_dtype=FP32, family=family)
    tolerance.check_exact(result, a.double() @ b.double() * scale.double() + 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_large_outliers_and_non_finite_values(family: str) -> None:
    a, b = _normal(130, 264), _normal(264, 136, seed=2)
    a[5], a[7, 3], b[:, 9] = float("inf"), float("nan"), 0.0
    result = gemm(a, b, family=family)
    assert torch.isnan(result[7]).all() and torch.isnan(result[5, 9])
    assert torch.isfinite(result[:5]).all() and torch.isfinite(result[8:]).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split_k", [1, 4])
def test_the_same_call_gives_the_same_bits(family: str, split_k: int) -> None:
    config = Sm90GemmConfig(128, 64, split_k=split_k)
    if family == "sm80":
        config = Sm80GemmConfig(64, 64, 64, 4, 2, 2, split_k=split_k)
    a, b = _normal(1111, 2048), _normal(2048, 1032, seed=2)
    first = gemm(a, b, config=config)
    for _ in range(10):
        assert torch.equal(gemm(a, b, config=config), first)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_input_of_more_than_two_to_the_31_elements(family: str) -> None:
    m, k, n = 70000, 32768, 64
    _needs_memory(16)
    a = torch.randint(-1, 2, (m, k), dtype=torch.int8, device="cuda").to(BF16)
    b = _integers(k, n, seed=2)
    assert torch.equal(gemm(a, b, family=family, out_dtype=BF16), torch.mm(a, b))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_of_more_than_two_to_the_31_elements(family: str) -> None:
    m, n, k = 50000, 50000, 64
    _needs_memory(16)
    a, b = _integers(m, k), _integers(k, n, seed=2)
    out = torch.full((m, n), float("nan"), dtype=BF16, device="cuda")
    gemm(a, b, out=out, family=family)
    assert torch.equal(out, torch.mm(a, b))


def _needs_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free >> 30} GiB are free")


def test_a_second_size_compiles_nothing_and_another_dtype_once() -> None:
    config = Sm80GemmConfig(64, 64, 32, 3, 2, 2, raster_group=7)  # of this test alone

    def made() -> int:
        """Kernels that were compiled or read from disk so far."""
        stats = lowering.cache.stats()
        return stats["compiles"] + stats["disk_hits"]

    gemm(_normal(64, 64), _normal(64, 64), config=config)
    before = made()
    gemm(_normal(128, 200), _normal(200, 72), config=config)
    assert made() == before
    gemm(_normal(64, 64, dtype=FP16), _normal(64, 64, dtype=FP16), config=config)
    assert made() == before + 1


def test_out_needs_no_memory() -> None:
    a, b, out = _normal(512, 512), _normal(512, 512, seed=2), torch.empty(512, 512, dtype=BF16, device="cuda")
    config = Sm80GemmConfig(64, 64, 32, 3, 2, 2)
    gemm(a, b, out=out, config=config)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    gemm(a, b, out=out, config=config)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("split_k", [1, 2])
def test_cuda_graph(split_k: int) -> None:
    config = Sm80GemmConfig(64, 64, 32, 3, 2, 2, split_k=split_k)
    a, b, bias = _integers(200, 264), _integers(264, 136, seed=2), _integers(136, seed=3)
    unaligned = torch.empty(200, 265, dtype=BF16, device="cuda")[:, :264]
    unaligned.copy_(a)
    gemm(a, b, bias=bias, config=config)
    gemm(unaligned, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = gemm(a, b, bias=bias, config=config)
        second = gemm(unaligned, b)
    for seed in (5, 6):
        a.copy_(_integers(200, 264, seed=seed))
        unaligned.copy_(a)
        graph.replay()
        tolerance.check_exact(first, reference.gemm(a, b, bias=bias))
        tolerance.check_exact(second, reference.gemm(a, b))


def test_a_first_call_inside_a_capture_is_an_error() -> None:
    config = Sm80GemmConfig(64, 64, 32, 3, 2, 2, raster_group=5)  # of this test alone
    a, b = _integers(64, 64), _integers(64, 64, seed=2)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(lowering.CaptureError, match="warm-up"), torch.cuda.graph(graph):
        gemm(a, b, config=config)
    torch.cuda.synchronize()
    tolerance.check_exact(gemm(a, b, config=config), reference.gemm(a, b))


def test_a_side_stream_orders_after_its_own_work() -> None:
    a, b = _integers(512, 512), _integers(512, 512, seed=2)
    gemm(a, b)
    fresh = torch.empty_like(a)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        fresh.copy_(a)
        result = gemm(fresh, b)
    torch.cuda.current_stream().wait_stream(stream)
    tolerance.check_exact(result, reference.gemm(a, b))


def test_a_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    a, b = _integers(200, 264).to("cuda:1"), _integers(264, 136, seed=2).to("cuda:1")
    result = gemm(a, b)
    assert result.device == a.device and torch.cuda.current_device() == 0
    tolerance.check_exact(result, reference.gemm(a, b))
    with pytest.raises(ValueError, match="b is on cuda:0, must be on a's device, cuda:1"):
        gemm(a, b.to("cuda:0"))


@pytest.mark.parametrize("family", FAMILIES)
def test_opcheck(family: str) -> None:
    from kernels_dsl.ops.gemm import register  # noqa: F401

    a, b = (_normal(136, 264).requires_grad_(), _normal(264, 72, seed=2).requires_grad_())
    bias, residual = _normal(72, seed=3).requires_grad_(), _normal(136, 72, seed=4).requires_grad_()
    keywords = {"bias": bias, "residual": residual, "activation": "gelu", "alpha": 0.5, "family": family}
    torch.library.opcheck(torch.ops.kernels_dsl.gemm.default, (a, b), keywords)
    plain = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
    plain["out"] = torch.empty(136, 72, dtype=BF16, device="cuda")
    torch.library.opcheck(torch.ops.kernels_dsl.gemm_out.default, (a.detach(), b.detach()), plain)


def test_torch_compile_with_dynamic_shapes() -> None:
    torch._dynamo.reset()

    def layer(x, weight, bias):
        return torch.relu(gemm(x, weight.t(), bias=bias, activation="silu") + 1)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    weight = _normal(264, 136).requires_grad_()
    bias = _normal(264, seed=2).requires_grad_()
    for m in (64, 65, 200):
        x = _normal(m, 136, seed=m).requires_grad_()
        got, expected = compiled(x, weight, bias), layer(x, weight, bias)
        torch.testing.assert_close(got, expected)
        mine = torch.autograd.grad(got.sum(), [x, weight, bias])
        theirs = torch.autograd.grad(expected.sum(), [x, weight, bias])
        for one, other in zip(mine, theirs):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients(activation: str | None, dtype: torch.dtype) -> None:
    a, b = _normal(200, 136, dtype=dtype), _normal(136, 72, dtype=dtype, seed=2)
    bias, c, residual = (_normal(*shape, dtype=dtype, seed=3) for shape in ((72,), (200, 72), (200, 72)))
    tensors = [x.requires_grad_() for x in (a, b, bias, c, residual)]
    options = {
        "bias": bias,
        "c": c,
        "residual": residual,
        "alpha": 0.5,
        "beta": 2.0,
        "activation": activation,
    }
    weight = _normal(200, 72, dtype=dtype, seed=4)
    got = torch.autograd.grad(gemm(a, b, **options), tensors, weight)
    exact = torch.autograd.grad(reference.gemm(a, b, **options), tensors, weight.double())
    peer = torch.autograd.grad(reference.gemm_same_dtype(a, b, **options), tensors, weight)
    for name, mine, true, theirs in zip(("a", "b", "bias", "c", "residual"), got, exact, peer):
        assert mine.dtype == theirs.dtype
        # The gradient with respect to z is rounded once more than in PyTorch's chain, hence the factor.
        tolerance.check(mine, true.double(), theirs, factor=3.0, ulps=2.0, case=f"gradient of {name}")


@pytest.mark.alone
def test_host_time() -> None:
    """The goal of the eager path: at most 8 us of host time a call, launch included, on a host on which
    torch.mm takes 9.7 us; a slower host gets as much more. The best of many short runs, since whatever else
    the machine does can only add."""
    a, b = _normal(64, 64), _normal(64, 64, seed=2)
    out = torch.empty(64, 64, dtype=BF16, device="cuda")
    best = {}
    calls = {
        "returning": lambda: gemm(a, b),
        "into out": lambda: gemm(a, b, out=out),
        "torch.mm": lambda: torch.mm(a, b),
    }
    for kind, call in calls.items():
        for _ in range(200):
            call()
        times = []
        for _ in range(200):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                call()
            times.append((time.perf_counter() - start) / 50)
        best[kind] = min(times) * 1e6
    limit = 8.0 * max(1.0, best["torch.mm"] / 9.7)
    assert max(best["returning"], best["into out"]) <= limit, f"host time in us: {best}"


@pytest.mark.sm90
def test_unaligned_operands_of_a_large_problem_take_the_fast_family() -> None:
    a, b = _integers(4095, 511), _integers(511, 4097, seed=2)
    decision = plan_for(a, b).decision
    assert decision.family == "sm90" and decision.copy_a and decision.copy_b
    tolerance.check_exact(gemm(a, b, out_dtype=FP32), reference.gemm(a, b))


def test_adapted_configurations_are_what_the_table_says() -> None:
    """A guard for the cases above: the table's first configuration fits this GPU's plain problem as it is."""
    a, b = _normal(4096, 4096), _normal(4096, 4096, seed=2)
    decision = plan_for(a, b).decision
    assert adapted(decision.config, decision.problem) == decision.config
