"""`quantize` without a GPU: its compiled PTX in the emulator, against the definition, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.quantize import (
    LineQuantization,
    MatrixQuantization,
    OneLaunch,
    RowQuantization,
    division_of,
)
from kernels_dsl.ops.quantize import kernels as quantize_kernels
from kernels_dsl.ops.quantize.arguments import SCALINGS
from lowering import emulator
from reference import quantize as ref
from tests.ops.quantize.quantize_cases import assert_same, awkward, check, check_into

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a"):
        yield


@pytest.mark.parametrize("scaling", SCALINGS)
def test_values_and_transpose_of_ragged_matrices(scaling, seed):
    check(awkward((130, 200), seed, torch.bfloat16), scaling=scaling, transpose="both")


@pytest.mark.parametrize("scaling", ["row", "1x128"])
def test_batches_with_unaligned_rows(scaling, seed):
    x = awkward((2, 2, 17, 131), seed, torch.bfloat16)
    check(x, scaling=scaling)
    check(x.mT, scaling=scaling)  # the contiguous mode is M: the transpose of the kernel's transpose


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype, source):
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(source).view(512, 128)
    check(x, dtype, scaling="tensor", scale=torch.ones(()))


@pytest.mark.parametrize("scale", [0.0, 2.0**-140, torch.inf])
def test_scales_given_whose_reciprocal_is_none(scale, seed):
    """Zero, infinity and subnormal numbers: what arithmetic of float32 makes of them."""
    check(awkward((5, 140), seed, torch.bfloat16), scaling="tensor", scale=torch.tensor(scale))


def test_float32_and_strides(seed):
    base = awkward((40, 2, 264), seed, torch.float32)
    check(base[:, 1, 4:260], scaling="128x128")
    check(base[:, 0, ::2], scaling="1x128")


def test_rows_that_a_cluster_holds(seed):
    check(awkward((2, 16384 + 260), seed, torch.bfloat16), torch.float8_e5m2, scaling="row")


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_rows_longer_than_all_registers(seed, arch, monkeypatch):
    def read_twice(format, columns, hopper, bytes_each):
        return RowQuantization(format, 256, 0, 2 if hopper else 1, hopper)

    monkeypatch.setattr(quantize_kernels, "row_quantization", read_twice)
    with emulator.run(arch=arch):
        check(awkward((2, 9003), seed, torch.bfloat16), scaling="row")


@pytest.mark.parametrize("shape", [(3, 32), (2, 5, 1024), (2, 144, 128)])
def test_small_tensors_are_one_row(shape, seed):
    check(awkward(shape, seed, torch.bfloat16), scaling="tensor")


def test_maxima_of_many_matrices_become_fewer(seed, monkeypatch):
    monkeypatch.setattr(quantize_kernels, "one_launch", lambda *_: None)
    monkeypatch.setattr(quantize_kernels, "MANY_PARTS", 4)
    check(awkward((3, 2, 2, 40), seed, torch.float16), scaling="tensor", transpose="both")


@pytest.mark.parametrize(
    ("scaling", "transpose", "shape", "dtype"),
    [
        ("row", "both", (140, 270), torch.bfloat16),
        ("row", True, (2, 20, 200), torch.float32),
        ("matrix", False, (4, 20, 140), torch.bfloat16),  # more matrices than CTAs
        ("tensor", "both", (2, 20, 300), torch.float16),
    ],
)
def test_one_launch_of_few_ctas(scaling, transpose, shape, dtype, seed, monkeypatch):
    """CTAs with several tiles, of which they keep some, that wait for each other; all of them run at once."""

    def three_ctas(kinds, matrices, tiles, device, bytes_each):
        return OneLaunch(3, 1, matrices > 3), division_of(matrices, tiles, 3)

    monkeypatch.setattr(quantize_kernels, "one_launch", three_ctas)
    with emulator.run(arch="sm_90a", seed=seed, resident=1) as session:
        check(awkward(shape, seed, dtype), scaling=scaling, transpose=transpose)
    (launch,) = session.launches
    assert launch.attributes["cooperative"] and launch.grid[0] in (2, 3) and not session.reports


@pytest.mark.parametrize(
    ("scaling", "transpose", "shape"),
    [("row", "both", (2, 130, 200)), ("row", True, (100, 200)), ("matrix", False, (2, 40, 24))],
)
def test_a_tile_for_each_cta_of_a_cluster(scaling, transpose, shape, seed):
    with emulator.run(arch="sm_90a", seed=seed) as session:
        check(awkward(shape, seed, torch.bfloat16), scaling=scaling, transpose=transpose)
    (launch,) = session.launches
    tiles = math.prod(shape[:-2]) * -(-shape[-2] // 128) * -(-shape[-1] // 128)
    assert launch.cluster[0] == launch.grid[0] == tiles and not session.reports
    assert not launch.attributes.get("cooperative")


@pytest.mark.parametrize(("shape", "arch"), [((5, 2060), "sm_90a"), ((2, 1, 7, 130), "sm_89")])
def test_rows_then_columns(shape, arch, seed, monkeypatch):
    """A pass over rows that leaves maxima of columns, a pass over tiles; CTAs of 3 rows."""

    def by_rows(format, shape, device, bytes_each):
        vectors = -(-shape[2] // 2048)
        return LineQuantization(format, 256, vectors, 3 - vectors, vectors == 2, device[1]), 3

    monkeypatch.setattr(quantize_kernels, "line_quantization", by_rows)
    with emulator.run(arch=arch) as session:
        check(awkward(shape, seed, torch.bfloat16), scaling="row", transpose="both")
    assert len(session.launches) == 3 and not session.reports


def two_ctas(format, *_):
    """A stand-in for `matrix_quantization`, for CTAs that have many small items."""
    return MatrixQuantization(format, 1, 2, 3, 2, True), 2


def test_three_tensors_in_one_launch(seed, monkeypatch):
    """Q, K and V of grouped heads; K's and V's rows are parts of others."""
    monkeypatch.setattr(quantize_kernels, "matrix_quantization", two_ctas)
    both = awkward((1, 24, 2, 2, 88), seed, torch.bfloat16)
    q = awkward((1, 24, 3, 88), seed + 1, torch.bfloat16)
    with emulator.run(arch="sm_90a", seed=seed, resident=1) as session:
        found = kernels_dsl.quantize_qkv(q, both[:, :, 0], both[:, :, 1])
    assert len(session.launches) == 1 and not session.reports
    for name, x in (("q", q), ("k", both[:, :, 0]), ("v", both[:, :, 1])):
        values, scales = ref.quantize(x.transpose(1, 2), torch.float8_e4m3fn, scaling="matrix")
        assert_same(found[name].transpose(1, 2), values, name)
        assert_same(found[f"{name}_descale"], scales, f"{name}, scales")


@pytest.mark.parametrize(("heads", "rows", "columns"), [(2, 70, 64), (3, 20, 80), (2, 3, 264)])
def test_matrices_in_one_read(heads, rows, columns, seed, monkeypatch):
    """CTAs that wait for each other's maxima, with items of several rows, strided heads, the last in part."""

    monkeypatch.setattr(quantize_kernels, "matrix_quantization", two_ctas)
    x = awkward((2, rows, heads, columns), seed, torch.bfloat16).transpose(1, 2)
    with emulator.run(arch="sm_90a", seed=seed, resident=1) as session:
        check(x, scaling="matrix")
    (launch,) = session.launches
    assert launch.attributes["cooperative"] and launch.grid[0] == 2 and not session.reports


