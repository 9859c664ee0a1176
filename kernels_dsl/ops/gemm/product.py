"""Products by `gemm`'s kernels as operations: what a first call builds and looks at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from kernels_dsl.checks import overlap
from kernels_dsl.checks.eager_path import refuse_written
from kernels_dsl.ops.gemm.arguments import DenseArguments, GemmArguments, describe
from kernels_dsl.ops.gemm.plan import Plan, build
from kernels_dsl.ops.gemm.recorded import Recorded
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among, weight
from kernels_dsl.ops.operation import Operation

Call = TypeVar("Call", bound=DenseArguments)


class Product(Operation[Call, Plan]):
    """One such product."""

    def __init__(self, name: str, record: type[Call], describe: Callable[[Call], Any]) -> None:
        super().__init__(name, record, describe, build, _follow)


class _Gemm(Product[GemmArguments]):
    def recorded(self, call: GemmArguments, operator: Callable[[], Any]) -> Recorded:
        """Such calls as nodes of autograd."""
        from kernels_dsl.ops.gemm.nodes import Gemm, factors_of_gemm

        call.refuse_gradients()
        refuse_written(call.read().values(), out=call.out)
        keywords = {name: getattr(call, name) for name in call.choices}
        return Recorded(
            Gemm, self.plan_of(call), (), call.likes(), keywords, ForBackward, operator,
            factors=partial(factors_of_gemm, self),
        )  # fmt: skip


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
