"""Number formats: bit patterns to values, values to bit patterns with PTX's rounding modes, and `cvt`.

Values are float32 (or float64) arrays; patterns are unsigned arrays of the format's width: `uint16` for f16
and bf16, `uint8` for e4m3 and e5m2, `uint32` for f32 and tf32 (a tf32 sits in the upper 19 bits of 32).
Rounding modes are PTX's names: `rn` nearest even, `rna` nearest with ties away from zero, `rz` towards zero,
`rm` down,
`rp` up. A NaN that leaves a conversion is the canonical one of its format (f32 0x7FFFFFFF, tf32 0x7FFFE000,
f16 and bf16 0x7FFF, e4m3 and e5m2 0x7F), but for three conversions that keep its payload, as an H200 does:
bf16 to f32, f32 to f64, and f32 to tf32 with `rna`. Source: PTX ISA, `cvt`; NaNs measured.
"""

from __future__ import annotations

import dataclasses

import numpy as np

ROUNDINGS = ("rn", "rna", "rz", "rm", "rp")


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format: `largest` finite value, `quiet_nan` the canonical NaN."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    largest: float
    quiet_nan: int
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def storage(self) -> type:
        return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[self.bits]


F16 = Format("f16", 16, 5, 10, 65504.0, 0x7FFF)
BF16 = Format("bf16", 16, 8, 7, float.fromhex("0x1.fep127"), 0x7FFF)
TF32 = Format("tf32", 32, 8, 10, float.fromhex("0x1.ffcp127"), 0x7FFFE000)
F32 = Format("f32", 32, 8, 23, float.fromhex("0x1.fffffep127"), 0x7FFFFFFF)
F64 = Format("f64", 64, 11, 52, float.fromhex("0x1.fffffffffffffp1023"), 0x7FF8000000000000)
E4M3 = Format("e4m3", 8, 4, 3, 448.0, 0x7F, has_infinity=False)
E5M2 = Format("e5m2", 8, 5, 2, 57344.0, 0x7F)
FORMATS = {f.name: f for f in (F16, BF16, TF32, F32, F64, E4M3, E5M2)}


