"""Random numbers of a NumPy generator, drawn in compiled code as its own methods draw them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from .jit import jit


def source_of(generator: np.random.Generator) -> tuple[int, int, int]:
    """Addresses of a generator's state and of its functions for 32 bits and for a float64."""
    interface: Any = generator.bit_generator.ctypes
    functions = (interface.next_uint32, interface.next_double)
    return interface.state_address, *(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)


def _caller(result: Any, of: Any) -> Any:
    """An intrinsic that calls a function of one address."""

    def called(context, function, state):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            kind = ir.FunctionType(of, [ir.IntType(64)])
            return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

        return result(types.int64, types.int64), generate

    return intrinsic(called)


_next_word = _caller(types.uint32, ir.IntType(32))
_next_double = _caller(types.float64, ir.DoubleType())


@jit
def below(count, state, word):  # type: ignore[no-untyped-def]
    """``generator.integers(count)``, by Lemire's method; nothing is drawn for a count of one."""
    if count == 1:
        return np.int64(0)
    product = np.uint64(_next_word(word, state)) * np.uint64(count)
    left = product & np.uint64(0xFFFFFFFF)
    if left < np.uint64(count):
        threshold = np.uint64((0x100000000 - count) % count)
        while left < threshold:
            product = np.uint64(_next_word(word, state)) * np.uint64(count)
            left = product & np.uint64(0xFFFFFFFF)
    return np.int64(product >> np.uint64(32))


@jit
def fraction(state, double):  # type: ignore[no-untyped-def]
    """``generator.random()``."""
    return _next_double(double, state)
