"""`scaled_gemm` on a GPU: generated cases, PyTorch's product beside it, and how it lives inside PyTorch.

TEST_SCALED_CASES sets how many cases are generated (default 60).
"""

from __future__ import annotations

import os

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.gemm_table import (
    SM90_FP8_CANDIDATES,
    SM90_FP8_PROMOTED_CANDIDATES,
    SM90_FP8_SCALED_CANDIDATES,
    choose,
)
from kernels_dsl.config.problem import H200, GemmProblem
from kernels_dsl.config.promotion import Promotion
from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm, scaled_gemm_supports
from reference import quantize as quantization
from reference import scaled_gemm as reference
from reference import tolerance
from reference.buffers import check_output, poisoned
from reference.inputs import integers, normal
from tests.ops.scaled import scaled_cases

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
E4M3, E5M2 = scaled_cases.E4M3, scaled_cases.E5M2
CASES = int(os.environ.get("TEST_SCALED_CASES", "60"))


@pytest.mark.parametrize("number", range(CASES))
def test_generated_cases(number: int) -> None:
    scaled_cases.run(scaled_cases.generate(number), "cuda")


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_value_of_an_operand(dtype: torch.dtype, family: str) -> None:
    scaled_cases.check_every_pattern(dtype, "cuda", family=family)


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_odd_scales_of_blocks(family: str) -> None:
    scaled_cases.check_odd_block_scales("cuda", family=family)


DECIBELS = {(E4M3, E4M3): 28.0, (E4M3, E5M2): 24.0, (E5M2, E4M3): 24.0}
"""The error of a product of N(0, 1) data beside those of both operands, whatever the scales."""


@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128")], ids=str)
@pytest.mark.parametrize("dtypes", DECIBELS, ids=str)
def test_against_the_product_before_quantisation(dtypes: tuple, kinds: tuple) -> None:
    m, n, k = 384, 512, 2048
    a, b = (normal((rows, k), torch.bfloat16, seed=i, device="cuda") for i, rows in enumerate((m, n)))
    (a8, scale_a), (b8, scale_b) = (
        kernels_dsl.quantize(x, dtype, scaling=kind) for x, dtype, kind in zip((a, b), dtypes, kinds)
    )
    found = scaled_gemm(a8, b8.mT, scale_a, scale_b.mT if scale_b.dim() else scale_b)
    left = quantization.signal_to_noise(found, a.double() @ b.double().mT)
    assert DECIBELS[dtypes] < left < DECIBELS[dtypes] + 4


def _table() -> list:
    tables = {
        "fast": SM90_FP8_CANDIDATES,
        "promoted": SM90_FP8_PROMOTED_CANDIDATES,
        "block": SM90_FP8_SCALED_CANDIDATES,
    }
    made = [(f"{name} {i}", c.config, name) for name, table in tables.items() for i, c in enumerate(table)]
    made.append(("a scale a column", Sm90GemmConfig(128, 128), "columns"))
    return [pytest.param(config, scales, id=name) for name, config, scales in made]


