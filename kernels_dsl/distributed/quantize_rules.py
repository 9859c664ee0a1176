"""Sharding rule of `quantize`: ranks cannot divide what has one scale."""

from __future__ import annotations

from kernels_dsl.config.quantize import TILE
from kernels_dsl.distributed.rules import Call, Modes, Rule

_ONE_SCALE = "its elements have one scale, which another scaling or scale would divide"


def _scales(scaling: str, lead: Modes, rows: str, columns: str) -> Modes:
    last: dict[str, Modes] = {
        "matrix": (None, None), "row": (rows, None), "1x128": (rows, columns), "128x128": (rows, columns),
    }  # fmt: skip
    return (*lead, *last[scaling])


def quantize(call: Call) -> Rule:
    """The rule of `quantize`."""
    scaling, transpose = call.options["scaling"], call.options["transpose"]
    shape = call.shape("x")
    lead: Modes = tuple("abcdefgh"[: max(len(shape) - 2, 0)])
    modes: Modes = (*lead, "m", "k")[-len(shape) :] if len(shape) > 1 else ("k",)
    whole: dict[str, str] = {}
    units: dict[str, int] = {}
    results: list[Modes] = []
    has_scale = "scale" in call.operands
    for turned in [False] * (transpose != "yes") + [True] * (transpose != "no"):
        rows, columns = ("k", "m") if turned else ("m", "k")
        results.append((*lead, rows, columns) if len(shape) > 1 else ("k",))
        if scaling == "tensor":
            continue
        scales = _scales(scaling, lead, rows, columns)
        results.append(scales if len(shape) > 1 else scales[1:])
        if scaling in ("matrix", "row"):
            whole[columns] = _ONE_SCALE
            if scaling == "matrix":
                whole[rows] = _ONE_SCALE
        else:
            units[columns] = TILE
            if scaling == "128x128":
                units[rows] = TILE
    if scaling == "tensor" and not has_scale:
        whole.update({letter: _ONE_SCALE for letter in modes if letter is not None})
        results.append(())
    operands = {"x": modes}
    if has_scale:
        operands["scale"] = (None,) * len(call.shape("scale"))
    return Rule(operands, tuple(results), whole, units)
