"""The scalar and packed instructions that are compared: PTX text, and how close the results must be.

An operand is a 32-bit register: `$0` the result, `$1` to `$4` the inputs. Narrower and wider types are moved
in and out of such registers by the helpers below.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction. `as_type`: how to read the result; `ulp`: allowed units in its last place."""

    text: str
    as_type: str = "b32"
    ulp: int = 0
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.text.split()[0]


def plain(opcode: str, inputs: int, as_type: str = "b32", ulp: int = 0) -> Op:
    """`opcode $0, $1, …;` on 32-bit registers."""
    operands = ", ".join(f"${i}" for i in range(inputs + 1))
    return Op(f"{opcode} {operands};", as_type, ulp, opcode)


def narrow(
    opcode: str, result: int = 32, inputs: tuple[int, ...] = (32,), as_type: str = "b32", ulp: int = 0
) -> Op:
    """`opcode` whose result or inputs are 16 or 64 bits wide.

    16-bit inputs are the low half of their register; a 64-bit input takes two registers, low word first. A
    16-bit result fills both halves of its register (an H200 gave `cvt.sat.s16.s32` followed by `cvt.u32.u16`
    as 0xffff8000: ptxas may leave a sign where it believes in zeros); of a 64-bit result the exclusive or of
    its halves is kept.
    """
    lines, names, at = [], [], 1
    for i, width in enumerate(inputs):
        if width == 16:
            lines.append(f".reg .b16 x{i}, z{i}; mov.b32 {{x{i}, z{i}}}, ${at};")
        elif width == 64:
            lines.append(f".reg .b64 x{i}; mov.b64 x{i}, {{${at}, ${at + 1}}};")
        names.append(f"x{i}" if width != 32 else f"${at}")
        at += 2 if width == 64 else 1
    target = "$0" if result == 32 else "y"
    if result != 32:
        lines.append(f".reg .b{result} y;")
    lines.append(f"{opcode} {target}, {', '.join(names)};")
    if result == 16:
        lines.append("mov.b32 $0, {y, y};")
    elif result == 64:
        lines.append(".reg .b32 lo, hi; mov.b64 {lo, hi}, y; xor.b32 $0, lo, hi;")
    return Op("{ " + " ".join(lines) + " }", as_type, ulp, opcode)


def _typed(members: list[Op]) -> list[Op]:
    """`members` whose results are read as the type that ends their opcode: any NaN then equals any other."""
    return [
        dataclasses.replace(op, as_type={"f16": "f16x2", "bf16": "bf16x2"}.get(last, last))
        if (last := op.label.split(".")[-1]) in ("f32", "f16", "bf16", "f16x2", "bf16x2")
        and "setp" not in op.label
        else op
        for op in members
    ]


def compare(comparison: str, kind: str) -> Op:
    """`setp.comparison.kind`, as 0 or 1."""
    text = f"{{ .reg .pred p; setp.{comparison}.{kind} p, $1, $2; selp.b32 $0, 1, 0, p; }}"
    return Op(text, name=f"setp.{comparison}.{kind}")