@pytest.mark.parametrize(("config", "scales"), _table())
def test_every_configuration_is_exact(config: Sm90GemmConfig, scales: str) -> None:
    m, n, k = 1000, 776, 528
    a = integers((m, k), E4M3, seed=1, device="cuda")
    b = integers((n, k), E5M2, seed=2, device="cuda").mT
    groups, of_n = -(-k // 128), -(-n // 128) if scales == "block" else n
    shapes = ((m, groups), (groups, of_n)) if scales in ("block", "columns") else ((m, 1), (1, n))
    scale_a, scale_b = torch.full(shapes[0], 0.5, device="cuda"), torch.full(shapes[1], 4.0, device="cuda")
    scale_a[::3] = 2.0
    options = {"config": config, "use_fast_accum": scales == "fast"}
    reason = scaled_gemm_supports(a, b, scale_a, scale_b, **options)
    assert reason is None, reason
    out = poisoned((m, n), torch.float32, device="cuda")
    scaled_gemm(a, b, scale_a, scale_b, out=out.tensor, **options)
    check_output(out)
    tolerance.check_exact(out.tensor, 4 * scale_a[:, :1].double() * (a.double() @ b.double()))


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(("cluster", "tile_m"), [((2, 1), 128), ((1, 1), 64), ((1, 2), 128)], ids=str)
def test_tiles_cut_along_k(cluster: tuple[int, int], tile_m: int, blocks: bool) -> None:
    """Exact sums of pieces: of a wave more, of less than a wave, and of tiles that end beyond D."""
    config = Sm90GemmConfig(tile_m, 128, cluster_m=cluster[0], cluster_n=cluster[1], stream_k=True)
    for m, n, k in ((4096, 2176, 1024), (1000, 776, 4000), (4096, 4096, 2048)):
        scaled_cases.check_integers(m, n, k, "cuda", blocks, config=config)


@pytest.mark.parametrize(
    ("size", "blocks"),
    [((2560, 2560, 4096), True), ((2048, 2304, 8192), True), ((2560, 2560, 8192), False)],
    ids=str,
)
def test_tiles_that_the_table_has_cut_along_k(size: tuple[int, int, int], blocks: bool) -> None:
    promotion = Promotion(1, 128) if blocks else Promotion()
    problem = GemmProblem(*size, ab_type="fp8", d_type="fp32", b_k_major=True, promotion=promotion)
    chosen = choose(problem, H200, "sm90")
    assert isinstance(chosen, Sm90GemmConfig) and chosen.stream_k
    scaled_cases.check_integers(*size, "cuda", blocks)


def test_tiles_cut_along_k_have_the_same_bits_each_time() -> None:
    """Whoever of a tile's clusters is the last one; also on another stream and in a graph."""
    sizes, kinds = ((3000, 4096), (2176, 4096)), ("1x128", "128x128")
    (a, scale_a), (b, scale_b) = (
        kernels_dsl.quantize(normal(size, torch.bfloat16, seed=seed, device="cuda"), scaling=kind)
        for seed, (size, kind) in enumerate(zip(sizes, kinds))
    )
    config = Sm90GemmConfig(128, 128, cluster_m=2, stream_k=True)

    def call() -> torch.Tensor:
        return scaled_gemm(a, b.mT, scale_a, scale_b.mT, config=config)

    expected = call()
    assert all(torch.equal(call(), expected) for _ in range(50))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(call(), expected)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
    for _ in range(5):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
def test_beside_torch(kind: str, dtypes: tuple, fast: bool) -> None:
    """At most twice PyTorch's error, with the same operands, scales and accumulation."""
    for m, n, k in ((512, 1024, 4096), (4096, 256, 16384)):
        (a, scale_a), (b, scale_b) = (
            kernels_dsl.quantize(normal(shape, torch.float32, seed=i, device="cuda"), dtypes[i], scaling=kind)
            for i, shape in enumerate(((m, k), (n, k)))
        )
        arguments = (a, b.mT, scale_a, scale_b.mT if kind == "row" else scale_b)
        try:
            peer = torch._scaled_mm(*arguments, out_dtype=torch.bfloat16, use_fast_accum=fast)
        except RuntimeError as error:
            pytest.skip(f"torch._scaled_mm: {error}")
        found = scaled_gemm(*arguments, use_fast_accum=fast)
        tolerance.check(found, reference.scaled_gemm(*arguments), peer)


def test_block_scales_beside_torch() -> None:
    """PyTorch's convention is ours: (M, G) with contiguous M, and (G, N / 128)."""
    m, n, k = 512, 1024, 4096
    a, scale_a = kernels_dsl.quantize(normal((m, k), torch.bfloat16, seed=1, device="cuda"), scaling="1x128")
    b, scale_b = kernels_dsl.quantize(
        normal((n, k), torch.bfloat16, seed=2, device="cuda"), scaling="128x128"
    )
    arguments = (a, b.mT, scale_a, scale_b.mT)
    found = scaled_gemm(*arguments)
    exact = reference.scaled_gemm(*arguments, groups=((1, 128), (128, 128)))
    model = reference.as_tensor_cores(*arguments, groups=((1, 128), (128, 128)), out_dtype=torch.bfloat16)
    tolerance.check(found, exact, model)
    try:
        peer = torch._scaled_mm(*arguments, out_dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"torch._scaled_mm: {error}")
    tolerance.check(found, exact, peer)


def test_the_largest_magnitude() -> None:
    """With several tiles, in a graph too; the same bits each time."""
    m, n, k = 1000, 776, 528
    a = integers((m, k), E4M3, seed=1, device="cuda")  # exact sums, whichever the split of K
    b = integers((n, k), E4M3, seed=2, device="cuda").mT
    scale_a, scale_b = torch.full((m, 1), 0.5, device="cuda"), torch.full((1, n), 2.0, device="cuda")
    bias = torch.full((n,), -3.0, device="cuda")
    for config in (None, *dict.fromkeys(c.config for c in SM90_FP8_CANDIDATES[::15])):
        options = {"bias": bias, "config": config, "use_fast_accum": True}
        amax = torch.full((1,), torch.nan, device="cuda")
        exact = scaled_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32, **options)
        found = scaled_gemm(
            a, b, scale_a, scale_b, out_dtype=E4M3, scale_result=torch.full((), 0.5, device="cuda"),
            amax=amax, **options,
        )  # fmt: skip
        assert amax.item() == exact.abs().max().item(), str(config)
        assert torch.equal(found.float(), (exact * 0.5).to(E4M3).float())
    scaled_gemm(a, b, scale_a, scale_b, amax=amax, **options)
    amax.fill_(1e4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled_gemm(a, b, scale_a, scale_b, amax=amax, **options)
    for _ in range(3):
        graph.replay()
    assert amax.item() == exact.abs().max().item()
    a.view(torch.uint8)[5, 5] = 0x7F  # NaN
    graph.replay()
    assert amax.isnan().all()


def test_graph_stream_and_compile() -> None:
    a, scale_a = kernels_dsl.quantize(
        normal((256, 512), torch.bfloat16, seed=1, device="cuda"), scaling="row"
    )
    b, scale_b = kernels_dsl.quantize(
        normal((384, 512), torch.bfloat16, seed=2, device="cuda"), scaling="row"
    )
    bias = normal((384,), torch.bfloat16, seed=3, device="cuda")

    def call() -> torch.Tensor:
        return kernels_dsl.scaled_gemm(a, b.mT, scale_a, scale_b.mT, bias=bias, activation="gelu")

    expected = call()
    assert torch.equal(torch.compile(call, fullgraph=True)(), expected)
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    for _ in range(20):
        assert torch.equal(call(), expected)  # the same bits each time