def test_negated_views(seed):
    """PyTorch keeps these as they were, with a flag."""
    x = torch._neg_view(awkward((3, 40), seed, torch.float32))
    check(x, scaling="row")
    heads = torch._neg_view(torch.ones(1, 3, 1, 40).half())
    found = kernels_dsl.quantize_qkv(heads, heads, heads)
    assert all(torch.equal(found[name].float(), torch.full_like(heads, -448.0)) for name in "qkv")


def test_gradients_are_refused_not_dropped():
    x = torch.randn(16, 16).requires_grad_()
    for _ in range(2):
        values, scale = kernels_dsl.quantize(x)
        with pytest.raises(RuntimeError, match="kernels_dsl::quantize has no gradient"):
            (values.float() * scale).sum().backward()
    heads = torch.ones(1, 3, 1, 16).half().requires_grad_()
    with pytest.raises(RuntimeError, match="kernels_dsl::quantize has no gradient"):
        kernels_dsl.quantize_qkv(heads, heads, heads)["k"].float().sum().backward()
    with torch.no_grad():
        assert not any(t.requires_grad for t in (*kernels_dsl.quantize(x), *kernels_dsl.quantize(heads)))


def test_five_modes(seed):
    check(awkward((2, 1, 2, 9, 140), seed, torch.bfloat16), scaling="1x128", transpose="both")


