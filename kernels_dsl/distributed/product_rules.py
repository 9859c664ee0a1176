"""Sharding rules of the products: letters l of the batch, m and n of the result, k of the sum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from kernels_dsl.config.promotion import GROUP
from kernels_dsl.distributed.rules import Call, Modes, Rule, broadcast
from kernels_dsl.ops.gemm.arguments import FP8_DTYPES

_ADDED = ("c", "bias", "residual")
_PATTERN = "ranks would have other blocks of the matrix, make one of each rank's blocks"
_SPARSE = "it is a mode of the block-sparse factor, which every rank has whole"
_REDUCED = "the epilogue, or rounding to fp8, is not linear, so that partial sums do not add up"
_GROUPS = "groups of rows would lie across ranks"


def _linear(call: Call) -> bool:
    """True if partial sums of the product add up to the result."""
    options = call.options
    lossy = options.get("out_dtype") in FP8_DTYPES
    return options.get("activation") is None and options.get("epilogue") is None and not lossy


def _factor(call: Call, name: str, letters: str) -> Modes:
    """The modes of a factor, which may lack the batch."""
    return broadcast(call.shape(name), tuple(letters))


def _epilogue(call: Call, result: Modes) -> dict[str, Modes]:
    """The modes of the operands of the epilogue."""
    bias_mode = result[-1] if call.options.get("bias_axis", "n") == "n" else result[-2]
    found: dict[str, Modes] = {}
    for name in call.operands:
        if name == "bias":
            found[name] = broadcast(call.shape(name), (bias_mode,))
        elif name in ("c", "residual") or name.startswith("epilogue_args"):
            found[name] = broadcast(call.shape(name), result)
    return found


def _result(call: Call, *factors: str) -> Modes:
    batched = any(len(call.shape(name)) == 3 for name in factors)
    return ("l", "m", "n") if batched else ("m", "n")


def _rule(
    call: Call, operands: dict[str, Modes], result: Modes, factors: tuple[str, ...], base: Rule
) -> Rule:
    """The rule of a product of `factors`. `base`: what else the rule has."""
    every = {**operands, **_epilogue(call, result)}
    linear = _linear(call)
    return base._replace(
        operands=every,
        results=(result,),
        whole=base.whole if linear else {**base.whole, "k": _REDUCED},
        summed=frozenset("k" if linear else ""),
        added=frozenset(_ADDED if linear else ()),
        linear=factors if linear else (),
    )


class Scales(NamedTuple):
    """The modes of a scale, and the letters of which it has one for 128 elements."""

    modes: Modes
    blocked: frozenset[str]


def _scale(shape: tuple[int, ...], extents: Iterable[tuple[str, int]]) -> Scales:
    """A scale whose modes are these letters, of these extents, or broadcast to them."""
    pairs = list(extents)[-len(shape) :] if shape else []
    if math.prod(shape) == 1:
        return Scales((None,) * len(shape), frozenset())
    modes = tuple(None if size == 1 else letter for size, (letter, _) in zip(shape, pairs))
    blocked = {letter for size, (letter, full) in zip(shape, pairs) if size not in (1, full)}
    return Scales(modes, frozenset(blocked))


def gemm(call: Call) -> Rule:
    """The rule of `gemm`."""
    operands = {"a": _factor(call, "a", "lmk"), "b": _factor(call, "b", "lkn")}
    return _rule(call, operands, _result(call, "a", "b"), ("a", "b"), Rule({}, (), {}))


def gemm_gated(call: Call) -> Rule:
    """The rule of `gemm_gated`: that of `gemm`, of whole pairs of columns."""
    return gemm(call)._replace(units={"n": 2})


def scaled_gemm(call: Call) -> Rule:
    """The rule of `scaled_gemm`: scales are sharded with their factors, those of 128 elements whole ones."""
    a, b = call.shape("a"), call.shape("b")
    batch = max([x[0] for x in (a, b) if len(x) == 3], default=1)
    operands = {"a": _factor(call, "a", "lmk"), "b": _factor(call, "b", "lkn")}
    extents = {"l": batch, "m": a[-2], "n": b[-1], "k": a[-1]}
    scales = {
        name: _scale(call.shape(name), [(x, extents[x]) for x in letters])
        for name, letters in (("scale_a", "lmk"), ("scale_b", "lkn"))
    }
    operands.update({name: scale.modes for name, scale in scales.items()})
    return _rule(
        call,
        _with_result_scale(call, operands),
        _result(call, "a", "b"),
        (),
        Rule({}, (), {}, _units(scales)),
    )


def _units(scales: dict[str, Scales]) -> dict[str, int]:
    return {letter: GROUP for scale in scales.values() for letter in scale.blocked}


def _with_result_scale(call: Call, operands: dict[str, Modes]) -> dict[str, Modes]:
    if "scale_result" in call.operands:
        operands["scale_result"] = (None,) * len(call.shape("scale_result"))
    return operands


def grouped_gemm(call: Call) -> Rule:
    """The rule of `grouped_gemm` and `scaled_grouped_gemm`: groups and rows are whole."""
    (m, k), (groups, _, n) = call.shape("a"), call.shape("b")
    operands: dict[str, Modes] = {"a": ("m", "k"), "b": ("g", "k", "n"), "offs": ("g",)}
    scales: dict[str, Scales] = {}
    if "scale_a" in call.operands:
        of_a, of_b = call.shape("scale_a"), call.shape("scale_b")
        rows = [("g", groups), ("m", 1), ("k", 1)] if len(of_a) == 3 else [("m", m), ("k", k)][: len(of_a)]
        columns = [("g", groups), ("n", n)] if len(of_b) == 2 else [("g", groups), ("k", k), ("n", n)]
        scales = {"scale_a": _scale(of_a, rows), "scale_b": _scale(of_b, columns)}
        operands.update({name: scale.modes for name, scale in scales.items()})
    result: Modes = ("m", "n")
    base = Rule({}, (), {"m": _GROUPS, "g": _GROUPS}, _units(scales))
    found = _rule(call, _with_result_scale(call, operands), result, () if scales else ("a", "b"), base)
    if "bias" in call.operands and len(call.shape("bias")) == 2:
        found = found._replace(operands={**found.operands, "bias": ("g", "n")})
    return found


def bsr_gemm(call: Call) -> Rule:
    """The rule of `bsr_gemm` and `bsr_scaled_gemm`: the dense factor's own mode can be sharded."""
    left = call.options["dense_left"]
    whole = "n" if left else "m"
    values = call.shape("values")
    operands: dict[str, Modes] = {
        "crow": ("e",), "col": ("e",), "values": (*("l",) * (len(values) == 4), "e", None, None),
        "dense": _factor(call, "dense", "lms" if left else "lsn"),
    }  # fmt: skip
    if "scales" in call.operands:
        scales, dense = call.shape("scales"), call.shape("dense_scale")
        operands["scales"] = (None,) * len(scales) if math.prod(scales) == 1 else ("e",) * len(scales)
        operands["dense_scale"] = broadcast(dense, tuple("lms" if left else "lsn"))
    batched = len(values) == 4 or len(call.shape("dense")) == 3
    base = Rule({}, (), {"e": _PATTERN, "s": _SPARSE, whole: _SPARSE})
    factors = () if "scales" in call.operands else ("values", "dense")
    return _rule(call, operands, ("l", "m", "n") if batched else ("m", "n"), factors, base)


def bsr_sddmm(call: Call) -> Rule:
    """The rule of `bsr_sddmm`: the sum can be sharded, as that of a weight's gradient over the rows is."""
    operands: dict[str, Modes] = {
        "crow": ("e",), "col": ("e",), "a": _factor(call, "a", "lmk"), "b": _factor(call, "b", "lkn"),
    }  # fmt: skip
    batched = any(len(call.shape(name)) == 3 for name in "ab")
    return Rule(
        operands, ((*("l",) * batched, None, None, None),), {"e": _PATTERN, "m": _SPARSE, "n": _SPARSE},
        summed=frozenset("k"), linear=("a", "b"),
    )  # fmt: skip
