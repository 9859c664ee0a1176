"""Products by `gemm`'s kernels as operations: what a warm call runs, what a first one builds and looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kernels_dsl.ops import overlap
from kernels_dsl.ops.call_cache import find, refused
from kernels_dsl.ops.gemm.arguments import DenseArguments, GemmArguments, describe
from kernels_dsl.ops.gemm.plan import Plan, build
from kernels_dsl.ops.operation import Operation
from kernels_dsl.ops.options import LARGEST
from kernels_dsl.ops.overlap import ranges_meet

Call = TypeVar("Call", bound=DenseArguments)
_Tensor = torch.Tensor


def repeated(
    calls: dict[Any, Any],
    key: Any,
    tensors: tuple[Any, ...],
    out: torch.Tensor | None,
    alpha: float,
    beta: float,
    extras: tuple[Any, ...],
) -> torch.Tensor | None:
    """The result of a product like an earlier one; None where there was none, or other checks are needed.

    `tensors`: the two factors as a plan takes them, and the others that are given. `extras`: what
    `Plan.operands` takes after alpha and beta.
    """
    plan = find(calls, key, tensors)
    if plan is None:
        return None
    if out is not None and ranges_meet(out, (tensors[0], tensors[1], *extras), plan.extents):
        return None
    make = plan.operands
    operands = None if make is None else make((float(alpha), float(beta), *extras))
    try:
        result: torch.Tensor = plan.run(tensors[0], tensors[1], out, operands)
        return result
    except ValueError as error:
        refused(calls, key, error)
    return None


def given(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors among values."""
    return tuple([x for x in values if type(x) is _Tensor or (x is not None and isinstance(x, _Tensor))])


def weight(value: Any, neutral: float) -> Any:
    """What of alpha (`neutral` 1) or beta (0) a key has: a kernel without it is for that value alone. Of what
    is no finite number of float32, which the checks name, its type and value."""
    if value.__class__ is float and -LARGEST <= value <= LARGEST:
        return value == neutral
    return value.__class__, value


class Product(Operation[Call, Plan]):
    """One such product."""

    def __init__(self, name: str, record: type[Call], describe: Callable[[Call], Any]) -> None:
        super().__init__(name, record, describe, build, _follow)


def _follow(plan: Plan, call: DenseArguments) -> torch.Tensor:
    """The call, after what depends on addresses was looked at."""
    if call.out is not None:
        check_out_apart(call)
    for name, tensor in call.written().items():
        if name != "out":  # a number that starts at 0
            others = {**call.read(), **call.written()}
            overlap.check_alone(name, others.pop(name), others)
            tensor.zero_()
    return plan.run(
        call.a, call.b, call.out, None if plan.operands is None else plan.operands(call.operand_values())
    )


def check_out_apart(call: DenseArguments) -> None:
    """ValueError where `out` shares memory with another tensor of the call."""
    assert call.out is not None
    others = {**call.read(), **call.written()}
    del others["out"]
    overlap.check_overlap(call.out, {name: x for name, x in others.items() if isinstance(x, torch.Tensor)})


GEMM = Product("gemm", GemmArguments, describe)
