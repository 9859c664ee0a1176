"""`quantize` on a GPU, bit for bit: every pattern, awkward values and shapes, graphs, torch.compile."""

from __future__ import annotations

import random

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops.quantize import kernels as quantize_kernels
from kernels_dsl.ops.quantize.arguments import SCALINGS
from reference import quantize as ref
from reference.inputs import case_seed
from tests.ops.quantize.quantize_cases import assert_same, awkward, check, check_into

pytestmark = pytest.mark.gpu
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def _fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype, source):
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(source).view(512, 128).cuda()
    check(x, dtype, scaling="tensor", scale=torch.ones((), device="cuda"), transpose="both")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float32(dtype):
    """As PyTorch converts what has been clamped; NaN becomes NaN."""
    one, limit, step = torch.ones((), device="cuda"), torch.finfo(dtype).max, 1 << 27
    for first in range(-(1 << 31), 1 << 31, step):
        x = torch.arange(first, first + step, dtype=torch.int64, device="cuda").int().view(torch.float32)
        found = kernels_dsl.quantize(x.view(-1, 1 << 14), dtype, scaling="tensor", scale=one)[0].view(-1)
        expected = x.clamp(-limit, limit).to(dtype)
        same = found.view(torch.uint8) == expected.view(torch.uint8)
        assert bool((same | (x.isnan() & found.isnan())).all()), first


