"""Register arithmetic, conversions, shuffles and control flow against Python's integers and fractions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run  # noqa: E402

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
# Inputs that carry, borrow, overflow, shift out, and select odd bytes.
EDGES = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF, 255, 0x00010080]

LOAD3 = """
ld.param.u64 %rd1, [p0];
cvt.u64.u32 %rd2, %r4;
add.u64 %rd3, %rd1, %rd2;
ld.global.b32 %r10, [%rd3];
ld.global.b32 %r11, [%rd3+128];
ld.global.b32 %r12, [%rd3+256];
"""
STORE = """
ld.param.u64 %rd4, [p1];
add.u64 %rd5, %rd4, %rd2;
st.global.b32 [%rd5], %r20;
"""


def _signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def _operands(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << 32, (3, 32), dtype=np.uint64)
    for row in range(3):
        values[row, : len(EDGES)] = rng.permutation(EDGES)
    return values.astype(np.uint32)


def evaluate(code: str, operands: np.ndarray) -> np.ndarray:
    """Run ``code`` (inputs %r10 %r11 %r12, output %r20) on 32 lanes; uint32 in and out."""
    source = torch.from_numpy(operands.astype(np.uint32).view(np.int32).copy())
    target = torch.zeros(32, dtype=torch.int32)
    session = run(LOAD3 + code + STORE, [source, target])
    assert not session.reports
    return target.numpy().view(np.uint32)


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _prmt(a: int, b: int, c: int) -> int:
    both, out = a | b << 32, 0
    for i in range(4):
        nibble = c >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 255
        out |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * i
    return out


def _bfe_s(a: int, b: int, c: int) -> int:
    pos, count = b & 255, c & 255
    if count == 0:
        return 0
    sign = _signed(a) >> min(pos + count - 1, 31) & 1
    out = 0
    for i in range(32):
        bit = (a >> (pos + i) & 1) if i < count and pos + i < 32 else sign
        out |= bit << i
    return out


INTEGER: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "add": ("add.s32 %r20, %r10, %r11;", lambda a, b, c: a + b),
    "sub": ("sub.u32 %r20, %r10, %r11;", lambda a, b, c: a - b),
    "mul.lo": ("mul.lo.s32 %r20, %r10, %r11;", lambda a, b, c: a * b),
    "mul.hi.u32": ("mul.hi.u32 %r20, %r10, %r11;", lambda a, b, c: a * b >> 32),
    "mul.hi.s32": ("mul.hi.s32 %r20, %r10, %r11;", lambda a, b, c: _signed(a) * _signed(b) >> 32),
    "mul.wide.s32": (
        "mul.wide.s32 %rd20, %r10, %r11; shr.u64 %rd21, %rd20, 20; cvt.u32.u64 %r20, %rd21;",
        lambda a, b, c: (_signed(a) * _signed(b) & M64) >> 20,
    ),
    "mad.lo": ("mad.lo.s32 %r20, %r10, %r11, %r12;", lambda a, b, c: a * b + c),
    "div.s32": ("div.s32 %r20, %r10, %r11;", lambda a, b, c: _quotient(_signed(a), _signed(b)) if b else -1),
    "rem.s32": (
        "rem.s32 %r20, %r10, %r11;",
        lambda a, b, c: _signed(a) - _quotient(_signed(a), _signed(b)) * _signed(b) if b else a,
    ),
    "div.u32": ("div.u32 %r20, %r10, %r11;", lambda a, b, c: a // b if b else M32),
    "shl": ("shl.b32 %r20, %r10, %r11;", lambda a, b, c: a << b if b < 32 else 0),
    "shr.u32": ("shr.u32 %r20, %r10, %r11;", lambda a, b, c: a >> b if b < 32 else 0),
    "shr.s32": ("shr.s32 %r20, %r10, %r11;", lambda a, b, c: _signed(a) >> min(b, 31)),
    "shf.l.wrap": (
        "shf.l.wrap.b32 %r20, %r10, %r11, %r12;",
        lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    ),
    "shf.r.clamp": ("shf.r.clamp.b32 %r20, %r10, %r11, %r12;", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    "min.s32": ("min.s32 %r20, %r10, %r11;", lambda a, b, c: min(_signed(a), _signed(b))),
    "max.u32": ("max.u32 %r20, %r10, %r11;", lambda a, b, c: max(a, b)),
    "abs": ("abs.s32 %r20, %r10;", lambda a, b, c: abs(_signed(a))),
    "neg": ("neg.s32 %r20, %r10;", lambda a, b, c: -a),
    "lop3": (
        "lop3.b32 %r20, %r10, %r11, %r12, 0xE2;",
        lambda a, b, c: (a & b & c) | (a & b & ~c) | (a & ~b & c) | (~a & ~b & c) & M32,
    ),
    "prmt": ("prmt.b32 %r20, %r10, %r11, %r12;", _prmt),
    "bfe.u32": ("bfe.u32 %r20, %r10, %r11, %r12;", lambda a, b, c: (a >> (b & 255)) & ((1 << (c & 255)) - 1)),
    "bfe.s32": ("bfe.s32 %r20, %r10, %r11, %r12;", _bfe_s),
    "bfi": ("bfi.b32 %r20, %r10, %r11, 5, 9;", lambda a, b, c: b & ~(511 << 5) | (a & 511) << 5),
    "popc": ("popc.b32 %r20, %r10;", lambda a, b, c: bin(a).count("1")),
    "clz": ("clz.b32 %r20, %r10;", lambda a, b, c: 32 - a.bit_length()),
    "brev": ("brev.b32 %r20, %r10;", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    "bfind.s32": (
        "bfind.s32 %r20, %r10;",
        lambda a, b, c: (a if a >> 31 == 0 else ~a & M32).bit_length() - 1,
    ),
    "selp": (
        "setp.lt.s32 %p8, %r10, %r11; selp.b32 %r20, %r10, %r12, %p8;",
        lambda a, b, c: a if _signed(a) < _signed(b) else c,
    ),
    "setp with and": (
        "setp.hi.u32 %p7, %r10, %r11; setp.ne.and.b32 %p8, %r11, %r12, %p7; selp.b32 %r20, 1, 0, %p8;",
        lambda a, b, c: int(a > b and b != c),
    ),
    "guard": (
        "mov.b32 %r20, %r12; setp.gt.u32 %p8, %r10, %r11; @!%p8 add.u32 %r20, %r10, 7;",
        lambda a, b, c: c if a > b else a + 7,
    ),
    "cvt.s8": ("cvt.s32.s8 %r20, %r10;", lambda a, b, c: _signed(a & 255, 8)),
    "pack": ("mov.b64 %rd20, {%r10, %r11}; mov.b64 {%r21, %r20}, %rd20;", lambda a, b, c: b),
    "mul.hi.u64": (
        "mov.b64 %rd20, {%r10, %r11}; mul.hi.u64 %rd21, %rd20, %rd20; cvt.u32.u64 %r20, %rd21;",
        lambda a, b, c: (b << 32 | a) ** 2 >> 64,
    ),
}


@pytest.mark.parametrize("name", INTEGER)
def test_integers(name: str) -> None:
    code, expected = INTEGER[name]
    operands = _operands()
    got = evaluate(code, operands)
    want = [expected(*(int(x) for x in column)) & M32 for column in operands.T]
    assert got.tolist() == want


def _number(word: int, at: int, bits: int, kind: str) -> int:
    """The number of `bits` bits at position `at` of a word."""
    value = word >> at & (1 << bits) - 1
    return _signed(value, bits) if kind == "s32" else value


@pytest.mark.parametrize("b_kind", ["u32", "s32"])
@pytest.mark.parametrize("a_kind", ["u32", "s32"])
@pytest.mark.parametrize("name", ["dp4a", "dp2a.lo", "dp2a.hi"])
def test_dot_products_of_bytes(name: str, a_kind: str, b_kind: str) -> None:
    operands = _operands(1)
    got = evaluate(f"{name}.{a_kind}.{b_kind} %r20, %r10, %r11, %r12;", operands)
    count, first = (4, 0) if name == "dp4a" else (2, 16 * (name == "dp2a.hi"))
    wide = 32 // count
    for lane in range(32):
        a, b, c = (int(x) for x in operands[:, lane])
        products = [
            _number(a, wide * i, wide, a_kind) * _number(b, first + 8 * i, 8, b_kind) for i in range(count)
        ]
        assert int(got[lane]) == (c + sum(products)) & M32, lane


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _nearest(value: Fraction) -> int:
    """Bits of the float32 nearest to ``value``, ties to even; only for normal results."""
    if value == 0:
        return 0
    exponent = math.floor(math.log2(abs(value)))
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    rounded = round(value / Fraction(2) ** (exponent - 23))  # Python rounds ties to even
    return int(np.float32(math.ldexp(rounded, exponent - 23)).view(np.uint32))


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_floats_round_once(name: str) -> None:
    rng = np.random.default_rng(3)
    mantissas = rng.integers(0, 1 << 23, (3, 32), dtype=np.uint64) | np.uint64(1)
    exponents = rng.integers(115, 140, (3, 32), dtype=np.uint64)
    operands = (mantissas | exponents << np.uint64(23)).astype(np.uint32)
    # A product whose tail only just decides the rounding of the sum.
    operands[:, 0] = [0x3F800001, 0x3F800001, 0x33000000]
    operands[:, 1] = [0x3F800001, 0x3F7FFFFF, 0x4B800000]
    code = {"add": "add.rn.f32 %r20, %r10, %r11;", "mul": "mul.rn.f32 %r20, %r10, %r11;",
            "fma": "fma.rn.f32 %r20, %r10, %r11, %r12;"}[name]  # fmt: skip
    got = evaluate(code, operands)
    for lane in range(32):
        a, b, c = (Fraction(_float(int(x))) for x in operands[:, lane])
        value = {"add": a + b, "mul": a * b, "fma": a * b + c}[name]
        assert int(got[lane]) == _nearest(value), lane


def test_float_comparisons_and_extremes_with_nan() -> None:
    nan, one, two = 0x7FC00000, 0x3F800000, 0x40000000
    operands = np.zeros((3, 32), np.uint32)
    operands[0, :4], operands[1, :4] = [nan, one, one, two], [one, nan, two, two]
    lanes = {
        "setp.lt.f32": [0, 0, 1, 0], "setp.ltu.f32": [1, 1, 1, 0], "setp.ne.f32": [0, 0, 1, 0],
        "setp.neu.f32": [1, 1, 1, 0], "setp.num.f32": [0, 0, 1, 1],
    }  # fmt: skip
    for opcode, expected in lanes.items():
        got = evaluate(f"{opcode} %p8, %r10, %r11; selp.b32 %r20, 1, 0, %p8;", operands)
        assert got[:4].tolist() == expected, opcode
    assert evaluate("max.f32 %r20, %r10, %r11;", operands)[:4].tolist() == [one, one, two, two]
    assert np.isnan(evaluate("max.NaN.f32 %r20, %r10, %r11;", operands)[:2].view(np.float32)).all()


def test_packed_conversion_puts_the_first_operand_on_top() -> None:
    operands = np.zeros((3, 32), np.float32)
    operands[0], operands[1] = 1.5, -2.0
    got = evaluate("cvt.rn.bf16x2.f32 %r20, %r10, %r11;", operands.view(np.uint32))
    assert (got == 0x3FC0C000).all()


def test_ftz_flushes_subnormal_inputs_and_results() -> None:
    operands = np.zeros((3, 32), np.uint32)
    operands[0], operands[1] = 0x00000001, 0x3F800000
    assert (evaluate("mul.ftz.f32 %r20, %r10, %r11;", operands) == 0).all()
    assert (evaluate("mul.f32 %r20, %r10, %r11;", operands) == 1).all()


@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
@pytest.mark.parametrize("width", [8, 32])
def test_shuffles(mode: str, width: int) -> None:
    amount = 3
    control = ((32 - width) << 8) | (0 if mode == "up" else 31)
    operands = np.arange(96, dtype=np.uint32).reshape(3, 32)
    got = evaluate(f"shfl.sync.{mode}.b32 %r20|%p9, %r10, {amount}, {control}, -1;", operands)
    for lane in range(32):
        base = lane // width * width
        other = {"idx": base + amount, "up": lane - amount, "down": lane + amount, "bfly": lane ^ amount}[
            mode
        ]
        inside = base <= other < base + width
        assert got[lane] == (other if inside else lane), lane


COLLATZ = """
add.u32 %r10, %r1, 1;
mov.b32 %r20, 0;
LOOP:
setp.eq.u32 %p4, %r10, 1;
@%p4 bra DONE;
and.b32 %r11, %r10, 1;
setp.eq.u32 %p5, %r11, 1;
@%p5 bra ODD;
shr.u32 %r10, %r10, 1;
bra NEXT;
ODD:
mad.lo.u32 %r10, %r10, 3, 1;
NEXT:
add.u32 %r20, %r20, 1;
bra LOOP;
DONE:
shfl.sync.bfly.b32 %r21, %r20, 1, 31, -1;
add.u32 %r20, %r20, %r21;
"""


def _collatz(n: int) -> int:
    count = 0
    while n != 1:
        n, count = (3 * n + 1 if n & 1 else n // 2), count + 1
    return count


def test_lanes_of_a_divergent_loop_meet_again() -> None:
    target = torch.zeros(32, dtype=torch.int32)
    store = (
        "ld.param.u64 %rd4, [p0];\ncvt.u64.u32 %rd2, %r4;\nadd.u64 %rd5, %rd4, %rd2;\n"
        "st.global.b32 [%rd5], %r20;"
    )
    for seed in range(3):
        session = run(COLLATZ + store, [target], seed=seed)
        assert not session.reports, "the shuffle needs all lanes together"
        assert target.tolist() == [_collatz(i + 1) + _collatz((i ^ 1) + 1) for i in range(32)]


def test_code_that_is_out_of_line_meets_at_its_post_dominator() -> None:
    body = """
