"""The definition of fp8 quantisation against PyTorch's own conversions and hand-made cases."""

from __future__ import annotations

import math

import pytest
import torch

from reference import quantize as ref

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_patterns_decode_as_in_torch(dtype):
    patterns = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(ref.from_fp8(patterns), patterns.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_all_16_bit_inputs_round_as_in_torch_and_saturate(dtype, source):
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(source)
    limit = ref.largest(dtype)
    expected = x.float().clamp(-limit, limit).to(dtype)
    found = ref.to_fp8(x, dtype)
    nan = x.isnan()
    assert torch.equal(_bits(found)[~nan], _bits(expected)[~nan])
    assert bool((_bits(found)[nan] == 0x7F).all()) and int(nan.sum()) > 0


def test_ties_go_to_even():
    x = torch.tensor([17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -17.0])  # between 16 and 18, 18 and 20; subnormals
    expected = torch.tensor([16.0, 20.0, 0.0, 2.0**-8, -16.0]).double()
    assert torch.equal(ref.from_fp8(ref.to_fp8(x, torch.float8_e4m3fn)), expected)


@pytest.mark.parametrize("scaling", ref.SCALINGS)
def test_scales_have_the_stated_shapes_and_map_the_maximum_to_the_largest(scaling):
    x = torch.randn(3, 130, 300, generator=torch.Generator().manual_seed(1))
    values, scale = ref.quantize(x, scaling=scaling)
    shapes = {
        "tensor": (), "matrix": (3, 1, 1), "row": (3, 130, 1), "1x128": (3, 130, 3), "128x128": (3, 2, 3),
    }  # fmt: skip
    assert tuple(scale.shape) == shapes[scaling]
    back = ref.dequantize(values, scale, scaling)
    assert ref.signal_to_noise(back, x) > 30
    amax = ref.group_amax(x, scaling)
    torch.testing.assert_close(ref.group_amax(back, scaling), amax, rtol=1e-6, atol=0)


def test_finer_scales_cope_with_outliers():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    x[3, 5] = 1e6
    ratios = {s: ref.signal_to_noise(ref.dequantize(*ref.quantize(x, scaling=s), s)[130:], x[130:])
              for s in ("tensor", "row", "1x128", "128x128")}  # fmt: skip
    assert ratios["tensor"] < 1 and min(ratios["row"], ratios["1x128"], ratios["128x128"]) > 30


def test_zero_groups_infinities_and_nan():
    x = torch.zeros(4, 256)
    x[1, :128] = torch.tensor([math.inf, -math.inf, math.nan, 2.0]).repeat(32)
    x[2, 0] = 1e-44  # its scale would be subnormal
    values, scale = ref.quantize(x, scaling="1x128")
    assert float(scale[0, 0]) == 1.0 and float(scale[1, 1]) == 1.0
    assert float(scale[2, 0]) == 2.0**-126 and math.isclose(float(scale[1, 0]), 2 / 448, rel_tol=1e-6)
    assert ref.from_fp8(values)[1, :4].tolist()[:2] == [448.0, -448.0]
    assert math.isnan(float(ref.from_fp8(values)[1, 2])) and float(ref.from_fp8(values)[1, 3]) == 448.0


def test_signal_to_noise():
    x = torch.ones(10)
    assert ref.signal_to_noise(x, x) == math.inf
    assert math.isclose(ref.signal_to_noise(x * 1.1, x), 20.0, abs_tol=1e-4)


def test_unknown_scaling_is_named():
    with pytest.raises(ValueError, match="scaling is 'column'"):
        ref.quantize(torch.ones(2, 2), scaling="column")
