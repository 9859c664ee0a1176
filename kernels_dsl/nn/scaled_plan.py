"""A call of `scaled_linear` like an earlier one: its plans at hand, one look-up a pass in place of six.

First calls go through `scaled_linear` itself, and so do calls that torch.compile, a mode or a transform sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import needs_dispatcher
from kernels_dsl.nn.scratch import Scratch, is_dense
from kernels_dsl.ops import allocate, call_cache
from kernels_dsl.ops.gemm.grad import summed_over
from kernels_dsl.ops.quantize.operation import QUANTIZE, QuantizeArguments
from kernels_dsl.ops.scaled.arguments import SCALED_GEMM, ScaledArguments
from lowering.records import NamedTuple

_grad_enabled = torch.is_grad_enabled
_E4M3 = torch.float8_e4m3fn
Gradients = tuple[torch.Tensor | None, ...]
Parts = tuple[torch.Tensor, ...]
"""Values and scales of a tensor, of its transpose, or of both."""


class Quantizer:
    """`quantize` of tensors like x. Its last `new` results are new tensors, the others stay until the next
    call of this thread and stream where they are small. `part`: of the memory for them."""

    def __init__(self, call: QuantizeArguments, new: int, part: int = 0) -> None:
        self._plan = QUANTIZE.plan_of(call)
        self._index = QUANTIZE.target_of(call).index
        self._shares = call.scaling == "tensor"  # one scale, of what is new and what is not
        self._new, self._part = new, part
        self._scratch: Scratch | None = None
        self._make: Callable[[], Parts] = tuple

    def __call__(self, x: torch.Tensor) -> Parts:
        """Values and scales."""
        if self._scratch is not None:
            held = self._scratch()
            if held is not None:
                self._plan(x, None, made := (*held, *self._make()))
                return made
        parts: Parts = self._plan(x, None, None)
        if self._scratch is None and not self._shares:
            stay = len(parts) - self._new
            makers = [allocate.maker(t.shape, t.dtype, t.device, t.stride()) for t in parts[stay:]]
            if all(map(is_dense, parts)):
                self._make, self._scratch = (
                    allocate.several(makers),
                    Scratch(parts[:stay], self._index, self._part),
                )
            else:
                self._shares = True
        return parts


class Multiplier:
    """left @ rightᵀ + bias of tensors that are always alike."""

    def __init__(self, scaling: str, dtype: torch.dtype, fast: bool = False) -> None:
        self._one_scale = scaling == "tensor"
        self._options: dict[str, Any] = {"out_dtype": dtype, "use_fast_accum": fast}
        self._plan: Any = None

    def __call__(self, left: Parts, right: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Of values and scales of left and of right."""
        a, scale_a = left
        b, scale_b = right
        b = b.mT
        if not self._one_scale:
            scale_b = scale_b.mT
        plan = self._plan
        if plan is None:
            call = ScaledArguments(a, b, scale_a, scale_b, bias=bias, **self._options)
            plan = self._plan = SCALED_GEMM.plan_of(call)
        make = plan.operands
        if make is None:
            operands = None
        else:
            operands = make((1.0, 1.0, None, bias, None, scale_a, scale_b, None, None))
        made: torch.Tensor = plan.run(a, b, None, operands)
        return made


class First(NamedTuple):
    """A call that was served.

    rows: x as one matrix for a weight, or as one for each. needs: of gradients of x, weight and bias.
    scalings: of activations and gradients, and of weights. dtype: the output's. fast: how it is summed.
    facts: what gradients need to know. gradients: the function that has no plan for them.
    """

    x: torch.Tensor
    rows: torch.Tensor
    weight: torch.Tensor
    needs: tuple[bool, bool, bool]
    scalings: tuple[str, str]
    dtype: torch.dtype
    fast: bool
    facts: Any
    gradients: Callable[..., Gradients]


