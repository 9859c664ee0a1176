"""Products by `gemm`'s kernels as operations: what a warm call runs, what a first one builds and looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kernels_dsl.checks import overlap
from kernels_dsl.checks.eager_path import refuse_written
from kernels_dsl.checks.options import LARGEST
from kernels_dsl.checks.overlap import ranges_meet, ranges_met
from kernels_dsl.ops.call_cache import find, refused
from kernels_dsl.ops.gemm.arguments import DenseArguments, GemmArguments, describe
from kernels_dsl.ops.gemm.plan import Plan, build
from kernels_dsl.ops.gemm.recorded import Recorded
from kernels_dsl.ops.operation import Operation

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


class Product(Operation[Call, Plan]):
    """One such product."""

    def __init__(self, name: str, record: type[Call], describe: Callable[[Call], Any]) -> None:
        super().__init__(name, record, describe, build, _follow)


class _Gemm(Product[GemmArguments]):
    def recorded(self, call: GemmArguments, operator: Callable[[], Any]) -> Recorded:
        """Such calls as nodes of autograd."""
        from kernels_dsl.ops.gemm.nodes import Gemm

        call.refuse_gradients()
        refuse_written(call.read().values(), out=call.out)
        keywords = {name: getattr(call, name) for name in call.choices}
        return Recorded(Gemm, self.plan_of(call), (), keywords, ForBackward, operator)


class ForBackward:
    """Products of a backward pass that nothing watches, by the operator's name. `calls`: their call cache."""

    def __init__(self, calls: dict[Any, Any]) -> None:
        self._calls = calls

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        bias_axis: str = "n",
        alpha: float = 1.0,
        beta: float = 1.0,
        out_dtype: torch.dtype | None = None,
        family: str | None = None,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        """As the operator."""
        extras = () if c is bias is None else (c, bias, None)
        one = weight(alpha, 1.0) if alpha != 1.0 else True
        zero = weight(beta, 0.0) if c is not None else None
        key = (a.shape, b.shape, "for backward", one, zero, bias_axis, out_dtype, family, batch_invariant)
        key = (*key, *map(type, extras))
        tensors = (a, b, *tensors_among(extras))
        result = repeated(self._calls, key, tensors, None, alpha, beta, extras)
        if result is not None:
            return result
        call = GemmArguments(
            a, b, c, bias, bias_axis=bias_axis, alpha=alpha, beta=beta, out_dtype=out_dtype, family=family,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        product: torch.Tensor = GEMM.first_below(call, key, tensors)
        return product


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


GEMM = _Gemm("gemm", GemmArguments, describe)
