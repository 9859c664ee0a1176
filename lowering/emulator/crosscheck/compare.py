"""Comparison of two sets of results: bit for bit, in units of the last place, or against a scale."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..semantics import numeric


@dataclasses.dataclass
class Outcome:
    """The comparison of one instruction's results; `worst` is in the rule's own measure."""

    name: str
    rule: str
    elements: int
    different: int
    worst: float = 0.0
    example: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.different and not self.error


def _values(words: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        if kind == "f32":
            return words.view(np.float32).astype(np.float64)
        return numeric.decode(words.view(np.uint16), kind.removesuffix("x2")).astype(np.float64)


def _last_place(values: np.ndarray, kind: str) -> np.ndarray:
    """Size of a unit in the last place of each value."""
    fmt = numeric.FORMATS[kind.removesuffix("x2")]
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(np.where(np.isfinite(values), values, 1.0))
    return np.ldexp(1.0, np.maximum(exponent - 1, 1 - fmt.bias) - fmt.mantissa_bits)


def settled(words: np.ndarray, rule: str) -> np.ndarray | None:
    """The words that must agree bit for bit under `rule`, all NaNs alike where it says so; None where a
    distance is allowed.
    """
    words = np.ascontiguousarray(words, dtype=np.uint32).reshape(-1)
    if rule == "bits":
        return words
    if not rule.endswith("="):
        return None
    kind = rule[:-1]
    width = np.uint32 if kind == "f32" else np.uint16
    quiet_nan = width(numeric.FORMATS[kind.removesuffix("x2")].quiet_nan)
    return np.where(np.isnan(_values(words, kind)), quiet_nan, words.view(width)).view(np.uint32)


def compare(name: str, rule: str, ours: np.ndarray, theirs: np.ndarray) -> Outcome:
    """Compare two arrays of result registers, read as uint32.

    Rules: "bits"; "f32=": bits, but any NaN equals any other; "f32:2" (or f16x2…): at most 2 ulp apart;
    "f32~-20": at most 2^-20 apart; "f32/-22": at most 2^-22 of the largest magnitude apart. In the last three
    NaN equals NaN as well.
    """
    ours, theirs = (np.ascontiguousarray(x, dtype=np.uint32).reshape(-1) for x in (ours, theirs))
    if ours.shape != theirs.shape:
        return Outcome(name, rule, theirs.size, theirs.size, error=f"{ours.size} results for {theirs.size}")
    exact, expected = settled(ours, rule), settled(theirs, rule)
    if exact is not None and expected is not None:
        bad = exact != expected
        worst = float(bad.any())
    else:
        separator = next(c for c in ":~/" if c in rule)
        kind, bound = rule.split(separator)
        a, b = _values(ours, kind), _values(theirs, kind)
        with np.errstate(all="ignore"):
            distance = np.abs(a - b)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
        distance = np.where(same, 0.0, np.where(np.isfinite(distance), distance, np.inf))
        if separator == ":":
            distance, limit = distance / _last_place(b, kind), float(bound)
        elif separator == "~":
            limit = 2.0 ** float(bound)
        else:
            scale = np.abs(b[np.isfinite(b)]).max(initial=0.0) or 1.0
            distance, limit = distance / scale, 2.0 ** float(bound)
        bad = distance > limit
        worst = float(distance.max(initial=0.0))
        bad = bad.reshape(ours.size, -1).any(axis=1)
    example = ""
    if bad.any():
        at = int(np.argmax(bad))
        example = f"[{at}] emulator {int(ours[at]):#010x}, GPU {int(theirs[at]):#010x}"
    return Outcome(name, rule, ours.size, int(bad.sum()), worst, example)
