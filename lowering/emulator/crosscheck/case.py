"""One launch that is compared, and the inputs of matrix instructions."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..semantics import numeric

BLOCKS = 8  # warps of each warp-wide instruction; the first half gets integers, the second random values


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch. `arguments(rng)`: NumPy arrays, in the kernel's order, tuples where it takes a tuple.

    `rows`: (name, rule, slice) of each compared part of argument `result`, seen as uint32 words.
    """

    name: str
    function: str
    constants: dict[str, Any]
    arguments: Callable[[np.random.Generator], list]
    result: int
    rows: tuple[tuple[str, str, Any], ...]

    def inputs(self) -> list:
        """The arguments, from a seed that follows from the name."""
        return self.arguments(np.random.default_rng(zlib.crc32(self.name.encode())))


def elements(rng: np.random.Generator, kind: str, shape: tuple[int, ...], integers: bool) -> np.ndarray:
    """Patterns of a matrix operand: small integers, or normal values (any byte for s8 and u8)."""
    if kind in ("s8", "u8"):
        return rng.integers(0, 256, shape).astype(np.uint8)
    values = rng.integers(-6, 7, shape) if integers else rng.standard_normal(shape)
    return numeric.encode(values.astype(np.float32), kind)
