"""Block-sparse products on a GPU: generated cases, determinism, sizes past 2**31, and life inside PyTorch.

TEST_BSR_CASES sets how many cases are generated for each family of kernels (default 60).
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

from kernels_dsl.measure import host_us
from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.ops.bsr.scaled import bsr_scaled_gemm
from kernels_dsl.sparse.tensor import BsrTensor
from reference.bsr import random_bsr
from tests.ops.bsr import bsr_cases

pytestmark = pytest.mark.gpu
FAMILIES = [pytest.param("sm90", marks=pytest.mark.sm90), "sm80"]
CASES = int(os.environ.get("TEST_BSR_CASES", "60"))
BF16 = torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(CASES))
def test_generated_cases(family: str, number: int) -> None:
    case = bsr_cases.generate(number, family)
    bsr_cases.run(case, "cuda")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(1000, 1000 + CASES // 4))
def test_normal_values(family: str, number: int) -> None:
    case = replace(bsr_cases.generate(number, family), pattern="power_law", linear=False, sorted_columns=True)
    bsr_cases.run(case, "cuda", exact=False)


@pytest.mark.parametrize("number", range(2000, 2000 + CASES // 3))
def test_generated_sampled_products(number: int) -> None:
    draw = random.Random(number)
    bsr_cases.run_sampled(bsr_cases.generate(number, None), draw.choice((0, 1, 30, 72, 300)), "cuda")


def _random(block=(64, 64), grid=(16, 16), kept=5, pattern="power_law") -> BsrTensor:
    return bsr_cases.sparse_of(random_bsr(pattern, grid, block, kept, exact=False, device="cuda"))


@pytest.mark.sm90
@pytest.mark.parametrize(("extent", "kept"), [(16, 40), (32, 40), (64, 15)])
def test_sampled_products_whose_tiles_share_rows(extent: int, kept: int) -> None:
    """Rows of all lengths, more of them than are worked on together: neighbours' last tiles may be empty."""
    case = bsr_cases.Case("power_law", (140, 60), (extent, extent), 0, kept=kept, columns_contiguous=True)
    bsr_cases.run_sampled(case, 328, "cuda")


@pytest.mark.parametrize("block", [(16, 16), (64, 64), (128, 128)], ids=str)
def test_results_repeat_bit_for_bit(block: tuple[int, int]) -> None:
    sparse = _random(block)
    b = torch.randn(sparse.shape[1], 1000, device="cuda", dtype=BF16)
    g = torch.randn(sparse.shape[0], 1000, device="cuda", dtype=BF16)
    first = (bsr_gemm(sparse, b), bsr_gemm(sparse.t(), g), bsr_sddmm(g, b.t(), sparse).values)
    for _ in range(20):
        again = (bsr_gemm(sparse, b), bsr_gemm(sparse.t(), g), bsr_sddmm(g, b.t(), sparse).values)
        assert all(torch.equal(x, y) for x, y in zip(first, again))