setp.lt.u32 %p4, %r1, 5;
mov.b32 %r20, 1;
@%p4 bra FAR;
BACK:
activemask.b32 %r21;
bar.sync 0;
ld.param.u64 %rd4, [p0];
cvt.u64.u32 %rd2, %r4;
add.u64 %rd5, %rd4, %rd2;
st.global.b32 [%rd5], %r21;
bra END;
FAR:
add.u32 %r20, %r20, 1;
bra BACK;
END:
"""
    target = torch.zeros(32, dtype=torch.int32)
    assert not run(body, [target]).reports
    assert (target == -1).all(), "all 32 lanes run together after the detour"


def test_lanes_that_return_early_are_not_waited_for() -> None:
    body = """
setp.ge.u32 %p4, %r1, 20;
@%p4 ret;
bar.sync 0;
ld.param.u64 %rd4, [p0];
cvt.u64.u32 %rd2, %r4;
add.u64 %rd5, %rd4, %rd2;
st.global.b32 [%rd5], %r1;
"""
    target = torch.full((32,), -1, dtype=torch.int32)
    assert not run(body, [target]).reports
    assert target.tolist() == [*range(20), *([-1] * 12)]


def test_atomics_of_all_ctas_add_up() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.float32)
    body = """
ld.param.u64 %rd1, [p0];
red.global.add.u32 [%rd1], %r1;
ld.param.u64 %rd2, [p1];
mov.b32 %r10, 0f3F000000;
atom.global.add.f32 %r11, [%rd2], %r10;
"""
    run(body, [target, counter], grid=3, block=64)
    assert target.item() == 3 * 2 * sum(range(32))
    assert counter.item() == 0.5 * 192