CONVERSIONS = [
    narrow("cvt.rn.f16.f32", 16), narrow("cvt.rz.f16.f32", 16), narrow("cvt.rn.relu.f16.f32", 16),
    narrow("cvt.rn.bf16.f32", 16), narrow("cvt.rz.bf16.f32", 16), narrow("cvt.rn.relu.bf16.f32", 16),
    narrow("cvt.rn.ftz.f16.f32", 16),
    plain("cvt.rna.tf32.f32", 1), plain("cvt.rn.tf32.f32", 1), plain("cvt.rz.tf32.f32", 1),
    plain("cvt.rn.relu.tf32.f32", 1),
    plain("cvt.rn.f16x2.f32", 2), plain("cvt.rz.f16x2.f32", 2), plain("cvt.rn.relu.f16x2.f32", 2),
    plain("cvt.rn.bf16x2.f32", 2), plain("cvt.rz.bf16x2.f32", 2), plain("cvt.rn.relu.bf16x2.f32", 2),
    narrow("cvt.rn.satfinite.e4m3x2.f32", 16, (32, 32)), narrow("cvt.rn.satfinite.e5m2x2.f32", 16, (32, 32)),
    narrow("cvt.rn.satfinite.relu.e4m3x2.f32", 16, (32, 32)),
    narrow("cvt.rn.satfinite.relu.e5m2x2.f32", 16, (32, 32)),
    narrow("cvt.rn.satfinite.e4m3x2.f16x2", 16), narrow("cvt.rn.satfinite.e5m2x2.f16x2", 16),
    narrow("cvt.rn.f16x2.e4m3x2", 32, (16,)), narrow("cvt.rn.f16x2.e5m2x2", 32, (16,)),
    narrow("cvt.rn.relu.f16x2.e4m3x2", 32, (16,)),
    narrow("cvt.f32.f16", 32, (16,)), narrow("cvt.f32.bf16", 32, (16,)),
    plain("cvt.rni.s32.f32", 1), plain("cvt.rzi.s32.f32", 1), plain("cvt.rmi.s32.f32", 1),
    plain("cvt.rpi.s32.f32", 1), plain("cvt.rzi.u32.f32", 1), plain("cvt.rni.ftz.s32.f32", 1),
    plain("cvt.rni.f32.f32", 1), plain("cvt.rzi.f32.f32", 1), plain("cvt.rmi.ftz.f32.f32", 1),
    plain("cvt.rpi.f32.f32", 1), plain("cvt.sat.f32.f32", 1), plain("cvt.ftz.f32.f32", 1),
    plain("cvt.rn.f32.s32", 1), plain("cvt.rn.f32.u32", 1), plain("cvt.rz.f32.s32", 1),
    plain("cvt.rp.f32.u32", 1), narrow("cvt.rn.f16.s32", 16), narrow("cvt.rzi.s32.f16", 32, (16,)),
    narrow("cvt.rzi.s64.f32", 64), narrow("cvt.rzi.u64.f32", 64), narrow("cvt.rn.f32.s64", 32, (64,)),
    narrow("cvt.rz.f32.u64", 32, (64,)), narrow("cvt.rn.f32.f64", 32, (64,)), narrow("cvt.f64.f32", 64),
    narrow("cvt.rn.f64.s64", 64, (64,)), narrow("cvt.sat.u8.s32", 16), narrow("cvt.sat.s16.s32", 16),
    narrow("cvt.s32.s16", 32, (16,)), narrow("cvt.u32.s8", 32, (16,)),
]  # fmt: skip

_ROUNDED = [f"{op}.{mode}{ftz}.f32" for op in ("add", "sub", "mul")
            for mode in ("rn", "rz", "rm", "rp") for ftz in ("", ".ftz")]  # fmt: skip

FLOAT = _typed([
    *(plain(opcode, 2) for opcode in _ROUNDED),
    plain("add.rn.ftz.sat.f32", 2), plain("mul.rn.sat.f32", 2),
    *(plain(f"fma.{mode}{ftz}.f32", 3) for mode in ("rn", "rz", "rm", "rp") for ftz in ("", ".ftz")),
    plain("fma.rn.sat.f32", 3),
    *(plain(f"{op}{ftz}{nan}.f32", 2) for op in ("min", "max") for ftz in ("", ".ftz") for nan in ("",
    ".NaN")), plain("abs.f32", 1), plain("neg.f32", 1), plain("abs.ftz.f32", 1), plain("neg.ftz.f32", 1),
    plain("rcp.rn.f32", 1), plain("rcp.rz.ftz.f32", 1), plain("sqrt.rn.f32", 1), plain("sqrt.rn.ftz.f32", 1),
    plain("div.rn.f32", 2), plain("div.rn.ftz.f32", 2), plain("copysign.f32", 2),
    *(compare(c, kind) for c in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "geu", "num", "nan")
      for kind in ("f32", "ftz.f32")),
])  # fmt: skip

# Distances in ulp that the PTX ISA allows between the hardware and the exact result.
APPROXIMATE = [
    plain("ex2.approx.ftz.f32", 1, "f32", 2), plain("ex2.approx.f32", 1, "f32", 2),
    plain("rcp.approx.ftz.f32", 1, "f32", 1), plain("rcp.approx.f32", 1, "f32", 1),
    plain("rsqrt.approx.ftz.f32", 1, "f32", 2), plain("rsqrt.approx.f32", 1, "f32", 2),
    plain("sqrt.approx.ftz.f32", 1, "f32", 3), plain("div.approx.ftz.f32", 2, "f32", 2),
    plain("div.full.f32", 2, "f32", 2),
    plain("ex2.approx.ftz.bf16x2", 1, "bf16x2", 1), plain("ex2.approx.f16x2", 1, "f16x2", 1),
]  # fmt: skip

# On moderate arguments: errors are absolute near zero and results are compared within 2^-20 (tanh: 2^-10).
ABSOLUTE = [
    plain("lg2.approx.ftz.f32", 1, "f32~-20"), plain("sin.approx.ftz.f32", 1, "f32~-20"),
    plain("cos.approx.ftz.f32", 1, "f32~-20"), plain("tanh.approx.f32", 1, "f32~-10"),
    plain("tanh.approx.f16x2", 1, "f16x2~-10"), plain("tanh.approx.bf16x2", 1, "bf16x2~-7"),
]  # fmt: skip