def _decode_fp8(fmt: Format) -> np.ndarray:
    """All 256 values of an 8-bit format."""
    code = np.arange(256)
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    fraction = np.where(exponent > 0, mantissa + (1 << fmt.mantissa_bits), mantissa)
    value = np.ldexp(fraction.astype(np.float64), np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    if fmt.has_infinity:
        top = exponent == (1 << fmt.exponent_bits) - 1
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    return np.where(code & 0x80, -value, value).astype(np.float32)


_E4M3_VALUES = _decode_fp8(E4M3)
_E5M2_VALUES = _decode_fp8(E5M2)


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 patterns of f16 -> float32 values (exact)."""
    return np.ascontiguousarray(bits, dtype=np.uint16).view(np.float16).astype(np.float32)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 patterns of bf16 -> float32 values (exact)."""
    return (np.asarray(bits, dtype=np.uint32) << np.uint32(16)).view(np.float32)


def tf32_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint32 registers -> float32 values that a tf32 matrix instruction sees: the low 13 bits are ignored."""
    return (np.asarray(bits, dtype=np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def e4m3_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint8 patterns of e4m3 (finite, NaN 0x7F and 0xFF) -> float32 values (exact)."""
    return _E4M3_VALUES[bits]


def e5m2_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint8 patterns of e5m2 -> float32 values (exact)."""
    return _E5M2_VALUES[bits]


def decode(bits: np.ndarray, fmt: str) -> np.ndarray:
    """Patterns of the format named `fmt` -> values: float64 for f64, float32 for every other (all exact)."""
    if fmt == "f32":
        return np.ascontiguousarray(bits, dtype=np.uint32).view(np.float32)
    if fmt == "f64":
        return np.ascontiguousarray(bits, dtype=np.uint64).view(np.float64)
    table = {"f16": f16_to_f32, "bf16": bf16_to_f32, "tf32": tf32_to_f32}
    table |= {"e4m3": e4m3_to_f32, "e5m2": e5m2_to_f32}
    if fmt not in table:
        raise ValueError(f"fmt was {fmt!r}; it must be one of {sorted(FORMATS)}")
    return table[fmt](bits)


def flush(values: np.ndarray) -> np.ndarray:
    """`.ftz` on float32 values: subnormals become zero of the same sign."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    subnormal = (bits & np.uint32(0x7F800000)) == 0
    return np.where(subnormal, bits & np.uint32(0x80000000), bits).astype(np.uint32).view(np.float32)


def canonical(values: np.ndarray) -> np.ndarray:
    """float32 values with every NaN replaced by PTX's canonical one, 0x7FFFFFFF."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    nan = np.isnan(values)
    if not nan.any():
        return values
    return np.where(nan, np.uint32(F32.quiet_nan), values.view(np.uint32)).astype(np.uint32).view(np.float32)


def f64_to_f32_odd(values: np.ndarray) -> np.ndarray:
    """float64 -> float32 by rounding to odd: a second rounding to fewer bits then equals a single one."""
    with np.errstate(all="ignore"):
        values = np.asarray(values, dtype=np.float64)
        near = values.astype(np.float32)
        wide = near.astype(np.float64)
        inexact = (wide != values) & ~np.isnan(values)
        above = inexact & (np.abs(wide) > np.abs(values))
    bits = near.view(np.uint32) - above.astype(np.uint32)
    return (bits | inexact.astype(np.uint32)).view(np.float32)


def round_to(values: np.ndarray, fmt: Format, rounding: str = "rn") -> np.ndarray:
    """Nearest value of `fmt` under `rounding`, as float64; overflow gives +-inf or, by rounding mode,
    `largest`.

    `values`: float64 or float32, taken as exact. NaN passes through.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding was {rounding!r}; it must be one of {ROUNDINGS}")
    with np.errstate(all="ignore"):
        values = np.asarray(values, dtype=np.float64)
        _, exponent = np.frexp(values)
        quantum = np.maximum(exponent - 1, 1 - fmt.bias) - fmt.mantissa_bits
        scaled = np.ldexp(values, -quantum)
        if rounding == "rn":
            whole = np.rint(scaled)
        elif rounding == "rna":
            whole = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
        elif rounding == "rz":
            whole = np.trunc(scaled)
        else:
            whole = np.floor(scaled) if rounding == "rm" else np.ceil(scaled)
        whole = np.copysign(whole, values)
        result = np.where(np.isfinite(values), np.ldexp(whole, quantum), values)
        over = np.abs(result) > fmt.largest
        stays_finite = {
            "rn": np.zeros_like(over), "rna": np.zeros_like(over), "rz": ~np.isinf(values),
            "rm": (values > 0) & ~np.isinf(values), "rp": (values < 0) & ~np.isinf(values),
        }[rounding]  # fmt: skip
        limit = np.where(stays_finite, fmt.largest, np.inf)
        return np.where(over, np.copysign(limit, values), result)


def encode(
    values: np.ndarray, fmt: str, rounding: str = "rn", *, satfinite: bool = False, relu: bool = False
) -> np.ndarray:
    """Values (float32 or float64) -> patterns of the format named `fmt`, rounded once.

    `satfinite`: infinities and overflows become the largest finite value (always so for e4m3 and e5m2, where
    PTX requires it). `relu`: negative values and -0 become +0, NaN stays NaN. Raises ValueError for an
    unknown format or rounding mode.
    """
    if fmt not in FORMATS:
        raise ValueError(f"fmt was {fmt!r}; it must be one of {sorted(FORMATS)}")
    f = FORMATS[fmt]
    values = np.asarray(values)
    if not (satfinite or relu) and rounding == "rn" and fmt in ("f16", "bf16", "f32") and f.bits < 64:
        return _encode_nearest(values, f)
    if fmt == "tf32" and rounding == "rna" and values.dtype == np.float32:
        return _encode_away(values, relu)
    rounded = round_to(values, f, rounding)
    if satfinite or f.bits == 8:
        rounded = np.clip(rounded, -f.largest, f.largest)
    if relu:
        rounded = np.where(rounded <= 0, 0.0, rounded)
    return _pattern(rounded, f)


def _encode_nearest(values: np.ndarray, fmt: Format) -> np.ndarray:
    """The common conversions, without the general machinery."""
    with np.errstate(all="ignore"):
        if fmt is F16:
            out = np.asarray(values.astype(np.float16)).view(np.uint16)
        elif fmt is F32:
            out = np.asarray(values.astype(np.float32)).view(np.uint32)
        else:
            single = f64_to_f32_odd(values) if values.dtype == np.float64 else values.astype(np.float32)
            wide = np.ascontiguousarray(single).view(np.uint32)
            out = ((wide + (np.uint32(0x7FFF) + ((wide >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, fmt.storage(fmt.quiet_nan), out) if nan.any() else out


def _encode_away(values: np.ndarray, relu: bool) -> np.ndarray:
    """float32 -> tf32, ties away from zero, on the integer image: NaN keeps its payload's upper bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    out = np.where(np.isfinite(values), bits + np.uint32(0x1000), bits) & np.uint32(0xFFFFE000)
    return np.where(relu & (values <= 0), np.uint32(0), out)


def _pattern(values: np.ndarray, fmt: Format) -> np.ndarray:
    """Patterns of float64 values that `fmt` represents exactly."""
    nan = np.isnan(values)
    out: np.ndarray
    if fmt.bits == 64:
        out = np.ascontiguousarray(values).view(np.uint64)
    elif fmt.exponent_bits == 8:
        wide = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
        out = (wide >> 16).astype(np.uint16) if fmt.bits == 16 else wide
    else:
        # f16 and e5m2 share an exponent range; e4m3 goes through its own table of non-negative values.
        half = np.ascontiguousarray(values.astype(np.float16)).view(np.uint16)
        if fmt is F16:
            out = half
        elif fmt is E5M2:
            out = (half >> 8).astype(np.uint8)
        else:
            magnitude = np.where(nan, 0.0, np.abs(values))
            out = np.searchsorted(_E4M3_VALUES[:0x7F], magnitude).astype(np.uint8)
            out = np.where(np.signbit(values), out | np.uint8(0x80), out)
    return np.where(nan, fmt.storage(fmt.quiet_nan), out)


def f32_to_f16(
    values: np.ndarray, rounding: str = "rn", *, satfinite: bool = False, relu: bool = False
) -> np.ndarray:
    """float32 or float64 -> uint16 patterns of f16; `satfinite`, `relu` as in `encode`."""
    return encode(values, "f16", rounding, satfinite=satfinite, relu=relu)


def f32_to_bf16(
    values: np.ndarray, rounding: str = "rn", *, satfinite: bool = False, relu: bool = False
) -> np.ndarray:
    """float32 or float64 -> uint16 patterns of bf16; `satfinite`, `relu` as in `encode`."""
    return encode(values, "bf16", rounding, satfinite=satfinite, relu=relu)


def f32_to_tf32(
    values: np.ndarray, rounding: str = "rna", *, satfinite: bool = False, relu: bool = False
) -> np.ndarray:
    """float32 -> uint32 registers that hold a tf32 (low 13 bits zero); `rna`, `rn` or `rz`."""
    return encode(values, "tf32", rounding, satfinite=satfinite, relu=relu)


def f32_to_e4m3(values: np.ndarray, *, relu: bool = False) -> np.ndarray:
    """float32 -> uint8 patterns of e4m3, nearest even, saturating at +-448."""
    return encode(values, "e4m3", relu=relu)


def f32_to_e5m2(values: np.ndarray, *, relu: bool = False) -> np.ndarray:
    """float32 -> uint8 patterns of e5m2, nearest even, saturating at +-57344."""
    return encode(values, "e5m2", relu=relu)


def pack16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Two uint16 arrays -> uint32. `cvt.rn.f16x2.f32 d, a, b` is `pack16(cvt(a), cvt(b))`: a goes above."""
    return (np.asarray(high, dtype=np.uint32) << np.uint32(16)) | np.asarray(low, dtype=np.uint32)


def unpack16(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint32 -> (high, low), each uint16."""
    packed = np.asarray(packed, dtype=np.uint32)
    return (packed >> np.uint32(16)).astype(np.uint16), packed.astype(np.uint16)


def pack8(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Two uint8 arrays -> uint16. `cvt.rn.satfinite.e4m3x2.f32 d, a, b` is `pack8(cvt(a), cvt(b))`."""
    return (np.asarray(high, dtype=np.uint16) << np.uint16(8)) | np.asarray(low, dtype=np.uint16)


def unpack8(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint16 -> (high, low), each uint8."""
    packed = np.asarray(packed, dtype=np.uint16)
    return (packed >> np.uint16(8)).astype(np.uint8), packed.astype(np.uint8)


_INTEGERS = {f"{kind}{bits}": np.dtype(f"{code}{bits // 8}")
             for kind, code in (("s", "i"), ("u", "u")) for bits in (8, 16, 32, 64)}  # fmt: skip
_STORAGE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def convert(
    bits: np.ndarray, source: str, destination: str, rounding: str | None = None,
    *, ftz: bool = False, saturate: bool = False, satfinite: bool = False, relu: bool = False,
) -> np.ndarray:  # fmt: skip
    """`cvt{.rounding}{.ftz}{.sat|.satfinite}{.relu}.destination.source` of one scalar a lane.

    `bits`: unsigned array of the source's width. Types: f16, bf16, tf32, f32, f64, e4m3, e5m2, and s or u
    with 8, 16, 32 or 64 bits. `rounding` may carry the i of the integer forms (rni, rzi, rmi, rpi): towards
    an integer type they are the rule, and on a conversion between equal floating types they round to an
    integral value.
    `saturate` is `.sat`: clamp to [0, 1] for floating results (NaN gives 0) or, between integers, to the
    range of the destination. Floating to integer always clamps, and NaN gives 0 (32 bits and less) or the
    sign bit pattern 0x8000000000000000 (64 bits). Returns an unsigned array of the destination's width.
    """
    for name, value in (("source", source), ("destination", destination)):
        if value not in FORMATS and value not in _INTEGERS:
            raise ValueError(f"{name} was {value!r}; it must be one of {sorted(FORMATS) + sorted(_INTEGERS)}")
    integral = bool(rounding) and str(rounding).endswith("i")
    mode = (rounding or "rn").removesuffix("i") if integral else (rounding or "rn")
    if source in _INTEGERS:
        integers = np.ascontiguousarray(bits).view(_INTEGERS[source])
        if destination in _INTEGERS:
            return _integer_to_integer(integers, destination, saturate)
        return _integer_to_float(integers, destination, mode)
    if (source, destination) == ("bf16", "f32") and not (integral or saturate or relu):
        return np.asarray(bits, dtype=np.uint32) << np.uint32(16)
    values = decode(bits, source)
    if ftz and source == "f32":
        values = flush(values)
    if destination in _INTEGERS:
        return _float_to_integer(values, destination, mode if integral else "rz")
    if (source, destination) == ("f32", "f64") and not saturate:
        return values.astype(np.float64).view(np.uint64)
    if integral:
        values = _integral(values, mode)
    if saturate:
        values = np.where(np.isnan(values), 0.0, np.clip(values, 0.0, 1.0)) + 0.0
    out = encode(values, destination, mode, satfinite=satfinite, relu=relu)
    return flush(out.view(np.float32)).view(np.uint32) if ftz and destination == "f32" else out


def _integral(values: np.ndarray, mode: str) -> np.ndarray:
    function = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}[mode]
    with np.errstate(all="ignore"):
        return function(values)


def _float_to_integer(values: np.ndarray, destination: str, mode: str) -> np.ndarray:
    dtype = _INTEGERS[destination]
    info = np.iinfo(dtype)
    whole = _integral(values.astype(np.float64), mode)
    nan = np.isnan(whole)
    # float64 cannot hold the ends of 64-bit ranges: compare, then cast only what is inside.
    low, high = float(info.min), float(info.max)
    under, over = whole <= low, whole >= high
    inside = np.where(nan | under | over, 0.0, whole).astype(dtype)
    out = np.where(under, dtype.type(info.min), np.where(over, dtype.type(info.max), inside))
    unsigned = np.ascontiguousarray(out).astype(dtype).view(_STORAGE[dtype.itemsize * 8])
    empty = 0x8000000000000000 if dtype.itemsize == 8 else 0
    return np.where(nan, unsigned.dtype.type(empty), unsigned)


def _integer_to_integer(integers: np.ndarray, destination: str, saturate: bool) -> np.ndarray:
    dtype = _INTEGERS[destination]
    if saturate:
        info, own = np.iinfo(dtype), np.iinfo(integers.dtype)
        low, high = max(int(info.min), int(own.min)), min(int(info.max), int(own.max))
        integers = np.clip(integers, integers.dtype.type(low), integers.dtype.type(high))
    return np.ascontiguousarray(integers.astype(dtype)).view(_STORAGE[dtype.itemsize * 8])


def _integer_to_float(integers: np.ndarray, destination: str, mode: str) -> np.ndarray:
    fmt = FORMATS[destination]
    if integers.dtype.itemsize < 8:
        return encode(integers.astype(np.float64), destination, mode)
    if fmt is F64 or (mode == "rn" and fmt is F32):
        return _pattern_of_cast(integers, fmt)
    # 64-bit integers need one rounding: two exact halves, added to odd, then to the format.
    high = (integers >> integers.dtype.type(32)).astype(np.float64) * 2.0**32
    low = (integers & integers.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return encode(sum_to_odd(high, low), destination, mode)


def _pattern_of_cast(integers: np.ndarray, fmt: Format) -> np.ndarray:
    value = integers.astype(np.float64 if fmt is F64 else np.float32)
    return np.ascontiguousarray(value).view(fmt.storage)


def _step_to_odd(values: np.ndarray, error: np.ndarray) -> np.ndarray:
    """float64 sums whose exact value is `values` plus a remainder of the sign of `error`, rounded to odd."""
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.int64)
    even = (bits & 1) == 0
    with np.errstate(invalid="ignore"):
        away = (error > 0) == (values > 0)
        step = np.where(away, 1, -1) * (even & (error != 0) & np.isfinite(values))
    return (bits + step).view(np.float64)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 arrays, rounded to odd (Knuth's two-sum gives the remainder)."""
    with np.errstate(all="ignore"):
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        error = np.where(np.isfinite(error), error, 0.0)
        zero = (total == 0) & (error != 0)
    return np.where(zero, error, _step_to_odd(total, error))