@pytest.mark.sm90
@pytest.mark.parametrize(
    "case",
    [
        bsr_cases.Case("one_heavy_row", (3, 128), (32, 32), 264, kept=1, linear=True),
        bsr_cases.Case("one_heavy_row", (5, 64), (128, 64), 520, kept=0, batch=(True, True)),
        bsr_cases.Case("one_heavy_row", (3, 32), (64, 128), 40, kept=1, form="b at", out_dtype=torch.float32),
        bsr_cases.Case("full", (128, 2), (32, 64), 200, form="at b", dtype=torch.float16),
        bsr_cases.Case("full", (64, 2), (64, 16), 136, form="b a", pad=1),
    ],
    ids=str,
)
def test_long_lists_come_in_pieces(case: bsr_cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = bsr_cases.memory_of_pieces(monkeypatch)
    bsr_cases.run(replace(case, family="sm90"), "cuda")
    bsr_cases.check_pieces(given)


@pytest.mark.sm90
@pytest.mark.parametrize("block", [(32, 32), (128, 64)], ids=str)
def test_sums_of_pieces_repeat_bit_for_bit(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams side by side, and in a graph."""
    sparse = _random(block, (40, 8192 // block[1]), 1, "one_heavy_row")
    b = torch.randn(sparse.shape[1], 520, device="cuda", dtype=BF16)
    given = bsr_cases.memory_of_pieces(monkeypatch)
    first = bsr_gemm(sparse, b)
    bsr_cases.check_pieces(given)
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            found.append(bsr_gemm(sparse, b))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found += [bsr_gemm(sparse, b), bsr_gemm(sparse, b)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, first) for x in found)


@pytest.mark.parametrize("form", bsr_cases.FORMS)
def test_gradients(form: str) -> None:
    """Against autograd through the dense matrix, in float64, on integers: bit for bit before rounding."""
    matrix = random_bsr("power_law", (5, 6), (32, 48), 2, device="cuda")
    left, transposed = form.startswith("b"), form.startswith("at") or form.endswith("t")
    rows, columns = matrix.shape[::-1] if transposed else matrix.shape
    values = matrix.values.clone().requires_grad_()
    dense = (
        torch.randint(-2, 3, (40, rows) if left else (columns, 40), device="cuda").to(BF16).requires_grad_()
    )
    sparse = BsrTensor(matrix.crow, matrix.col, values, matrix.shape)
    factor = sparse.t() if transposed else sparse
    out = bsr_gemm(*((dense, factor) if left else (factor, dense)), activation="relu")
    weight = torch.randint(-2, 3, out.shape, device="cuda")
    out.backward(weight.to(BF16))
    exact = [x.detach().double().requires_grad_() for x in (values, dense)]
    rows_of = torch.repeat_interleave(torch.arange(5, device="cuda"), matrix.crow.diff())
    full = torch.zeros(30, 32, 48, dtype=torch.float64, device="cuda")
    full = full.index_add(0, rows_of * 6 + matrix.col, exact[0])
    full = full.view(5, 6, 32, 48).transpose(1, 2).reshape(matrix.shape)
    full = full.mT if transposed else full
    torch.relu(exact[1] @ full if left else full @ exact[1]).backward(weight.double())
    assert torch.equal(values.grad, exact[0].grad.to(BF16))
    assert torch.equal(dense.grad, exact[1].grad.to(BF16))


def test_torch_compile_and_graphs() -> None:
    sparse = _random()
    b = torch.randn(sparse.shape[1], 264, device="cuda", dtype=BF16)
    expected = bsr_gemm(sparse, b, activation="relu") + 1
    function = torch.compile(lambda s, x: bsr_gemm(s, x, activation="relu") + 1, fullgraph=True)
    assert torch.equal(function(sparse, b), expected)
    graph = torch.cuda.CUDAGraph()
    bsr_gemm(sparse, b)
    with torch.cuda.graph(graph):
        out = bsr_gemm(sparse, b)
    b.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, bsr_gemm(sparse, b))


@pytest.mark.sm90
@pytest.mark.parametrize("pattern", ["power_law", "empty_rows"])
@pytest.mark.parametrize("transposed", [False, True])
def test_wide_tiles(pattern: str, transposed: bool) -> None:
    """Large enough for tiles of 64 x 512, with an edge within one; integers, bit for bit."""
    sparse = bsr_cases.sparse_of(random_bsr(pattern, (104, 104), (64, 64), 11, seed=7, device="cuda"))
    b = torch.randint(-3, 4, (104 * 64, 4000), device="cuda").to(BF16)
    factor = sparse.t() if transposed else sparse
    out = torch.full((104 * 64, 4000), float("nan"), device="cuda", dtype=torch.float32)
    bsr_gemm(factor, b, out=out)
    assert torch.equal(out, factor.to_dense().float() @ b.float())


@pytest.mark.sm90
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("extent", [32, 48])
def test_small_blocks_in_pairs(extent: int, transposed: bool) -> None:
    """X A and X Aᵀ, with a last tile that D does not fill; integers, bit for bit."""
    sparse = random_bsr("power_law", (130, 130), (extent, extent), 13, seed=8, device="cuda")
    factor = bsr_cases.sparse_of(sparse)
    factor = factor.t() if transposed else factor
    x = torch.randint(-3, 4, (2000, 130 * extent), device="cuda").to(BF16)
    out = torch.full((2000, 130 * extent), float("nan"), device="cuda", dtype=torch.float32)
    bsr_gemm(x, factor, out=out)
    assert torch.equal(out, x.float() @ factor.to_dense().float())


def test_launches_on_several_streams_at_a_time() -> None:
    """Each stream has its own counter of work items, a graph one of its own, ready for the next launch."""
    sparse = _random((64, 64), (48, 40), 9)
    b = torch.randn(sparse.shape[1], 1032, device="cuda", dtype=BF16)
    expected = bsr_gemm(sparse, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bsr_gemm(sparse, b)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(8):
        graph.replay()
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(bsr_gemm(sparse, b))
    torch.cuda.synchronize()
    assert torch.equal(captured, expected) and all(torch.equal(x, expected) for x in results)


def test_linear_layer_trains_and_compiles() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 256, dtype=BF16, device="cuda")
    layer = BsrLinear.from_linear(linear, (32, 32), density=0.3)
    x = torch.randn(64, 512, device="cuda", dtype=BF16)
    target = torch.randn(64, 256, device="cuda", dtype=BF16)
    compiled = torch.compile(layer, fullgraph=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        loss = torch.nn.functional.mse_loss((compiled if step % 2 else layer)(x).float(), target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_lists_are_made_without_waiting_for_the_gpu() -> None:
    matrix = random_bsr("power_law", (64, 64), (16, 16), 9, device="cuda")
    b = torch.randn(1024, 128, device="cuda", dtype=BF16)
    bsr_gemm(bsr_cases.sparse_of(matrix), b)
    bsr_gemm(bsr_cases.sparse_of(matrix).t(), b)
    again = BsrTensor(matrix.crow.clone(), matrix.col.clone(), matrix.values, matrix.shape)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bsr_gemm(again, b)
        bsr_gemm(again.t(), b)
        BsrTensor.top_k(b, (16, 16), 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_two_to_the_31_elements() -> None:
    """Values of 2**31 elements and more, and a result of as many."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GB")
    rows, columns, extent = 130, 64, 512
    nnz = rows * columns  # 2.18e9 elements
    values = torch.zeros(nnz, extent, extent, device="cuda", dtype=BF16)
    values[-1] = torch.eye(extent, device="cuda", dtype=BF16)
    crow = torch.arange(rows + 1, device="cuda") * columns
    col = torch.arange(columns, device="cuda").repeat(rows)
    sparse = BsrTensor(crow, col, values, (rows * extent, columns * extent))
    b = torch.randn(columns * extent, 64, device="cuda", dtype=BF16)
    d = bsr_gemm(sparse, b)
    assert torch.equal(d[-extent:], b[-extent:]) and not d[:-extent].any()
    del values, sparse, d
    small = _random((128, 128), (520, 1), 1, "full")  # 66560 rows
    wide = torch.zeros(128, 32776, device="cuda", dtype=BF16)
    wide[:, -8:] = torch.randn(128, 8, device="cuda", dtype=BF16)
    d = bsr_gemm(small, wide)
    assert d.numel() > 1 << 31
    expected = small.values[-1].float() @ wide[:, -8:].float()
    torch.testing.assert_close(d[-128:, -8:].float(), expected, rtol=1e-2, atol=1e-1)
    assert not d[:, :-8].any()


@pytest.mark.alone
def test_host_time(record_property) -> None:
    """Eager calls take at most 10 us on the host; the bound leaves room for a slower one."""
    sparse = _random((64, 64), (4, 8), 2)
    b = torch.randn(512, 256, device="cuda", dtype=BF16)
    out = bsr_gemm(sparse, b)
    microseconds = host_us(lambda: bsr_gemm(sparse, b, out=out))
    record_property("host_us", microseconds)
    assert microseconds < 15


@pytest.mark.sm90
def test_many_short_lists_with_plain_stores() -> None:
    """Items come as fast as clusters can pass them on, while stores keep shared memory busy: warps of a
    warpgroup took different items, as a slot was overwritten before all had read it."""
    generator = torch.Generator("cuda").manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator, device="cuda").float()

    values = integers(2, 3, 256, 512).to(torch.float8_e4m3fn)
    crow, col = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 3], [0, 1, 2]))
    matrix = BsrTensor(crow, col, values, (256, 1536))
    x, ones = integers(2, 4096, 256).to(torch.float8_e5m2), torch.ones(2, 3, device="cuda")
    whole = values.float().transpose(1, 2).reshape(2, 256, 1536)
    expected = (x.float() @ whole).bfloat16()
    for _ in range(10):
        out = torch.full((4096, 1536, 2), torch.nan, device="cuda", dtype=torch.bfloat16).permute(2, 0, 1)
        bsr_scaled_gemm(x, matrix, torch.ones((), device="cuda"), ones, out=out, family="sm90")
        assert torch.equal(out, expected)
