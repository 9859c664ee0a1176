"""The forms of instructions that the emulator knows, and reasons for those that it does not.

`ARITHMETIC` lists the types and modifiers of each instruction that works on registers alone: an instruction
with another one is refused, never executed as if the modifier were not there.
"""

from __future__ import annotations

from .ptx import Instruction

_INT = "u16 u32 u64 s16 s32 s64"
_FLOAT = "f32 f64 rn rz rm rp ftz"
_HALF = "f16 f16x2 bf16 bf16x2"
_BITS = "b16 b32 b64"
_COMPARE = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz"
_EXTREME = f"{_INT} u16x2 s16x2 {_HALF} f32 f64 ftz relu NaN"
_APPROX = f"approx ftz {_FLOAT}"

ARITHMETIC: dict[str, str] = {
    "abs": f"s16 s32 s64 f32 f64 {_HALF} ftz",
    "add": f"{_INT} u16x2 s16x2 {_FLOAT} {_HALF} sat cc",
    "addc": "u32 s32 u64 s64 cc",
    "and": f"pred {_BITS}",
    "bfe": "u32 u64 s32 s64",
    "bfi": "b32 b64",
    "bfind": "u32 u64 s32 s64 shiftamt",
    "bmsk": "b32 clamp wrap",
    "brev": "b32 b64",
    "clz": "b32 b64",
    "cnot": _BITS,
    "copysign": "f32 f64",
    "cos": "approx ftz f32",
    "cvt": f"u8 s8 {_INT} {_FLOAT} {_HALF} tf32 e4m3x2 e5m2x2 rna rni rzi rmi rpi sat satfinite relu pack "
    "s4 u4 s2 u2 b32",
    "cvta": "to global shared shared::cta shared::cluster local const param param::entry u32 u64",
    "div": f"{_INT} {_FLOAT} approx full",
    "dp2a": "u32 s32 lo hi",
    "dp4a": "u32 s32",
    "ex2": f"approx ftz f32 {_HALF}",
    "fma": f"{_FLOAT} {_HALF} sat relu",
    "fns": "b32",
    "isspacep": "global shared shared::cta shared::cluster local const param param::entry",
    "lg2": "approx ftz f32",
    "lop3": "b32",
    "mad": f"{_INT} {_FLOAT} lo hi wide sat cc",
    "mad24": "u32 s32 lo hi sat",
    "madc": "u32 s32 u64 s64 lo hi cc",
    "max": _EXTREME,
    "min": _EXTREME,
    "mov": f"pred {_BITS} b128 {_INT} f32 f64",
    "mul": f"{_INT} {_FLOAT} {_HALF} lo hi wide sat",
    "mul24": "u32 s32 lo hi",
    "neg": f"s16 s32 s64 f32 f64 {_HALF} ftz",
    "not": f"pred {_BITS}",
    "or": f"pred {_BITS}",
    "popc": "b32 b64",
    "prmt": "b32 f4e b4e rc8 ecl ecr rc16",
    "rcp": _APPROX,
    "rem": _INT,
    "rsqrt": "approx ftz f32 f64",
    "sad": _INT,
    "selp": f"{_BITS} {_INT} f32 f64",
    "set": f"{_COMPARE} {_BITS} {_INT} f32 f64 {_HALF}",
    "setp": f"{_COMPARE} {_BITS} {_INT} f32 f64 {_HALF}",
    "shf": "l r clamp wrap b32",
    "shl": _BITS,
    "shr": f"{_BITS} {_INT}",
    "sin": "approx ftz f32",
    "slct": f"{_BITS} {_INT} f32 f64 ftz",
    "sqrt": _APPROX,
    "sub": f"{_INT} u16x2 s16x2 {_FLOAT} {_HALF} sat cc",
    "subc": "u32 s32 u64 s64 cc",
    "szext": "u32 s32 clamp wrap",
    "tanh": f"approx f32 {_HALF}",
    "testp": "finite infinite number notanumber normal subnormal f32 f64",
    "xor": f"pred {_BITS}",
}

_BLACKWELL = "it needs sm_100 or later; the emulator runs sm_80 to sm_90a"
_VIDEO = "video instructions are not modelled; no GPU since sm_50 has them in hardware"
_TEXTURE = "textures and surfaces are not modelled"
MISSING: dict[str, str] = {
    **dict.fromkeys(("tcgen05", "clusterlaunchcontrol", "setctarank", "add.f32x2", "mul.f32x2", "fma.f32x2",
                     "sub.f32x2", "cvt.rs", "st.bulk"), _BLACKWELL),
    **{f"{v}{n}": _VIDEO for v in ("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vset", "vavrg")
       for n in ("", "2", "4")},
    **dict.fromkeys(("vshl", "vshr", "vmad"), _VIDEO),
    **dict.fromkeys(("tex", "tld4", "txq", "suld", "sust", "sured", "suq", "istypep"), _TEXTURE),
    "multimem": "it reads or writes the memory of several GPUs at once; the emulator has one",
    "mma.sp": "sparse matrices are not modelled",
    "wgmma.sp": "sparse matrices are not modelled",
    "alloca": "the stack of a thread is not modelled",
    "stacksave": "the stack of a thread is not modelled",
    "stackrestore": "the stack of a thread is not modelled",
}  # fmt: skip


def missing(ins: Instruction) -> str:
    """Reason for the emulator not to have ``ins``; nothing where there is no particular one."""
    for part in ("", *ins.parts[1:]):
        reason = MISSING.get(f"{ins.root}.{part}" if part else ins.root)
        if reason:
            return reason
    return ""


def unknown_modifiers(ins: Instruction) -> str:
    """The parts of an arithmetic opcode that are not modelled; nothing where all are."""
    known = ARITHMETIC[ins.root].split()
    return ", ".join("." + part for part in ins.parts[1:] if part not in known)
