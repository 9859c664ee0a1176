"""Carries, packed numbers and odd modes of integer instructions, against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run  # noqa: E402
from test_arithmetic import M32, M64, _operands, _signed, evaluate  # noqa: E402

from lowering.emulator.reports import EmulatorError  # noqa: E402

Expected = Callable[[int, int, int], int]


def _check(code: str, expected: Expected, seed: int = 0, small_c: int = 0) -> None:
    operands = _operands(seed)
    if small_c:
        operands[2] = np.arange(32) % small_c
    got = evaluate(code, operands)
    want = [expected(*(int(x) for x in column)) & M32 for column in operands.T]
    assert got.tolist() == want


def _halves(a: int, b: int, function: Callable[[int, int], int], signed: bool) -> int:
    out = 0
    for shift in (0, 16):
        x, y = a >> shift & 0xFFFF, b >> shift & 0xFFFF
        if signed:
            x, y = _signed(x, 16), _signed(y, 16)
        out |= (function(x, y) & 0xFFFF) << shift
    return out


WIDE = "mov.b64 %rd10, {%r10, %r11}; mov.b64 %rd11, {%r11, %r12};"
FOLD = "mov.b64 {%r30, %r31}, %rd20; xor.b32 %r20, %r30, %r31;"
BORROW = "{ .reg .u32 t; sub.cc.u32 t, %r10, %r11; subc.u32 %r20, %r12, %r11; }"


def _folded(value: int) -> int:
    return (value ^ value >> 32) & M32


CASES: dict[str, tuple[str, Expected]] = {
    "addc reads the carry": (
        "add.cc.u32 %r21, %r10, %r11; addc.u32 %r20, %r12, %r11;",
        lambda a, b, c: c + b + (a + b >> 32),
    ),
    "addc.cc passes it on": (
        "add.cc.u32 %r21, %r10, %r11; addc.cc.s32 %r22, %r11, %r12; addc.u32 %r20, 0, 0;",
        lambda a, b, c: b + c + (a + b >> 32) >> 32,
    ),
    "carry without addc.cc stays": (
        "add.cc.u32 %r21, %r10, %r11; addc.u32 %r22, %r11, %r12; addc.u32 %r20, 0, 0;",
        lambda a, b, c: a + b >> 32,
    ),
    "a guard keeps the carry": (
        "setp.gt.u32 %p8, %r12, 1000; add.cc.u32 %r21, 0, 0; @%p8 add.cc.u32 %r21, %r10, %r11;"
        "addc.u32 %r20, 0, 0;",
        lambda a, b, c: (a + b >> 32) if c > 1000 else 0,
    ),
    "subc reads the borrow": (BORROW, lambda a, b, c: c - b - (a < b)),
    "subc.cc passes it on": (
        "sub.cc.u32 %r21, %r10, %r11; subc.cc.u32 %r22, %r11, %r12; subc.u32 %r20, 0, 0;",
        lambda a, b, c: -(b - c - (a < b) < 0),
    ),
    "add.cc.u64": (
        WIDE + "add.cc.u64 %rd12, %rd10, %rd11; addc.u64 %rd20, %rd10, %rd10;" + FOLD,
        lambda a, b, c: _folded(2 * (b << 32 | a) + ((b << 32 | a) + (c << 32 | b) >> 64) & M64),
    ),
    "sub.cc.s64": (
        WIDE + "sub.cc.s64 %rd12, %rd10, %rd11; subc.s64 %rd20, %rd11, %rd10;" + FOLD,
        lambda a, b, c: _folded((c << 32 | b) - (b << 32 | a) - ((b << 32 | a) < (c << 32 | b)) & M64),
    ),
    "mad.lo.cc and madc.hi make a wide product": (
        "mad.lo.cc.u32 %r21, %r10, %r11, %r12; madc.hi.u32 %r20, %r10, %r11, 0;",
        lambda a, b, c: a * b + c >> 32,
    ),
    "madc.hi.cc": (
        "mad.lo.cc.u32 %r21, %r10, %r11, %r12; madc.hi.cc.u32 %r22, %r10, %r11, %r12; addc.u32 %r20, 0, 0;",
        lambda a, b, c: (a * b >> 32) + c + ((a * b & M32) + c >> 32) >> 32,
    ),
    "mad.hi.cc.s32": (
        "mad.hi.cc.s32 %r21, %r10, %r11, %r12; addc.u32 %r20, %r21, 0;",
        lambda a, b, c: (h := _signed(a) * _signed(b) >> 32 & M32) + c + (h + c >> 32),
    ),
    "mad.lo.cc.u64": (
        WIDE + "mad.lo.cc.u64 %rd12, %rd10, %rd11, %rd10; madc.hi.u64 %rd20, %rd10, %rd11, 0;" + FOLD,
        lambda a, b, c: _folded((b << 32 | a) * (c << 32 | b) + (b << 32 | a) >> 64),
    ),
    "add.u16x2": ("add.u16x2 %r20, %r10, %r11;", lambda a, b, c: _halves(a, b, lambda x, y: x + y, False)),
    "add.s16x2": ("add.s16x2 %r20, %r10, %r11;", lambda a, b, c: _halves(a, b, lambda x, y: x + y, True)),
    "min.s16x2": ("min.s16x2 %r20, %r10, %r11;", lambda a, b, c: _halves(a, b, min, True)),
    "max.u16x2": ("max.u16x2 %r20, %r10, %r11;", lambda a, b, c: _halves(a, b, max, False)),
    "min.relu.s16x2": (
        "min.relu.s16x2 %r20, %r10, %r11;",
        lambda a, b, c: _halves(a, b, lambda x, y: max(min(x, y), 0), True),
    ),
    "max.relu.s16x2": (
        "max.relu.s16x2 %r20, %r10, %r11;",
        lambda a, b, c: _halves(a, b, lambda x, y: max(x, y, 0), True),
    ),
    "max.relu.s32": (
        "max.relu.s32 %r20, %r10, %r11;",
        lambda a, b, c: max(_signed(a), _signed(b), 0),
    ),
    "mul24.lo.u32": ("mul24.lo.u32 %r20, %r10, %r11;", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "mul24.hi.s32": (
        "mul24.hi.s32 %r20, %r10, %r11;",
        lambda a, b, c: _signed(a & 0xFFFFFF, 24) * _signed(b & 0xFFFFFF, 24) >> 16,
    ),
    "mad24.lo.s32": (
        "mad24.lo.s32 %r20, %r10, %r11, %r12;",
        lambda a, b, c: _signed(a & 0xFFFFFF, 24) * _signed(b & 0xFFFFFF, 24) + c,
    ),
    "mad24.hi.sat.s32": (
        "mad24.hi.sat.s32 %r20, %r10, %r11, %r12;",
        lambda a, b, c: min(
            max((_signed(a & 0xFFFFFF, 24) * _signed(b & 0xFFFFFF, 24) >> 16) + _signed(c), -(1 << 31)),
            (1 << 31) - 1,
        ),
    ),
    "mad.hi.sat.s32": (
        "mov.b32 %r10, -2147483648; mad.hi.sat.s32 %r20, %r10, %r10, %r12;",
        lambda a, b, c: min((1 << 30) + _signed(c), (1 << 31) - 1),
    ),
    "sad.u32": ("sad.u32 %r20, %r10, %r11, %r12;", lambda a, b, c: c + abs(a - b)),
    "sad.s32": ("sad.s32 %r20, %r10, %r11, %r12;", lambda a, b, c: c + abs(_signed(a) - _signed(b))),
    "cvt.pack.s16": (
        "cvt.pack.sat.s16.s32 %r20, %r10, %r11;",
        lambda a, b, c: _clamp(a, 16, True) << 16 | _clamp(b, 16, True),
    ),
    "cvt.pack.u16": (
        "cvt.pack.sat.u16.s32 %r20, %r10, %r11;",
        lambda a, b, c: _clamp(a, 16, False) << 16 | _clamp(b, 16, False),
    ),
    "slct.s32": ("slct.u32.s32 %r20, %r10, %r11, %r12;", lambda a, b, c: a if _signed(c) >= 0 else b),
    "cnot": ("cnot.b32 %r20, %r10;", lambda a, b, c: int(a == 0)),
    "shl.b16 by more than its width": (
        "{ .reg .b16 h, z, y; mov.b32 {h, z}, %r10; shl.b16 y, h, %r11; cvt.u32.u16 %r20, y; }",
        lambda a, b, c: a << b & 0xFFFF if b < 16 else 0,
    ),
    "cvt.sat between integers": (
        "{ .reg .b16 y; cvt.sat.u16.s32 y, %r10; cvt.u32.u16 %r20, y; }",
        lambda a, b, c: _clamp(a, 16, False),
    ),
}


def _clamp(word: int, bits: int, signed: bool) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return min(max(_signed(word), low), high) & (1 << bits) - 1


@pytest.mark.parametrize("name", CASES)
def test_integer_instruction(name: str) -> None:
    _check(*CASES[name])


@pytest.mark.parametrize("kind", ["u8", "s8", "u4", "s4", "u2", "s2"])
def test_cvt_pack_shifts_the_third_source_up(kind: str) -> None:
    bits = int(kind[1:])
    operands = _operands(5)
    operands[0, 13:] %= 300
    operands[1, 13:] = -(operands[1, 13:] % 150).astype(np.int64)
    got = evaluate(f"cvt.pack.sat.{kind}.s32.b32 %r20, %r10, %r11, %r12;", operands)
    for lane in range(32):
        a, b, c = (int(x) for x in operands[:, lane])
        signed = kind[0] == "s"
        want = _clamp(b, bits, signed) | _clamp(a, bits, signed) << bits | c << 2 * bits
        assert int(got[lane]) == want & M32, lane


# Bytes 3, 2, 1, 0 of the result as the PTX ISA lists them; bytes of a are 0 to 3, bytes of b 4 to 7.
PRMT = {
    "f4e": ["3210", "4321", "5432", "6543"], "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"], "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"], "rc16": ["1010", "3232", "1010", "3232"],
}  # fmt: skip


@pytest.mark.parametrize("mode", PRMT)
def test_prmt_modes(mode: str) -> None:
    def expected(a: int, b: int, c: int) -> int:
        value = a | b << 32
        picked = [value >> 8 * int(digit) & 255 for digit in reversed(PRMT[mode][c & 3])]
        return sum(byte << 8 * i for i, byte in enumerate(picked))

    _check(f"prmt.b32.{mode} %r20, %r10, %r11, %r12;", expected)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_szext(kind: str, mode: str) -> None:
    def expected(a: int, b: int, c: int) -> int:
        count = min(c, 32) if mode == "clamp" else c & 31
        value = a & (1 << count) - 1
        return _signed(value, count) if kind == "s32" and count else value

    _check(f"szext.{mode}.{kind} %r20, %r10, %r12;", expected, small_c=31)
    _check(f"szext.{mode}.{kind} %r20, %r10, %r12;", expected)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_bmsk(mode: str) -> None:
    def expected(a: int, b: int, c: int) -> int:
        start, count = (min(b, 32), min(c, 32)) if mode == "clamp" else (b & 31, c & 31)
        return sum(1 << i for i in range(start, min(start + count, 32)))

    _check(f"bmsk.{mode}.b32 %r20, %r11, %r12;", expected, small_c=32)
    _check(f"and.b32 %r11, %r11, 63; bmsk.{mode}.b32 %r20, %r11, %r12;",
           lambda a, b, c: expected(a, b & 63, c), small_c=32)  # fmt: skip


@pytest.mark.parametrize("offset", [0, 1, 2, 5, -1, -3])
def test_fns(offset: int) -> None:
    def expected(a: int, b: int, c: int) -> int:
        if offset == 0:
            return c if a >> c & 1 else M32
        order = range(c, 32) if offset > 0 else range(c, -1, -1)
        found = [i for i in order if a >> i & 1]
        return found[abs(offset) - 1] if abs(offset) <= len(found) else M32

    _check(f"fns.b32 %r20, %r10, %r12, {offset};", expected, small_c=32)


def test_testp_and_slct_of_floats() -> None:
    operands = np.zeros((3, 32), np.uint32)
    patterns = [0, 1, 0x00800000, 0x3F800000, 0x7F800000, 0x7FC00000, 0x80000000, 0xBF800000]
    operands[0, : len(patterns)] = patterns
    operands[1], operands[2] = 10, 20
    table = {
        "finite": [1, 1, 1, 1, 0, 0, 1, 1], "infinite": [0, 0, 0, 0, 1, 0, 0, 0],
        "number": [1, 1, 1, 1, 1, 0, 1, 1], "notanumber": [0, 0, 0, 0, 0, 1, 0, 0],
        "normal": [1, 0, 1, 1, 0, 0, 1, 1], "subnormal": [0, 1, 0, 0, 0, 0, 0, 0],
    }  # fmt: skip
    for what, expected in table.items():
        got = evaluate(f"testp.{what}.f32 %p8, %r10; selp.b32 %r20, 1, 0, %p8;", operands)
        assert got[:8].tolist() == expected, what
    got = evaluate("slct.b32.f32 %r20, %r11, %r12, %r10;", operands)
    assert got[:8].tolist() == [10, 10, 10, 10, 10, 20, 10, 20]


NOT_HERE = {
    "cvt.rs.f16x2.f32 %r20, %r10, %r11, %r12;": "sm_100",
    "add.f32x2 %rd20, %rd1, %rd2;": "sm_100",
    "vadd.u32.u32.u32 %r20, %r10, %r11;": "video",
    "vset4.u32.u32.lt %r20, %r10, %r11, %r12;": "video",
    "multimem.red.relaxed.sys.global.add.u32 [%rd1], %r10;": "several GPUs",
    "tcgen05.fence::before_thread_sync;": "sm_100",
    "add.sat.u32 %r20, %r10, %r11;": "sat",
    "prmt.b32.f5e %r20, %r10, %r11, %r12;": "f5e",
}


@pytest.mark.parametrize("code", NOT_HERE)
def test_what_is_missing_says_why(code: str) -> None:
    with pytest.raises(EmulatorError, match=NOT_HERE[code]) as caught:
        evaluate(code, _operands())
    assert code.rstrip(";") in str(caught.value) and "PTX line" in str(caught.value)
    assert "kernel k" in str(caught.value)


def test_mov_packs_four_pieces() -> None:
    code = """
{ .reg .b16 a, b, c, d; mov.b32 {a, b}, %r10; mov.b32 {c, d}, %r11;
mov.b64 %rd20, {d, a, b, c}; mov.b64 {%r21, %r22}, %rd20; sub.u32 %r20, %r21, %r22; }
"""
    _check(code, lambda a, b, c: (b >> 16 | (a & 0xFFFF) << 16) - (a >> 16 | (b & 0xFFFF) << 16))


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_of_128_bits(space: str) -> None:
    code = f"""
