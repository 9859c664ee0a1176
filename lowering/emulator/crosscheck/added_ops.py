"""Scalar instructions that were added after the last recording; a later one takes them in.

They are groups of their own, so that the recorded groups keep their inputs and results.
"""

from __future__ import annotations

from .ops import Op, narrow, plain

_CARRY = ".reg .b32 t, u; "
_WIDE = ".reg .b64 a, b, t, u; .reg .b32 lo, hi; mov.b64 a, {$1, $2}; mov.b64 b, {$3, $4}; "
_FOLD = " mov.b64 {lo, hi}, u; xor.b32 $0, lo, hi;"


def _carry(name: str, text: str, wide: bool = False) -> Op:
    return Op("{ " + (_WIDE + text + _FOLD if wide else _CARRY + text) + " }", name=name)


def _predicate(opcode: str, inputs: str) -> Op:
    return Op(f"{{ .reg .pred p; {opcode} p, {inputs}; selp.b32 $0, 1, 0, p; }}", name=opcode)


CARRIES = [
    _carry("add.cc", "add.cc.u32 t, $1, $2; addc.u32 $0, $3, $4;"),
    _carry("addc.cc", "add.cc.u32 t, $1, $2; addc.cc.u32 u, $3, $4; addc.u32 $0, t, u;"),
    _carry("sub.cc", "sub.cc.u32 t, $1, $2; subc.u32 $0, $3, $4;"),
    _carry("subc.cc", "sub.cc.u32 t, $1, $2; subc.cc.s32 u, $3, $4; subc.u32 $0, t, u;"),
    _carry("mad.lo.cc", "mad.lo.cc.u32 t, $1, $2, $3; madc.hi.u32 $0, $1, $2, $4;"),
    _carry("mad.hi.cc.s32", "mad.hi.cc.s32 t, $1, $2, $3; addc.u32 $0, t, 0;"),
    _carry("madc.hi.cc", "mad.lo.cc.u32 t, $1, $2, $3; madc.hi.cc.u32 u, $1, $2, $4; addc.u32 $0, u, 0;"),
    _carry("add.cc.u64", "add.cc.u64 t, a, b; addc.u64 u, t, a;", wide=True),
    _carry("sub.cc.u64", "sub.cc.u64 t, a, b; subc.u64 u, t, a;", wide=True),
    _carry("mad.lo.cc.u64", "mad.lo.cc.u64 t, a, b, a; madc.hi.u64 u, a, b, b;", wide=True),
]
ADDED = [
    *(plain(f"dp4a.{a}.{b}", 3) for a in ("u32", "s32") for b in ("u32", "s32")),
    *(plain(f"dp2a.{half}.{a}.{b}", 3) for half in ("lo", "hi") for a in ("u32", "s32")
      for b in ("u32", "s32")),
    *(plain(f"prmt.b32.{mode}", 3) for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")),
    *(plain(f"add.{kind}", 2) for kind in ("u16x2", "s16x2")),
    *(plain(f"{op}.{kind}", 2) for op in ("min", "max")
      for kind in ("u16x2", "s16x2", "relu.s16x2", "relu.s32")),
    *(plain(f"mul24.{half}.{kind}", 2) for half in ("lo", "hi") for kind in ("u32", "s32")),
    *(plain(f"mad24.{form}", 3) for form in ("lo.u32", "lo.s32", "hi.u32", "hi.s32", "hi.sat.s32")),
    plain("mad.hi.sat.s32", 3), plain("sad.u32", 3), plain("sad.s32", 3),
    narrow("sad.s16", 16, (16, 16, 16)),
    *(plain(f"{op}.{mode}.{kind}", 2) for mode in ("clamp", "wrap")
      for op, kind in (("szext", "u32"), ("szext", "s32"), ("bmsk", "b32"))),
    Op("{ .reg .b32 at; and.b32 at, $2, 31; fns.b32 $0, $1, at, 3; }", name="fns up"),
    Op("{ .reg .b32 at; and.b32 at, $2, 31; fns.b32 $0, $1, at, -2; }", name="fns down"),
    plain("bfind.s32", 1), plain("bfind.shiftamt.s32", 1),
    plain("cvt.pack.sat.u16.s32", 2), plain("cvt.pack.sat.s16.s32", 2),
    *(plain(f"cvt.pack.sat.{kind}.s32.b32", 3) for kind in ("u8", "s8", "u4", "s4", "u2", "s2")),
    plain("slct.b32.s32", 3), plain("slct.b32.f32", 3), plain("slct.ftz.b32.f32", 3),
    *(_predicate(f"testp.{what}.f32", "$1")
      for what in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")),
    Op("{ .reg .pred p, q; setp.lt.f16x2 p|q, $1, $2; selp.b32 $0, 1, 0, p; @q or.b32 $0, $0, 2; }",
       name="setp.lt.f16x2"),
    plain("set.lt.u32.f32", 2), plain("set.ge.f32.f32", 2), plain("set.ne.s32.u32", 2),
]  # fmt: skip
DOUBLE = [
    *(narrow(f"{op}.{mode}.f64", 64, (64, 64)) for op in ("add", "sub", "mul", "div")
      for mode in ("rn", "rz", "rm", "rp")),
    *(narrow(f"{op}.{mode}.f64", 64, (64,)) for op in ("rcp", "sqrt") for mode in ("rn", "rz", "rm", "rp")),
    *(Op("{ " + _WIDE + f"fma.{mode}.f64 u, a, b, a;" + _FOLD + " }", name=f"fma.{mode}.f64")
      for mode in ("rn", "rz", "rm", "rp")),
]  # fmt: skip