def _generated(count: int) -> list[dict]:
    """Calls drawn at random, all of it from one seed."""
    draw = random.Random(case_seed("quantize"))
    sizes = [1, 7, 16, 127, 128, 129, 500, 1024, 2048 + 24, 5000]
    return [
        {
            "lead": draw.choice([(), (), (3,), (2, 3), (2, 1, 2)]),
            "size": (draw.choice(sizes[:8]), draw.choice(sizes)),
            "source": draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
            "dtype": draw.choice(DTYPES),
            "scaling": draw.choice(SCALINGS),
            "transpose": draw.choice([False, True, "both"]),
            "view": draw.choice(["plain", "plain", "column major", "slice", "every second"]),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("case", _generated(60), ids=lambda case: "-".join(map(str, case.values())))
def test_generated(case, seed):
    rows, columns = case["size"]
    lead, view = case["lead"], case["view"]
    if view == "column major":
        x = awkward((*lead, columns, rows), seed, case["source"]).cuda().mT
    elif view == "plain":
        x = awkward((*lead, rows, columns), seed, case["source"]).cuda()
    else:
        wide = awkward((*lead, rows, 2 * columns + 3), seed, case["source"]).cuda()
        x = wide[..., 3 : 3 + columns] if view == "slice" else wide[..., : 2 * columns : 2]
    check(x, case["dtype"], scaling=case["scaling"], transpose=case["transpose"])
    check_into(x, case["dtype"], scaling=case["scaling"], transpose=case["transpose"])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_into_the_same_again(scaling, seed):
    """The call that is found by comparison looks at the memory, too; in a graph and under torch.compile."""
    sources = [awkward((256, 384), seed + n, torch.bfloat16).cuda() for n in range(4)]
    expected = [kernels_dsl.quantize(x, scaling=scaling, transpose="both") for x in sources]
    out = check_into(sources[0], scaling=scaling, transpose="both")
    call = lambda x: kernels_dsl.quantize(x, scaling=scaling, transpose="both", out=out)  # noqa: E731
    for _ in range(2):
        for x, wanted in zip(sources[1:3], expected[1:3]):
            assert call(x) is out
            for a, b in zip(out, wanted):
                assert_same(a, b, scaling)
    for n in (0, 2):  # an x of the same shape over an output
        place = torch.empty(2 * 256 * 384, dtype=torch.uint8, device="cuda")
        over = place[: 256 * 384].view(out[n].dtype).view(out[n].shape)
        with pytest.raises(ValueError, match=rf"out\[{n}\] shares memory with x"):
            x = place.view(torch.bfloat16).view(256, 384)
            shared = tuple(over if m == n else t for m, t in enumerate(out))
            kernels_dsl.quantize(x, scaling=scaling, transpose="both", out=shared)
    with torch.cuda.stream(torch.cuda.Stream()):
        static = sources[0].clone()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(static)
    static.copy_(sources[3])
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(out, expected[3]):
        assert_same(a, b, "graph")
    torch.compile(call, fullgraph=True)(sources[1])
    for a, b in zip(out, expected[1]):
        assert_same(a, b, "torch.compile")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_graph_compile_and_stream(scaling, seed):
    x = awkward((260, 384), seed, torch.bfloat16).cuda()
    expected = kernels_dsl.quantize(x, scaling=scaling, transpose="both")
    compiled = torch.compile(
        lambda x: kernels_dsl.quantize(x, scaling=scaling, transpose="both"), fullgraph=True
    )(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        kernels_dsl.quantize(x, scaling=scaling, transpose="both")
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernels_dsl.quantize(x, scaling=scaling, transpose="both")
    x.copy_(x.clone())
    graph.replay()
    torch.cuda.synchronize()
    for a, b, c in zip(expected, compiled, captured):
        assert_same(b, a, "torch.compile")
        assert_same(c, a, "graph")


@pytest.mark.parametrize("columns", [16400, 40000, 100004, 262144, 300001])
def test_rows_of_clusters(columns, seed):
    check(awkward((5, columns), seed, torch.bfloat16).cuda(), scaling="row")
    check(awkward((3, columns), seed, torch.float32).cuda(), torch.float8_e5m2, scaling="row")


@pytest.mark.parametrize("shape", [(9001, 2000), (2, 1100, 8801), (1500, 12000)])
def test_rows_of_both_outputs_of_large_tensors(shape, seed, monkeypatch):
    """A pass over rows, then one over tiles; some rows unaligned. Few SMs, so that they count as large."""
    real = quantize_kernels.line_quantization
    few = lambda format, shape, device, size: real(format, shape, (24, device[1]), size)  # noqa: E731
    monkeypatch.setattr(quantize_kernels, "line_quantization", few)
    check(awkward(shape, seed, torch.bfloat16).cuda(), scaling="row", transpose="both")


@pytest.mark.parametrize("shape", [(2, 700, 100, 64), (3, 2000, 17, 88), (1, 8200, 9, 256), (900, 17, 904)])
def test_many_matrices_in_one_read(shape, seed):
    """Strided heads, some of partial items, rows that items begin within."""
    check(awkward(shape, seed, torch.float16).cuda().transpose(-3, -2), torch.float8_e5m2, scaling="matrix")


def test_three_tensors_in_one_launch(seed):
    """Q, K and V of grouped heads, K and V beside each other in memory; many calls, one after the other."""
    q = awkward((2, 1000, 24, 64), seed, torch.bfloat16).cuda()
    both = awkward((2, 1000, 2, 6, 64), seed + 1, torch.bfloat16).cuda()
    found = [kernels_dsl.quantize_qkv(q * n, both[:, :, 0] * n, both[:, :, 1]) for n in (1, 2, 4, 8)]
    for n, made in zip((1, 2, 4, 8), found):
        for name, x in (("q", q * n), ("k", both[:, :, 0] * n), ("v", both[:, :, 1])):
            values, scales = ref.quantize(x.transpose(1, 2).cpu(), torch.float8_e4m3fn, scaling="matrix")
            assert_same(made[name].transpose(1, 2), values, name)
            assert_same(made[f"{name}_descale"], scales, f"{name}, scales")


def test_repeated_calls_of_one_read():
    """Launches that share a workspace, right behind each other, with other data each."""
    found = []
    for n in range(20):
        x = torch.arange(n + 1, n + 241, device="cuda").bfloat16().view(8, 30, 1, 1).expand(-1, -1, 600, 64)
        found.append((x[:, :, 0, 0], *kernels_dsl.quantize(x.contiguous(), scaling="matrix")))
    for expected, values, scales in found:
        wanted = ref.scale_of(expected.float().cpu(), values.dtype)
        assert torch.equal(scales.view(8, 30).cpu(), wanted) and bool((values.float() == 448).all())


def test_repeated_calls_of_two_passes(seed):
    """Kernels that start beside the end of those before, many times over changing data."""
    small, large, lines = (1024, 1536), (4352, 4096), (6000, 9000)
    for scaling, shape in (("tensor", small), ("row", small), ("tensor", large), ("row", lines)):
        for n in range(20):
            x = torch.full(shape, float(n + 1), device="cuda").bfloat16()
            values, scales, _, turned = kernels_dsl.quantize(x, scaling=scaling, transpose="both")
            expected = ref.scale_of(torch.tensor(float(n + 1)), values.dtype)
            assert bool((scales.cpu() == expected).all()) and bool((turned.cpu() == expected).all())
            assert bool((values.float() == 448).all())


def test_launches_of_two_streams_at_once():
    """Launches that need the whole GPU, whose CTAs wait for each other, beside each other."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.full((2048, 2048), float(n + 1), device="cuda").bfloat16() for n in range(2)]
    torch.cuda.synchronize()
    found: list[list] = [[], []]
    for _ in range(30):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(kernels_dsl.quantize(inputs[n], scaling="row", transpose="both"))
    torch.cuda.synchronize()
    for n, results in enumerate(found):
        expected = ref.scale_of(torch.tensor(float(n + 1)), torch.float8_e4m3fn)
        for values, scales, turned, turned_scales in results:
            assert bool((values.float() == 448).all()) and bool((turned.float() == 448).all())
            assert bool((scales.cpu() == expected).all()) and bool((turned_scales.cpu() == expected).all())


def test_more_than_two_to_the_31_elements():
    x = torch.ones((1 << 18, 8192 + 128), dtype=torch.bfloat16, device="cuda")
    x[-1, -128:] = 3.0
    values, scales = kernels_dsl.quantize(x, scaling="1x128")
    assert float(scales[-1, -1]) == float(ref.scale_of(torch.tensor(3.0), values.dtype))
    assert bool((values[-1, :].float() == 448).all()) and bool((scales[:-1] == scales[0, 0]).all())


def test_torch_takes_the_operands():
    """The layouts are those of `torch._scaled_mm`, tensor- and row-wise."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator, device="cuda").bfloat16() for _ in range(2))
    exact = a.double() @ b.double().T
    for scaling in ("tensor", "row"):
        (qa, sa), (qb, sb) = (kernels_dsl.quantize(t, scaling=scaling) for t in (a, b))
        sb = sb.mT if scaling == "row" else sb
        found = torch._scaled_mm(qa, qb.mT, sa, sb, out_dtype=torch.bfloat16)
        assert ref.signal_to_noise(found.double(), exact) > 28
