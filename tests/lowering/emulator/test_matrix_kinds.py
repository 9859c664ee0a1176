"""`mma.sync` of f64, 4-bit and 1-bit operands, `wmma`, and float64 arithmetic, against Python's numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run  # noqa: E402

from lowering.emulator.reports import EmulatorError  # noqa: E402
from lowering.emulator.semantics import float64  # noqa: E402


def _list(prefix: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{first + i}" for i in range(count)) + "}"


def _mma(opcode: str, counts: tuple[int, int, int], inputs: np.ndarray, wide: bool) -> np.ndarray:
    """Registers of D (32, counts[2]) of one ``mma.sync`` whose operands are rows of ``inputs`` (R, 32)."""
    size, prefix = (8, "rd") if wide else (4, "r")
    load = [f"ld.global.b{8 * size} %{prefix}{20 + i}, [%rd3+{i * 32 * size}];" for i in range(sum(counts))]
    a, b, c = counts
    places = [_list(prefix, 20, a), _list(prefix, 20 + a, b), _list(prefix, 20 + a + b, c)]
    target = _list(prefix, 50, c)
    store = [f"st.global.b{8 * size} [%rd4+{i * 32 * size}], %{prefix}{50 + i};" for i in range(c)]
    body = f"""
ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
mul.wide.u32 %rd5, %r1, {size}; add.u64 %rd3, %rd1, %rd5; add.u64 %rd4, %rd2, %rd5;
{chr(10).join(load)}
{opcode} {target}, {", ".join(places)};
{chr(10).join(store)}
"""
    dtype = torch.int64 if wide else torch.int32
    source = torch.from_numpy(np.ascontiguousarray(inputs).view(np.int64 if wide else np.int32).copy())
    out = torch.zeros((c, 32), dtype=dtype)
    assert not run(body, [source, out]).reports
    return out.numpy().T


def _narrow(word: int, i: int, kind: str) -> int:
    bits = int(kind[1:])
    value = word >> bits * i & (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def _expected_integers(m: int, k: int, kinds: tuple[str, str], inputs: np.ndarray, operation: str) -> list:
    """D of an integer ``mma.sync`` by the PTX ISA's pictures: lane 4 g + t holds rows g and g + 8."""
    bits = int(kinds[0][1:])
    per = 32 // bits
    a_count = m * k * bits // 1024
    a = {}
    b = {}
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(a_count * per):
            register, within = divmod(i, per)
            row = g + 8 * (register % 2) if m == 16 else g
            half = register // 2 if m == 16 else register
            a[row, half * 4 * per + t * per + within] = _narrow(int(inputs[register, lane]), within, kinds[0])
        for i in range(a_count * per // (m // 8)):
            register, within = divmod(i, per)
            word = int(inputs[a_count + register, lane])
            b[register * 4 * per + t * per + within, g] = _narrow(word, within, kinds[1])
    first = a_count + a_count // (m // 8)
    out = []
    for lane in range(32):
        g, t = divmod(lane, 4)
        held = []
        for i in range(m // 4):
            row, column = g + 8 * (i // 2), 2 * t + i % 2
            c = int(inputs[first + i, lane].view(np.int32))
            terms = [(a[row, x], b[x, column]) for x in range(k)]
            if operation:
                total = sum((x ^ y) if operation == "xor" else (x & y) for x, y in terms)
            else:
                total = sum(x * y for x, y in terms)
            held.append((c + total + (1 << 31)) % (1 << 32) - (1 << 31))
        out.append(held)
    return out


INTEGERS = [
    ("m8n8k16.row.col", "s8", "u8", ""), ("m8n8k32.row.col", "s4", "u4", ""),
    ("m16n8k32.row.col", "u4", "s4", ""),
    ("m16n8k64.row.col", "s4", "s4", ""), ("m8n8k128.row.col", "b1", "b1", "xor"),
    ("m16n8k128.row.col", "b1", "b1", "and"), ("m16n8k256.row.col", "b1", "b1", "xor"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "a", "b", "operation"), INTEGERS)
def test_mma_of_narrow_integers(shape: str, a: str, b: str, operation: str) -> None:
    m, k = int(shape[1 : shape.index("n")]), int(shape[shape.index("k") + 1 : shape.index(".")])
    bits = int(a[1:])
    a_count = m * k * bits // 1024
    counts = (a_count, a_count // (m // 8), m // 4)
    rng = np.random.default_rng(k)
    inputs = rng.integers(0, 1 << 32, (sum(counts), 32), dtype=np.uint64).astype(np.uint32)
    suffix = f".{operation}.popc" if operation else ""
    got = _mma(f"mma.sync.aligned.{shape}.s32.{a}.{b}.s32{suffix}", counts, inputs, False)
    assert got.tolist() == _expected_integers(m, k, (a, b), inputs, operation)


def _nearest(value: Fraction) -> float:
    return float(value) if value else 0.0


@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_mma_of_f64(m: int, k: int) -> None:
    counts = (m * k // 32, k // 4, m // 4)
    values = np.random.default_rng(k).standard_normal((sum(counts), 32))
    opcode = f"mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64"
    got = _mma(opcode, counts, values, True).copy().view(np.float64)
    a, b = {}, {}
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(counts[0]):
            row = g + 8 * (i % 2) if m == 16 else g
            a[row, 4 * (i // 2 if m == 16 else i) + t] = values[i, lane]
        for i in range(counts[1]):
            b[4 * i + t, g] = values[counts[0] + i, lane]
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(counts[2]):
            total = values[counts[0] + counts[1] + i, lane]
            for x in range(k):
                product = Fraction(a[g + 8 * (i // 2), x]) * Fraction(b[x, 2 * t + i % 2])
                total = _nearest(product + Fraction(total))
            assert got[lane, i] == total


WMMA = [
    ("m16n16k16", "f16", 8, 8, "f32", 8), ("m16n16k16", "bf16", 4, 4, "f32", 8),
    ("m8n32k16", "f16", 8, 8, "f16", 4),
    ("m32n8k16", "s8", 4, 1, "s32", 8), ("m8n32k16", "u8", 1, 4, "s32", 8),
    ("m16n16k8", "tf32", 4, 4, "f32", 8),
    ("m8n8k4", "f64", 1, 1, "f64", 2),
]  # fmt: skip
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32,
         "tf32": torch.float32, "s8": torch.int8,
         "u8": torch.uint8, "s32": torch.int32, "f64": torch.float64}  # fmt: skip


def _registers(first: int, count: int, kind: str) -> str:
    prefix = "rd" if kind == "f64" else "r"
    return _list(prefix, first, count)


@pytest.mark.parametrize("layouts", ["row.col", "col.row"])
@pytest.mark.parametrize("form", WMMA, ids=lambda form: f"{form[0]}.{form[1]}.{form[4]}")
def test_wmma(form: tuple, layouts: str) -> None:
    shape, kind, a_count, b_count, accumulator, c_count = form
    m, rest = shape[1:].split("n")
    n, k = (int(x) for x in rest.split("k"))
    rows, (la, lb) = int(m), layouts.split(".")
    chance = torch.Generator().manual_seed(1)
    low = 0 if kind == "u8" else -4

    def matrix(height: int, width: int, name: str) -> torch.Tensor:
        return torch.randint(low, 5, (height, width), generator=chance).to(TORCH[name])

    a, b, c = matrix(rows, k, kind), matrix(k, n, kind), matrix(rows, n, accumulator)
    d = torch.full((rows, n + 8), 7).to(TORCH[accumulator])
    memory = [x if layout == "row" else x.t().contiguous() for x, layout in ((a, la), (b, lb))]
    types = f"{accumulator}.{kind}.{kind}.{accumulator}" if kind != "f16" else f"{accumulator}.{accumulator}"
    body = f"""
ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2]; ld.param.u64 %rd4, [p3];
mov.u32 %r9, {n + 8};
wmma.load.a.sync.aligned.{la}.{shape}.global.{kind} {_registers(20, a_count, kind)}, [%rd1];
wmma.load.b.sync.aligned.{lb}.{shape}.global.{kind} {_registers(30, b_count, kind)}, [%rd2];
wmma.load.c.sync.aligned.row.{shape}.global.{accumulator} {_registers(40, c_count, accumulator)}, [%rd3];
wmma.mma.sync.aligned.{la}.{lb}.{shape}.{types} {_registers(50, c_count, accumulator)},
 {_registers(20, a_count, kind)}, {_registers(30, b_count, kind)}, {_registers(40, c_count, accumulator)};
wmma.store.d.sync.aligned.row.{shape}.global.{accumulator} [%rd4],
 {_registers(50, c_count, accumulator)}, %r9;
"""
    assert not [r for r in run(body, [*memory, c, d]).reports if not r.warning]
    expected = (a.double() @ b.double() + c.double()).to(TORCH[accumulator])
    assert torch.equal(d[:, :n], expected)
    assert (d[:, n:] == 7).all()


def test_wmma_of_four_bits() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.integers(-8, 8, (8, 32)), rng.integers(-8, 8, (32, 8))

    def packed(rows: np.ndarray) -> torch.Tensor:
        eights = [row[x : x + 8] for row in rows for x in (0, 8, 16, 24)]
        words = [sum((int(v) & 15) << 4 * i for i, v in enumerate(eight)) for eight in eights]
        return torch.from_numpy(np.array(words, np.uint32).view(np.int32))

    d = torch.zeros((8, 8), dtype=torch.int32)
    body = """
ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2];
wmma.load.a.sync.aligned.row.m8n8k32.global.s4 {%r20}, [%rd1], 32;
wmma.load.b.sync.aligned.col.m8n8k32.global.s4 {%r21}, [%rd2], 32;
wmma.mma.sync.aligned.row.col.m8n8k32.s32.s4.s4.s32 {%r24, %r25}, {%r20}, {%r21}, {1, 2};
wmma.store.d.sync.aligned.col.m8n8k32.global.s32 [%rd3], {%r24, %r25}, 8;
"""
    assert not run(body, [packed(a), packed(b.T), d]).reports
    difference = d.numpy().T - a @ b
    assert sorted(np.unique(difference).tolist()) == [1, 2]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd1,%rd2}, {%rd3,%rd4}, {%rd5}, {%rd1,%rd2};",
         "operand a has 2 elements"),
        ("mma.sync.aligned.m16n8k32.row.col.s32.s4.f16.s32 {%r1,%r2}, {%r3}, {%r4}, {%r5,%r6};",
         "not modelled"),
        ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r3}, {%r4}, {%r5}, %r6, 0;",
         "sparse"),
        ("wmma.load.a.sync.aligned.col.m8n8k32.global.s4 {%r20}, [%rd1], 32;", "needs A in rows"),
    ],
)  # fmt: skip
def test_matrix_forms_that_are_missing_say_so(code: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(code, [])


SPECIAL = [0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 2.2250738585072014e-308,
           1.7976931348623157e308, -1.7976931348623157e308,
           1e200, -1e200, 1e-200, 1.0000000000000002, 0.1, 3.0, -7.5, 2.0**-600, 2.0**600]  # fmt: skip


def _rounded(value: Fraction, rounding: str) -> float:
    try:
        near = float(value)
    except OverflowError:
        near = math.inf if value > 0 else -math.inf
    if rounding == "rn":
        return near
    candidates = [near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf)]
    finite = [c for c in candidates if math.isfinite(c)]
    below, above = [c for c in finite if Fraction(c) <= value], [c for c in finite if Fraction(c) >= value]
    low = max(below) if below else -math.inf
    high = min(above) if above else math.inf
    return {"rm": low, "rp": high, "rz": low if value > 0 else high}[rounding]


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_fma_of_f64_rounds_once(rounding: str) -> None:
    rng = np.random.default_rng(8)
    a, b, c = rng.choice(SPECIAL, (3, 1500))
    wide = rng.standard_normal((3, 500)) * np.exp2(rng.integers(-60, 60, (3, 500)))
    wide[2, ::2] = -wide[0, ::2] * wide[1, ::2]  # what is left is the product's rounding error
    a, b, c = np.concatenate([np.stack([a, b, c]), wide], axis=1)
    got = float64.fma(a, b, c) if rounding == "rn" else float64.directed("fma", rounding, a, b, c)
    for i in range(len(a)):
        value = Fraction(a[i]) * Fraction(b[i]) + Fraction(c[i])
        want = _rounded(value, rounding)
        assert got[i] == want, (a[i], b[i], c[i])
        if value != 0 and got[i] == 0:
            assert math.copysign(1, got[i]) == (1 if value > 0 else -1)


def test_zeros_and_special_values_of_f64() -> None:
    def one(operation: str, rounding: str, *values: float) -> float:
        return float(float64.directed(operation, rounding, *(np.array([v]) for v in values))[0])

    assert math.copysign(1, one("add", "rm", 1.0, -1.0)) == -1
    assert math.copysign(1, one("add", "rz", 1.0, -1.0)) == 1
    assert math.copysign(1, one("add", "rp", -0.0, -0.0)) == -1
    assert math.isnan(one("mul", "rz", math.inf, 0.0))
    assert one("div", "rz", 1.0, 0.0) == math.inf
    assert one("div", "rp", 1.0, 3.0) == math.nextafter(1 / 3, 1)
    assert one("div", "rm", 1.0, 3.0) == 1 / 3
    root = one("sqrt", "rp", 2.0)
    assert Fraction(root) ** 2 > 2 > Fraction(math.nextafter(root, 0)) ** 2


def test_fma_of_f64_in_a_kernel() -> None:
    values = torch.randn(32, dtype=torch.float64)
    out = torch.zeros(32, dtype=torch.float64)
    body = """
.reg .f64 %x, %y;
ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mul.wide.u32 %rd5, %r1, 8;
add.u64 %rd1, %rd1, %rd5; add.u64 %rd2, %rd2, %rd5;
ld.global.f64 %x, [%rd1];
fma.rn.f64 %y, %x, %x, 0d3FF0000000000000;
add.rz.f64 %y, %y, %x; st.global.f64 [%rd2], %y;
"""
    assert not run(body, [values, out]).reports
    for x, y in zip(values.tolist(), out.tolist()):
        square = float(Fraction(x) ** 2 + 1)
        assert y == _rounded(Fraction(square) + Fraction(x), "rz")