.reg .b128 %q<4>;
ld.param.u64 %rd1, [p0];
{"mov.u32 %r9, smem; cvt.u64.u32 %rd1, %r9;" if space == "shared" else ""}
@%p1 st.{space}.v2.b64 [%rd1], {{5, 6}};
bar.warp.sync -1;
cvt.u64.u32 %rd2, %r1;
mov.b64 %rd3, 100;
mov.b128 %q0, {{%rd2, %rd3}};
atom.{space}.exch.b128 %q1, [%rd1], %q0;
mov.b128 {{%rd4, %rd5}}, %q1;
setp.eq.u64 %p4, %rd5, 6;
setp.eq.u32 %p5, %r1, 0;
mov.b64 %rd6, 31; mov.b128 %q2, {{%rd6, %rd3}};
mov.b64 %rd7, 77; mov.b128 %q3, {{%rd7, %rd7}};
atom.{space}.cas.b128 %q1, [%rd1], %q2, %q3;
@%p5 mov.b128 %q2, %q1;
ld.param.u64 %rd8, [p1]; mul.wide.u32 %rd9, %r1, 16; add.u64 %rd8, %rd8, %rd9;
st.global.v2.b64 [%rd8], {{%rd4, %rd5}};
mov.b128 {{%rd4, %rd5}}, %q1;
st.global.v2.b64 [%rd8+512], {{%rd4, %rd5}};
"""
    memory, out = torch.zeros(2, dtype=torch.int64), torch.zeros((2, 32, 2), dtype=torch.int64)
    assert not run(code, [memory, out]).reports
    assert out[0].tolist() == [[5, 6], *([i, 100] for i in range(31))], (
        "each lane swaps with the one before it"
    )
    assert out[1].tolist() == [[31, 100], *([77, 77] for _ in range(31))], (
        "only the first comparison is equal"
    )
    if space == "global":
        assert memory.tolist() == [77, 77]


def test_set_and_packed_setp() -> None:
    operands = np.zeros((3, 32), np.uint32)
    operands[0, :4] = [0x3C004000, 0x40003C00, 0x7E003C00, 0xBC00BC00]  # f16: high and low halves
    operands[1, :4] = [0x40003C00, 0x3C004000, 0x3C003C00, 0x00003C00]
    code = "setp.lt.f16x2 %p8|%p9, %r10, %r11; selp.b32 %r20, 1, 0, %p8; @%p9 or.b32 %r20, %r20, 2;"
    assert evaluate(code, operands)[:4].tolist() == [2, 1, 0, 3]
    code = "setp.leu.or.f16x2 %p8|%p9, %r10, %r11, %p1; selp.b32 %r20, 1, 0, %p8; @%p9 or.b32 %r20, %r20, 2;"
    assert evaluate(code, operands)[:4].tolist() == [3, 1, 3, 3]
    operands[0], operands[1] = np.arange(32), 16
    for kind, true in (("u32", M32), ("s32", M32), ("f32", 0x3F800000)):
        got = evaluate(f"set.lt.{kind}.u32 %r20, %r10, %r11;", operands)
        assert got.tolist() == [true if i < 16 else 0 for i in range(32)]
    got = evaluate("setp.gt.u32 %p8, %r10, 3; set.lt.and.u32.u32 %r20, %r10, %r11, %p8;", operands)
    assert got.tolist() == [M32 if 3 < i < 16 else 0 for i in range(32)]
    code = "{ .reg .b16 h, a, b, z; mov.b32 {a, z}, %r10; mov.b32 {b, z}, %r11;"
    code += "set.lt.f16.f16 h, a, b; cvt.u32.u16 %r20, h; }"
    assert evaluate(code, operands)[:17].tolist() == [0x3C00] * 16 + [0]
