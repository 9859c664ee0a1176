"""A product like an earlier one: all that a warm call runs."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks.options import LARGEST
from kernels_dsl.checks.overlap import ranges_meet, ranges_met
from kernels_dsl.ops.call_cache import find, refused
from kernels_dsl.ops.gemm.recorded import Recorded

_Tensor = torch.Tensor


def repeated(
    calls: dict[Any, Any],
    key: Any,
    tensors: tuple[Any, ...],
    out: torch.Tensor | None,
    alpha: float,
    beta: float,
    extras: tuple[Any, ...],
    amax: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The result of a product like an earlier one; None where there was none, or other checks are needed.

    `tensors`: the two factors as a plan takes them, and the others that are given. `extras`: what
    `Plan.operands` takes after alpha and beta, `amax` among them.
    """
    plan = find(calls, key, tensors)
    if plan is None:
        return None
    if plan.__class__ is Recorded:
        recorded: torch.Tensor = plan.run(calls, tensors, alpha, beta, extras)
        return recorded
    if out is not None and ranges_meet(out, (tensors[0], tensors[1], *extras), plan.extents):
        return None
    if amax is not None:
        if ranges_met(amax, (tensors[0], tensors[1], *extras), plan.extents[1:]) > 1:  # its own is one
            return None
        amax.zero_()
    make = plan.operands
    operands = None if make is None else make((float(alpha), float(beta), *extras))
    try:
        result: torch.Tensor = plan.run(tensors[0], tensors[1], out, operands)
        return result
    except ValueError as error:
        refused(calls, key, error)
    return None


def tensors_among(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors among values."""
    return tuple([x for x in values if type(x) is _Tensor or (x is not None and isinstance(x, _Tensor))])


def weight(value: Any, neutral: float) -> Any:
    """The part of alpha (`neutral` 1) or beta (0) that a key has: a kernel without it is for that value
    alone. Of what is no finite number of float32, which the checks name, its type and value."""
    if value.__class__ is float and -LARGEST <= value <= LARGEST:
        return value == neutral
    return value.__class__, value
