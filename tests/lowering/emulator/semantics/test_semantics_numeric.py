"""Number formats: every pattern of 8 and 16 bits; roundings against torch or rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from lowering.emulator.semantics import numeric

TORCH = {
    "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
}  # fmt: skip
SIGNED = {8: np.int8, 16: np.int16}


def _all_patterns(name):
    bits = numeric.FORMATS[name].bits
    return np.arange(1 << bits, dtype=numeric.FORMATS[name].storage)


def _torch_values(patterns, name):
    signed = torch.from_numpy(patterns.view(SIGNED[patterns.itemsize * 8]).copy())
    return signed.view(TORCH[name]).float().numpy()


@pytest.mark.parametrize("name", TORCH)
def test_decode_every_pattern(name):
    patterns = _all_patterns(name)
    np.testing.assert_array_equal(numeric.decode(patterns, name), _torch_values(patterns, name))


@pytest.mark.parametrize("name", TORCH)
def test_encode_inverts_decode(name):
    patterns = _all_patterns(name)
    values = numeric.decode(patterns, name)
    finite = np.isfinite(values)
    for rounding in numeric.ROUNDINGS:
        np.testing.assert_array_equal(numeric.encode(values, name, rounding)[finite], patterns[finite])
    nans = numeric.encode(values, name)[np.isnan(values)]
    assert (nans == numeric.FORMATS[name].quiet_nan).all()


def _interesting_floats(seed, count=200_000):
    """Random patterns (all magnitudes, NaN, infinities) and the midpoints between 16- and 8-bit values."""
    rng = np.random.default_rng(seed)
    random = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    near_one = rng.standard_normal(count).astype(np.float32)
    parts = [random, near_one]
    for name in TORCH:
        values = np.sort(numeric.decode(_all_patterns(name), name)[: 1 << (numeric.FORMATS[name].bits - 1)])
        values = values[np.isfinite(values)].astype(np.float64)
        middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
        parts += [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_nearest_against_torch(name, seed):
    values = _interesting_floats(seed)
    expected = torch.from_numpy(values).to(TORCH[name]).float().numpy()
    np.testing.assert_array_equal(numeric.decode(numeric.encode(values, name), name), expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_against_torch_where_it_does_not_saturate(name, seed):
    values = _interesting_floats(seed)
    largest = numeric.FORMATS[name].largest
    got = numeric.decode(numeric.encode(values, name), name)
    inside = np.abs(values) <= largest
    expected = torch.from_numpy(values[inside]).to(TORCH[name]).float().numpy()
    np.testing.assert_array_equal(got[inside], expected)
    over = np.abs(values) > largest
    np.testing.assert_array_equal(got[over], np.copysign(np.float32(largest), values[over]))
    assert np.isnan(got[np.isnan(values)]).all()


def _exact_round(value: Fraction, name: str, rounding: str) -> Fraction:
    """The definition, in rational arithmetic, for a finite value in range."""
    f = numeric.FORMATS[name]
    quantum = Fraction(1, 2 ** (f.bias - 1 + f.mantissa_bits))
    while abs(value) >= quantum * 2 ** (f.mantissa_bits + 1):
        quantum *= 2
    down = (value / quantum).__floor__()
    rest = value / quantum - down
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1),
        "rna": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and value > 0),
        "rz": rest > 0 and value < 0,
        "rm": False,
        "rp": rest > 0,
    }[rounding]
    return (down + up) * quantum


@pytest.mark.parametrize("rounding", numeric.ROUNDINGS)
@pytest.mark.parametrize("name", ["f16", "bf16", "tf32", "f32", "e4m3", "e5m2"])
def test_rounding_modes_against_rationals(name, rounding, seed):
    rng = np.random.default_rng(seed)
    f = numeric.FORMATS[name]
    exponents = rng.integers(-f.bias - f.mantissa_bits - 2, f.bias - 1, 400)
    values = np.ldexp(rng.standard_normal(400), exponents)
    # a third of them on the midpoints
    values[::3] = numeric.round_to(values[::3], f, "rz") * (1 + 2.0 ** -(f.mantissa_bits + 1))
    values = values[np.abs(values) < f.largest]
    got = numeric.decode(numeric.encode(values, name, rounding), name).astype(np.float64)
    expected = [float(_exact_round(Fraction(float(v)), name, rounding)) for v in values]
    np.testing.assert_array_equal(got, expected)
    assert (np.signbit(got) == np.signbit(values)).all()


def test_overflow_follows_the_rounding_mode():
    big = np.array([1e30, -1e30, np.inf, -np.inf])
    expected = {
        "rn": [np.inf, -np.inf, np.inf, -np.inf], "rz": [65504, -65504, np.inf, -np.inf],
        "rm": [65504, -np.inf, np.inf, -np.inf], "rp": [np.inf, -65504, np.inf, -np.inf],
    }  # fmt: skip
    for rounding, values in expected.items():
        np.testing.assert_array_equal(numeric.f16_to_f32(numeric.encode(big, "f16", rounding)), values)
    saturated = numeric.f16_to_f32(numeric.f32_to_f16(big, satfinite=True))
    np.testing.assert_array_equal(saturated, [65504, -65504, 65504, -65504])


def test_relu():
    values = np.array([-1.5, -0.0, 2.5, np.nan, -np.inf], np.float32)
    for name in ("f16", "bf16", "e4m3"):
        bits = numeric.encode(values, name, relu=True)
        assert bits.tolist()[:2] == [0, 0]
        assert bits[3] == numeric.FORMATS[name].quiet_nan
        assert bits[4] == 0
        assert numeric.decode(bits, name)[2] == 2.5


def test_one_rounding_from_float64(seed):
    """bf16 of a float64 that float32 would round onto a midpoint: rounding twice gets it wrong."""
    midpoint = 1 + 2.0**-8
    values = np.array([midpoint + 2.0**-40, midpoint - 2.0**-40, midpoint])
    assert numeric.bf16_to_f32(numeric.f32_to_bf16(values)).tolist() == [1 + 2.0**-7, 1.0, 1.0]
    wide = np.random.default_rng(seed).standard_normal(100_000) * np.exp2(
        np.random.default_rng(seed + 1).uniform(-150, 127, 100_000)
    )
    np.testing.assert_array_equal(
        numeric.f32_to_bf16(wide), numeric.encode(numeric.round_to(wide, numeric.BF16), "bf16")
    )


def test_sum_to_odd_then_round_is_one_rounding(seed):
    """float32 fma: exact product, sum to odd, one rounding. Compared with rationals."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(3000).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) * b
    # addends that nearly cancel, and ones far below, where rounding twice goes wrong
    c = np.where(rng.random(3000) < 0.5, -exact, np.ldexp(exact, 25) * 1.5).astype(np.float32)
    c[::5] *= np.float32(2.0**-40)
    got = numeric.sum_to_odd(exact, c.astype(np.float64)).astype(np.float32)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        value = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert float(result) == float(_exact_round(value, "f32", "rn"))


