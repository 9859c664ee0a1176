"""Evaluating layouts and tensors at trace time: no kernel, no GPU, no launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor


def trace(function: Callable[..., Any], *tensors: Any) -> Any:
    """The result of `function(*tensors)` when it is traced; its exceptions come as the compiler wraps
    them."""
    found = []

    def host(tensors: tuple):
        found.append(function(*tensors))

    cute.compile(cute.jit(host), tensors, options="--gpu-arch sm_80")
    return found[0]


def fake(
    strides: tuple[int | None, ...],
    *,
    dtype: type[cutlass.Numeric] = cutlass.BFloat16,
    align: int = 16,
    wide: bool = False,
):
    """A tensor of unknown sizes. Strides are static, or None: unknown, but of `align` bytes' divisibility."""
    divisibility = max(align * 8 // dtype.width, 1)
    symbol = cute.sym_int64 if wide else cute.sym_int
    stride = tuple(symbol(divisibility=divisibility) if s is None else s for s in strides)
    return make_fake_tensor(dtype, tuple(cute.sym_int() for _ in strides), stride, assumed_align=align)
