"""Translations of integer instructions that are more than one NumPy operator; see `translate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .ptx import Instruction, Pair
from .reports import Unsupported
from .semantics.integer import PRMT_MODES

if TYPE_CHECKING:
    from .translate import Translator

Translation = Callable[["Translator", Instruction, str | None], list[str]]


def _dot(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    """``dp4a.atype.btype``, ``dp2a.{lo,hi}.atype.btype``: the sum is read and written modulo 2**32."""
    kinds = [p for p in ins.parts[1:] if p in ("u32", "s32")]
    a, b, c = (t.read(o, "b32") for o in ins.operands[1:4])
    signs = f"{kinds[0] == 's32'}, {kinds[1] == 's32'}"
    if ins.root == "dp4a":
        return t.write(ins.operands[0], f"integer.dot4({a}, {b}, {c}, {signs})", "b32", guard)
    return t.write(ins.operands[0], f"integer.dot2({a}, {b}, {c}, {signs}, {ins.has('hi')})", "b32", guard)


def _shf(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    a, b, c = (t.read(o, "u32") for o in ins.operands[1:4])
    call = f"alu.shf({a}, {b}, {c}, {ins.has('l')}, {ins.has('wrap')})"
    return t.write(ins.operands[0], call, "u32", guard)


def _lop3(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    a, b, c = (t.read(o, "b32") for o in ins.operands[1:4])
    return t.write(ins.operands[0], f"alu.lop3({a}, {b}, {c}, {ins.operands[4].value})", "b32", guard)


def _prmt(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    a, b, c = (t.read(o, "b32") for o in ins.operands[1:4])
    for mode in ins.parts[2:]:
        if mode not in PRMT_MODES:
            raise Unsupported(f"mode {mode} of prmt")
        c = f"integer.prmt_selector({mode!r}, {c})"
    return t.write(ins.operands[0], f"alu.prmt({a}, {b}, {c})", "b32", guard)


def _bfe(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    kind = t.kind(ins)
    a = t.read(ins.operands[1], "b" + kind[1:])
    b, c = (t.read(o, "u32") for o in ins.operands[2:4])
    return t.write(ins.operands[0], f"alu.bfe({a}, {b}, {c}, {kind[0] == 's'})", kind, guard)


def _bfi(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    kind = t.kind(ins)
    a, b = (t.read(o, kind) for o in ins.operands[1:3])
    c, d = (t.read(o, "u32") for o in ins.operands[3:5])
    return t.write(ins.operands[0], f"alu.bfi({a}, {b}, {c}, {d})", kind, guard)


def _count(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    """``popc``, ``clz``: a 32-bit count of the bits of any width."""
    value = t.read(ins.operands[1], t.kind(ins))
    return t.write(ins.operands[0], f"alu.{ins.root}({value})", "u32", guard)


def _brev(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    kind = t.kind(ins)
    return t.write(ins.operands[0], f"alu.brev({t.read(ins.operands[1], kind)})", kind, guard)


def _bfind(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    kind = t.kind(ins)
    value = t.read(ins.operands[1], "b" + kind[1:])
    if kind[0] == "s":  # the most significant bit that differs from the sign
        value = f"alu.magnitude({value})"
    return t.write(ins.operands[0], f"alu.bfind({value}, {ins.has('shiftamt')})", "u32", guard)


def _carry(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    """``add.cc``, ``addc``, ``sub.cc``, ``subc``, ``mad.cc``, ``madc``.

    The parser has made the carry flag a second destination where it is written, and the last source where it
    is read.
    """
    kind = t.kind(ins)
    bits = "b" + kind[1:]
    sources = list(ins.operands[1:])
    carry = t.read(sources.pop(), "pred") if ins.root in CARRY_IN else "None"
    if ins.root in ("mad", "madc"):
        product, product_kind = t.product(ins, kind)
        first = product if product_kind == bits else f"({product}).view(_uint{kind[1:]})"
        second = t.read(sources[2], bits)
    else:
        first, second = (t.read(o, bits) for o in sources)
    name = "subtract_borrow" if ins.root in ("sub", "subc") else "add_carry"
    target = ins.operands[0]
    targets = (target.first, target.second) if isinstance(target, Pair) else (target,)
    lines = [f"t, c = integer.{name}({first}, {second}, {carry})"]
    for place, value, place_kind in zip(targets, "tc", (bits, "pred"), strict=False):
        lines += t.write(place, value, place_kind, guard)
    return lines


def _packed(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    """``add``, ``min`` and ``max`` of s16x2 and u16x2."""
    if ins.has("sat"):
        raise Unsupported("saturation of packed integers")
    a, b = (t.read(o, "b32") for o in ins.operands[1:3])
    call = f"integer.packed({ins.root!r}, {a}, {b}, {ins.has('s16x2')}, {ins.has('relu')})"
    return t.write(ins.operands[0], call, "b32", guard)


def _mul24(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    """``mul24`` and ``mad24``."""
    a, b = (t.read(o, "b32") for o in ins.operands[1:3])
    value = f"integer.multiply24({a}, {b}, {ins.has('s32')}, {ins.has('hi')})"
    if ins.root == "mad24":
        value = f"({value} + {t.read(ins.operands[3], t.kind(ins))}.astype(_int64))"
    if ins.has("sat"):
        value = f"integer.clamp32({value})"
    return t.write(ins.operands[0], f"{value}.astype(_uint32)", "b32", guard)


def _sad(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    kind = t.kind(ins)
    a, b = (t.read(o, kind) for o in ins.operands[1:3])
    value = f"(integer.absolute_difference({a}, {b}) + {t.read(ins.operands[3], 'b' + kind[1:])})"
    return t.write(ins.operands[0], value, "b" + kind[1:], guard)


def _szext(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    a, b = (t.read(o, "b32") for o in ins.operands[1:3])
    call = f"integer.extend({a}, {b}, {ins.has('s32')}, {ins.has('clamp')})"
    return t.write(ins.operands[0], call, "b32", guard)


def _bmsk(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    a, b = (t.read(o, "b32") for o in ins.operands[1:3])
    return t.write(ins.operands[0], f"integer.bit_mask({a}, {b}, {ins.has('clamp')})", "b32", guard)


def _fns(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    a, b = (t.read(o, "b32") for o in ins.operands[1:3])
    return t.write(
        ins.operands[0], f"integer.nth_set({a}, {b}, {t.read(ins.operands[3], 's32')})", "b32", guard
    )


def _cvt_pack(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    """``cvt.pack.sat.to.s32``, and ``.b32`` with a third source."""
    to = ins.parts[3]
    if to not in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2") or ins.parts[4] != "s32":
        raise Unsupported(f"cvt.pack of {'.'.join(ins.parts[3:])}")
    a, b = (t.read(o, "s32") for o in ins.operands[1:3])
    c = t.read(ins.operands[3], "b32") if len(ins.operands) == 4 else "None"
    call = f"integer.pack_saturated({a}, {b}, {c}, {to[1:]}, {to[0] == 's'})"
    return t.write(ins.operands[0], call, "b32", guard)


def _slct(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    """``slct``: a where c is at least zero, else (and for NaN) b."""
    kind, condition = ins.parts[-2:]
    a, b = (t.read(o, "b" + kind[1:]) for o in ins.operands[1:3])
    c = t.read(ins.operands[3], condition)
    if ins.has("ftz"):
        c = f"alu.ftz({c})"
    return t.write(ins.operands[0], f"where({c} >= 0, {a}, {b})", "b" + kind[1:], guard)


def _testp(t: Translator, ins: Instruction, guard: str | None) -> list[str]:
    kind = t.kind(ins)
    call = f"alu.is_of({ins.parts[1]!r}, {t.read(ins.operands[1], kind)})"
    return t.write(ins.operands[0], call, "pred", guard)


CARRY_IN = ("addc", "subc", "madc")
TRANSLATIONS: dict[str, Translation] = {
    "dp2a": _dot, "dp4a": _dot, "shf": _shf, "lop3": _lop3, "prmt": _prmt, "bfe": _bfe, "bfi": _bfi,
    "popc": _count, "clz": _count, "brev": _brev, "bfind": _bfind, "addc": _carry, "subc": _carry,
    "madc": _carry, "mul24": _mul24, "mad24": _mul24, "sad": _sad, "szext": _szext, "bmsk": _bmsk,
    "fns": _fns, "cvt.pack": _cvt_pack, "slct": _slct, "testp": _testp,
}  # fmt: skip


def translation(ins: Instruction) -> Translation | None:
    """The function that translates ``ins``; None where a method of the translator does."""
    if ins.has("cc"):
        return _carry
    if ins.has("u16x2") or ins.has("s16x2"):
        return _packed
    return TRANSLATIONS.get(".".join(ins.parts[:2])) or TRANSLATIONS.get(ins.root)