def test_a_whole_cta_for_a_row(seed):
    check(awkward((3, 2048), seed, torch.bfloat16), scaling="row")


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_groups_without_a_finite_element(source):
    x = torch.randn(3, 256).to(source)
    x[0] = torch.nan
    x[1, 128:] = torch.inf
    check(x, scaling="1x128")
    check(x, scaling="row")


def test_one_mode_one_row_and_nothing(seed):
    check(awkward((1, 40), seed, torch.bfloat16)[0], scaling="row")
    check(awkward((1, 300), seed, torch.bfloat16), scaling="1x128")
    for shape in ((0, 128), (3, 0)):
        for scaling in SCALINGS:
            check(torch.empty(shape).bfloat16(), scaling=scaling, transpose="both")


def test_sm_89_runs_the_same_code(seed):
    x, heads = awkward((33, 140), seed, torch.bfloat16), awkward((1, 3, 9, 16), seed, torch.float16)
    with emulator.run(arch="sm_89"):
        check(x, scaling="1x128", transpose="both")
        check(x, scaling="tensor")
        found = kernels_dsl.quantize_qkv(*[heads.transpose(1, 2)] * 3)
    values, scales = ref.quantize(heads, torch.float8_e4m3fn, scaling="matrix")
    assert_same(found["v"].transpose(1, 2), values, "v")
    assert_same(found["v_descale"], scales, "v_descale")


def test_earlier_gpus_are_refused():
    x = torch.ones(4, 128).bfloat16()
    with emulator.run(arch="sm_80"):
        assert "must be 8.9 or later" in kernels_dsl.quantize_supports(x)
        with pytest.raises(ValueError, match=r"compute capability 8\.0"):
            kernels_dsl.quantize(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(4, 4, dtype=torch.int8)}, "x is torch.int8"),
        ({"x": torch.ones(())}, "x has no modes"),
        ({"x": torch.ones(8), "transpose": True}, "x has one mode"),
        ({"x": torch.ones(8), "scaling": "matrix"}, "x has one mode"),
        ({"x": torch.ones(8, device="meta")}, "x is on meta"),
        ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16"),
        ({"scaling": "column"}, "scaling is 'column'"),
        ({"transpose": "no"}, "transpose is 'no'"),
        ({"scaling": "row", "scale": torch.ones(())}, "scale is given with scaling 'row'"),
        ({"scale": torch.ones(2)}, "scale is torch.float32 \\(2,\\)"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"x": torch.ones(4, 4).bfloat16(), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        kernels_dsl.quantize(**arguments)
    assert kernels_dsl.quantize_supports(**arguments) is not None


def test_fake_tensors_and_opcheck(seed):
    import kernels_dsl.ops.quantize.register  # noqa: F401

    x = awkward((20, 130), seed, torch.bfloat16)
    for scaling, transpose in (("tensor", "no"), ("1x128", "both")):
        keywords = {"dtype": torch.float8_e4m3fn, "scaling": scaling, "transpose": transpose}
        torch.library.opcheck(torch.ops.kernels_dsl.quantize.default, (x,), keywords,
                              test_utils=("test_schema", "test_faketensor"))  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((20, 130), {"transpose": "both"}),
        ((20, 130), {"scale": torch.full((1,), 0.5), "transpose": "both"}),
        ((2, 3, 2, 5, 40), {"scaling": "1x128", "transpose": True}),
        ((130, 32), {"scaling": "row", "transpose": "both"}),
        ((130,), {"scaling": "row"}),
        ((33,), {"scale": torch.ones(1)}),
        ((4, 0), {"scaling": "matrix"}),
    ],
)
def test_into_what_the_caller_has(shape, arguments, seed):
    check_into(awkward((1, *shape), seed, torch.bfloat16)[0], **arguments)


