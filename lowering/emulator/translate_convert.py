"""Translation of ``cvt``; see `translate`. NumPy types of PTX types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .ptx import TYPE_BYTES, Instruction

if TYPE_CHECKING:
    from .translate import Translator

NUMPY = {
    "pred": "bool_",
    "b8": "uint8",
    "u8": "uint8",
    "s8": "int8",
    "b16": "uint16",
    "u16": "uint16",
    "s16": "int16",
    "b32": "uint32",
    "u32": "uint32",
    "s32": "int32",
    "b64": "uint64",
    "u64": "uint64",
    "s64": "int64",
    "f32": "float32",
    "f64": "float64",
    "f16": "uint16",
    "bf16": "uint16",
    "f16x2": "uint32",
    "bf16x2": "uint32",
    "s16x2": "uint32",
    "u16x2": "uint32",
    "tf32": "uint32",
}
_INT = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def conversion(t: Translator, ins: Instruction) -> tuple[object, str, str]:
    """Destination, expression and register type of a ``cvt``."""
    kinds = [p for p in ins.parts[1:] if p in NUMPY or p in ("e4m3x2", "e5m2x2")]
    to, source = kinds
    target = ins.operands[0]
    rounding = next(
        (p for p in ins.parts if p in ("rn", "rna", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")), None
    )
    if to in _INT and source in _INT and not ins.has("sat"):
        return target, f"{t.read(ins.operands[1], source)}.astype(_{NUMPY[to]})", to
    flags = {f: True for f in ("ftz", "relu", "satfinite") if ins.has(f)}
    if ins.has("sat"):
        flags["saturate"] = True
    words = "".join(f", {k}=True" for k in flags)
    if to in ("f16x2", "bf16x2", "e4m3x2", "e5m2x2") and len(ins.operands) == 3:
        a, b = (t.read(o, "b32") for o in ins.operands[1:3])
        scalar = to[:-2]
        pack = "pack16" if to in ("f16x2", "bf16x2") else "pack8"
        plain = "".join(f", {k}=True" for k in flags if k != "ftz")
        one = "numeric.encode({}.view(_float32), " + f"{scalar!r}, {rounding!r}{plain})"
        return (
            target,
            f"numeric.{pack}({one.format(a)}, {one.format(b)})",
            "b32" if pack == "pack16" else "b16",
        )
    if to in ("e4m3x2", "e5m2x2"):
        halves = f"numeric.unpack16({t.read(ins.operands[1], 'b32')})"
        one = f"numeric.convert(h, {source[:-2]!r}, {to[:-2]!r}, {rounding!r}{words})"
        return target, f"numeric.pack8(*[{one} for h in {halves}])", "b16"
    if source in ("e4m3x2", "e5m2x2"):
        halves = f"numeric.unpack8({t.read(ins.operands[1], 'b16')})"
        one = f"numeric.convert(h, {source[:-2]!r}, {to[:-2]!r}, {rounding!r}{words})"
        return target, f"numeric.pack16(*[{one} for h in {halves}])", "b32"
    bits = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
    value = t.read(ins.operands[1], bits[TYPE_BYTES[source]])
    call = f"numeric.convert({value}, {source!r}, {to!r}, {rounding!r}{words})"
    if to[0] == "s" and TYPE_BYTES[to] < 8:
        return target, f"{call}.view(_{NUMPY[to]})", to
    return target, call, bits[TYPE_BYTES[to]]