class Plan:
    """Serves calls (x, weight, bias) like a first one."""

    def __init__(self, first: First) -> None:
        x, rows, weight = first.x, first.rows, first.weight
        self.needs_x, self.needs_weight, _ = first.needs
        self.records = any(first.needs)
        self.facts, self.general = first.facts, first.gradients
        self.gradients: dict[Any, Any] = {}
        self._flat = None if rows is x else rows.shape
        self._y_shape = (*x.shape[:-1], weight.shape[0])
        turned = [self.needs_weight, self.needs_x]
        self._quantize_x, self._quantize_weight = (
            Quantizer(QuantizeArguments(t, None, _E4M3, scaling, "both" if both else False), 2 * both, part)
            for part, (t, scaling, both) in enumerate(zip((rows, weight), first.scalings, turned))
        )
        self._multiply = Multiplier(first.scalings[1], first.dtype, first.fast)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The output."""
        if self.records:
            made: torch.Tensor = _apply(x, weight, bias, self)
            return made
        return self.output(x, weight, bias)[0]

    def output(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The output, and values and scales of x and of weight, behind them those of the transposes that
        gradients need."""
        if self._flat is not None:
            x = x.reshape(self._flat)
        rows, columns = self._quantize_x(x), self._quantize_weight(weight)
        y = self._multiply(rows[:2], columns[:2], bias)
        if self._flat is not None:  # no view: one that a node makes may not be changed in place
            y = torch.ops.aten._unsafe_view(y, self._y_shape)
        return y, rows, columns

    def backward(self, gradient: torch.Tensor, needs: tuple[bool, ...]) -> Callable[..., Gradients]:
        """(gradient of the output, values and scales of x.mT and of weight.mT) -> gradients of x, weight and
        bias that `needs` asks for."""
        needs_x, needs_weight, needs_bias = needs[:3]
        facts, reshapes = self.facts, self._flat is not None
        x_dtype, weight_dtype, bias_dtype = facts.dtypes
        x_shape, shape = facts.shape, (-1, gradient.shape[-1])
        flat = gradient.reshape(shape) if reshapes else gradient
        quantize = None
        if needs_x or needs_weight:
            transpose: bool | str = "both" if needs_x and needs_weight else needs_weight
            call = QuantizeArguments(flat, None, facts.grad_dtype, facts.scaling, transpose)
            quantize = Quantizer(call, 0)
        of_x, of_weight = Multiplier(facts.scaling, x_dtype), Multiplier(facts.scaling, weight_dtype)

        def run(gradient: torch.Tensor, *kept: torch.Tensor) -> Gradients:
            d_x = d_weight = d_bias = None
            if reshapes:
                gradient = gradient.reshape(shape)
            parts = () if quantize is None else quantize(gradient)
            if needs_x:
                d_x = of_x(parts[:2], kept[-2:])
                if reshapes:
                    d_x = d_x.view(x_shape)
            if needs_weight:
                d_weight = of_weight(parts[-2:], kept[:2])
            if needs_bias:
                d_bias = summed_over(gradient, 0, bias_dtype)
            return d_x, d_weight, d_bias, None

        return run


class ScaledLinear(torch.autograd.Function):
    """Such a call where gradients are wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan
    ) -> torch.Tensor:
        y, rows, columns = plan.output(x, weight, bias)
        ctx.save_for_backward(*rows[2:], *columns[2:])
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        plan, needs, tensors = ctx.plan, ctx.needs_input_grad, (gradient, *ctx.saved_tensors)
        if not _grad_enabled():
            found: Gradients | None = call_cache.served(plan.gradients, needs, tensors, tensors)
            if found is not None:
                return found
        made = _first_backward(ctx, *tensors)
        if not _grad_enabled() and not needs_dispatcher(tensors):
            call_cache.keep(plan.gradients, needs, tensors, plan.backward(gradient, needs))
        return made


@torch.autograd.function.once_differentiable
def _first_backward(ctx: Any, gradient: torch.Tensor, *kept: torch.Tensor) -> Gradients:
    """The gradients by `quantize` and `scaled_gemm`, which torch.compile, modes and transforms see."""
    plan: Plan = ctx.plan
    ctx.facts = plan.facts
    none = (None, None)
    x, weight = (kept[:2] if plan.needs_weight else none), (kept[-2:] if plan.needs_x else none)
    return plan.general(ctx, gradient, (*x, *weight))


_apply: Any = super(torch.autograd.Function, ScaledLinear).apply
"""`ScaledLinear.apply` without its look for transforms: what repeats an earlier call has none."""