def test_out_is_looked_at_before_the_launch():
    x = torch.ones(32, 48).bfloat16()
    values, scale, turned, _ = kernels_dsl.quantize(x, transpose="both")
    bytes_of_x = x.view(torch.uint8).flatten()
    for out, error, message in (
        (values, TypeError, "out is a Tensor, must be a tuple of tensors"),
        ((values,), ValueError, "out has 1 tensors, must have 2"),
        ((values, 1.0), TypeError, r"out\[1\] is a float, must be a torch.Tensor"),
        ((values.view(torch.uint8), scale), TypeError, r"out\[0\] has dtype torch.uint8, must be"),
        ((turned, scale), ValueError, r"out\[0\] has shape \(48, 32\), must be \(32, 48\)"),
        ((turned.mT, scale), ValueError, r"out\[0\] has strides \(1, 32\), must be \(48, 1\)"),
        ((torch.empty(1700, dtype=values.dtype)[1:1537].view(32, 48), scale), ValueError, "multiple of 16"),
        (
            (bytes_of_x[:1536].view(values.dtype).view(32, 48), scale),
            ValueError, r"out\[0\] shares memory with x",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            kernels_dsl.quantize(x, out=out)
    with pytest.raises(ValueError, match=r"out\[3\] is not out\[1\], must be"):
        kernels_dsl.quantize(x, transpose="both", out=(values, scale, turned, scale.clone()))
    with pytest.raises(ValueError, match=r"out\[1\] is not scale, must be"):
        kernels_dsl.quantize(x, scale=torch.ones(()), out=(values, scale))
    short = torch.empty(1528, dtype=values.dtype).as_strided((32, 40), (48, 1))
    with pytest.raises(ValueError, match="has 1528 bytes of memory"):
        kernels_dsl.quantize(x[:, :40], out=(short, scale))
    with pytest.raises(ValueError, match=r"out\[0\] is given and a tensor requires grad"):
        kernels_dsl.quantize(x.requires_grad_(), out=(values, scale))


def test_out_as_an_operator(seed):
    import kernels_dsl.ops.quantize.register

    x = awkward((20, 130), seed, torch.bfloat16)
    expected = kernels_dsl.quantize(x, scaling="1x128")
    out = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in expected]
    keywords = {"dtype": torch.float8_e4m3fn, "scaling": "1x128", "transpose": "no"}
    # PyTorch's check of the schema multiplies what is written, which the CPU cannot for fp8.
    torch.library.opcheck(torch.ops.kernels_dsl.quantize_out.default, (x, out), keywords,
                          test_utils=("test_faketensor",))  # fmt: skip
    dense = [torch.empty(t.shape, dtype=t.dtype) for t in expected]  # neither padded nor along M
    torch.ops.kernels_dsl.quantize_out(x, dense, **keywords)
    for given, wanted in zip(dense, expected):
        assert_same(given, wanted, "copies of other strides")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def twice(x, values, scales):
        kernels_dsl.quantize(x, scaling="1x128", out=(values, scales))
        return values.float() * 2

    found = twice(x, *check_into(x, scaling="1x128"))
    assert torch.equal(found.nan_to_num(), expected[0].float().mul(2).nan_to_num())