def test_packing_order():
    high, low = np.array([0x1234], np.uint16), np.array([0xABCD], np.uint16)
    assert numeric.pack16(high, low)[0] == 0x1234ABCD
    assert [int(x[0]) for x in numeric.unpack16(np.array([0x1234ABCD], np.uint32))] == [0x1234, 0xABCD]
    assert numeric.pack8(np.array([0x12], np.uint8), np.array([0xCD], np.uint8))[0] == 0x12CD
    assert [int(x[0]) for x in numeric.unpack8(np.array([0x12CD], np.uint16))] == [0x12, 0xCD]


@pytest.mark.parametrize("destination", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer(destination, rounding, seed):
    rng = np.random.default_rng(seed)
    values = np.concatenate([
        rng.standard_normal(500) * np.exp2(rng.uniform(0, 70, 500)),
        np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.0**31, 2.0**63, 2.0**64, -(2.0**31), -(2.0**63)]),
        np.array([np.inf, -np.inf]),
    ]).astype(np.float32)  # fmt: skip
    got = numeric.convert(values.view(np.uint32), "f32", destination, rounding)
    info = np.iinfo({"s": "int", "u": "uint"}[destination[0]] + destination[1:])
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]
    for value, bits in zip(values, got.view(info.dtype), strict=True):
        whole = function(np.float64(value))
        whole = int(whole) if np.isfinite(whole) else (1 << 80) * int(np.sign(whole))
        expected = min(max(whole, int(info.min)), int(info.max))
        assert int(bits) == expected
    nan = numeric.convert(np.array([0x7FC00000], np.uint32), "f32", destination, rounding)
    assert int(nan[0]) == (0x8000000000000000 if destination.endswith("64") else 0)


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize(
    ("destination", "rounding"), [("f32", "rn"), ("f32", "rz"), ("f16", "rn"), ("f64", "rn")]
)
def test_integer_to_float(source, destination, rounding, seed):
    rng = np.random.default_rng(seed)
    width = int(source[1:])
    raw = rng.integers(0, 2**64, 300, dtype=np.uint64) >> rng.integers(0, 64, 300).astype(np.uint64)
    if destination == "f16":
        raw = raw % np.uint64(60000)
    bits = raw.astype(np.uint32 if width == 32 else np.uint64)
    integers = bits.view({"s": "i", "u": "u"}[source[0]] + str(width // 8))
    if destination == "f16":
        integers = np.abs(integers)
    got = numeric.decode(numeric.convert(bits, source, destination, rounding), destination)
    if destination == "f64":
        np.testing.assert_array_equal(got, integers.astype(np.float64))
        return
    expected = [float(_exact_round(Fraction(int(i)), destination, rounding)) for i in integers]
    np.testing.assert_array_equal(got.astype(np.float64), expected)


def test_convert_flags():
    tiny = np.array([0x00000001, 0x80000001, 0x3F000000], np.uint32)
    flushed = numeric.convert(tiny, "f32", "f32", ftz=True)
    assert flushed.tolist() == [0, 0x80000000, 0x3F000000]
    values = np.array([-1.0, 0.25, 2.0, np.nan], np.float32).view(np.uint32)
    saturated = numeric.convert(values, "f32", "f16", "rn", saturate=True)
    assert numeric.f16_to_f32(saturated).tolist() == [0.0, 0.25, 1.0, 0.0]
    narrowed = numeric.convert(np.array([300, 0xFFFFFFFF], np.uint32), "s32", "u8", saturate=True)
    assert narrowed.tolist() == [255, 0]
    assert numeric.convert(np.array([0xFF], np.uint8), "s8", "s32").tolist() == [0xFFFFFFFF]
    with pytest.raises(ValueError, match="destination was 'f8'"):
        numeric.convert(values, "f32", "f8")
    with pytest.raises(ValueError, match="rounding was"):
        numeric.encode(np.zeros(1, np.float32), "f16", "up")


def test_round_to_integral():
    values = np.array([0.5, 1.5, -2.5, 3.7], np.float32).view(np.uint32)
    for rounding, expected in (("rni", [0, 2, -2, 4]), ("rzi", [0, 1, -2, 3]), ("rpi", [1, 2, -2, 4])):
        got = numeric.convert(values, "f32", "f32", rounding).view(np.float32)
        np.testing.assert_array_equal(got, expected)


def test_flush_and_canonical():
    bits = np.array([0x007FFFFF, 0x807FFFFF, 0x00800000, 0xFFC12345], np.uint32).view(np.float32)
    assert numeric.flush(bits).view(np.uint32).tolist() == [0, 0x80000000, 0x00800000, 0xFFC12345]
    assert numeric.canonical(bits).view(np.uint32).tolist()[3] == 0x7FFFFFFF
    tf32 = numeric.tf32_to_f32(np.array([0x3F801FFF], np.uint32))
    assert tf32.view(np.uint32).tolist() == [0x3F800000]