PACKED = _typed([
    *(plain(f"{op}.rn.{kind}", 2) for op in ("add", "sub", "mul") for kind in ("f16x2", "bf16x2")),
    *(plain(f"fma.rn{flag}.{kind}", 3) for flag in ("", ".relu") for kind in ("f16x2", "bf16x2")),
    *(plain(f"{op}{nan}.{kind}", 2) for op in ("min", "max") for nan in ("", ".NaN")
      for kind in ("f16x2", "bf16x2")),
    plain("fma.rn.ftz.f16x2", 3), plain("add.ftz.f16x2", 2), plain("mul.sat.f16x2", 2),
    plain("neg.f16x2", 1), plain("abs.f16x2", 1), plain("neg.bf16x2", 1), plain("abs.bf16x2", 1),
    narrow("add.rn.f16", 16, (16, 16)), narrow("fma.rn.bf16", 16, (16, 16, 16)),
])  # fmt: skip

INTEGER = [
    plain("mul.lo.s32", 2), plain("mul.hi.s32", 2), plain("mul.hi.u32", 2), plain("mad.lo.s32", 3),
    plain("mad.hi.u32", 3), narrow("mul.wide.s32", 64, (32, 32)), narrow("mul.wide.u32", 64, (32, 32)),
    narrow("mad.wide.s32", 64, (32, 32, 64)), narrow("mul.lo.s64", 64, (64, 64)),
    narrow("mul.hi.s64", 64, (64, 64)), narrow("add.s64", 64, (64, 64)),
    plain("div.s32", 2), plain("div.u32", 2), plain("rem.s32", 2), plain("rem.u32", 2),
    plain("min.s32", 2), plain("max.u32", 2), plain("abs.s32", 1), plain("add.sat.s32", 2),
    plain("shl.b32", 2), plain("shr.s32", 2), plain("shr.u32", 2), plain("shf.l.wrap.b32", 3),
    plain("shf.r.clamp.b32", 3), plain("shf.l.clamp.b32", 3), plain("shf.r.wrap.b32", 3),
    plain("prmt.b32", 3),
    plain("bfe.s32", 3), plain("bfe.u32", 3),
    Op("bfi.b32 $0, $1, $2, $3, 7;", name="bfi.b32"),
    Op("lop3.b32 $0, $1, $2, $3, 0x96;", name="lop3.b32 0x96"),
    Op("lop3.b32 $0, $1, $2, $3, 0xd8;", name="lop3.b32 0xd8"),
    plain("popc.b32", 1), plain("clz.b32", 1), plain("brev.b32", 1),
    plain("bfind.u32", 1), plain("bfind.shiftamt.u32", 1),
    *(compare(c, kind) for c in ("eq", "lt", "ge") for kind in ("s32", "u32")),
    compare("lo", "u32"), compare("hs", "u32"),
]  # fmt: skip

WARP = [
    Op("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", name="shfl.idx"),
    Op("shfl.sync.bfly.b32 $0, $1, 5, 31, -1;", name="shfl.bfly"),
    Op("shfl.sync.up.b32 $0, $1, 3, 0, -1;", name="shfl.up"),
    Op("shfl.sync.down.b32 $0, $1, 3, 31, -1;", name="shfl.down"),
    Op("shfl.sync.bfly.b32 $0, $1, 2, 0x1c1f, -1;", name="shfl.bfly width 4"),
    Op("shfl.sync.up.b32 $0, $1, 2, 0x1800, -1;", name="shfl.up width 8"),
    Op(
        "{ .reg .pred p; shfl.sync.down.b32 $0|p, $1, 9, 31, -1; selp.b32 $0, $0, 77, p; }",
        name="shfl.down|p",
    ),
    Op("{ .reg .pred p; setp.lt.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }", name="vote.ballot"),
    Op("{ .reg .pred p; setp.lt.s32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }",
       name="vote.any"),
    Op("redux.sync.add.s32 $0, $1, -1;", name="redux.add"),
    Op("redux.sync.max.s32 $0, $1, -1;", name="redux.max"),
    Op("redux.sync.min.u32 $0, $1, -1;", name="redux.min"),
    Op("redux.sync.xor.b32 $0, $1, -1;", name="redux.xor"),
    Op("{ .reg .b32 t; and.b32 t, $2, 3; match.any.sync.b32 $0, t, -1; }", name="match.any"),
    Op("{ .reg .pred p; elect.sync $0|p, -1; selp.b32 $0, 1, $0, p; }", name="elect"),
    Op("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", name="movmatrix"),
]  # fmt: skip
