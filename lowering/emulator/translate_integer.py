"""Translations of integer instructions that are more than one NumPy operator; see `translate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .ptx import Instruction
from .reports import Unsupported

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
    if len(ins.parts) > 2:
        raise Unsupported("prmt mode")
    a, b, c = (t.read(o, "b32") for o in ins.operands[1:4])
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


TRANSLATIONS: dict[str, Translation] = {
    "dp2a": _dot, "dp4a": _dot, "shf": _shf, "lop3": _lop3, "prmt": _prmt, "bfe": _bfe, "bfi": _bfi,
    "popc": _count, "clz": _count, "brev": _brev, "bfind": _bfind,
}  # fmt: skip
