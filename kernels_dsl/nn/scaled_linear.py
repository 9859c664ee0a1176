"""Linear layers whose three products, forward and both gradients, are of fp8 operands scaled as they come."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import (
    PLAIN_TYPES,
    check_tensor,
    needs_dispatcher,
    only_recorded,
    refuse_forward_mode,
    sharded,
)
from kernels_dsl.checks.options import boolean, instance, one_of, shown
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.quantize.operation import QUANTIZE, QuantizeArguments
from kernels_dsl.ops.quantize.quantize import quantize
from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm
from lowering.records import NamedTuple

RECIPES = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("1x128", "128x128")}
"""Recipe -> how activations and gradients, and how weights are scaled, as `quantize` says it."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_is_compiling = torch.compiler.is_compiling
_CALLS: dict[Any, Any] = {}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_AUTOCAST = ("cuda", "cpu")
"""Devices on which calls run. PyTorch refuses to say of some other devices, such as meta, whether autocast is
on."""


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: str = "row",
    grad_dtype: torch.dtype = torch.float8_e5m2,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    """x Wᵀ + bias, multiplied in fp8; as `torch.nn.functional.linear`, with both gradients.

    x: (…, K), weight: (N, K), bias: (N,) or None; bf16, fp16 or fp32 each. Returns (…, N) of x's dtype, or
    of autocast's where that is on. Or groups of equal size, each with a weight of its own: x (L, M, K),
    weight (L, N, K), no bias; returns (L, M, N).

    x and weight are quantised to e4m3 in each call, the output's gradient to grad_dtype (torch.float8_e5m2 or
    torch.float8_e4m3fn), by `kernels_dsl.quantize`, and multiplied by `kernels_dsl.scaled_gemm`. recipe:
    "tensor", one scale an operand (of a group); "row", a scale for each row of the left operand and each
    column of the right one, which are other scales in each of the three products; "block", scales of 128
    elements along the summed mode, of W of 128 × 128. With G the gradient of the output:

        y = x Wᵀ (scales of rows of x, of W),  dx = G W (of rows of G, columns of W),  dW = Gᵀ x (of columns)

    use_fast_accum: as in `scaled_gemm`, of the output alone; gradients, and "block", are summed in float32.
    Kept for the backward pass are fp8 values, of x for dW and of W for dx, not x; of small operands up to
    16 MiB stay for each thread and stream. A gradient has its input's
    dtype; that of the bias is summed in float32. Differentiable once. Compute capability as `scaled_gemm`.
    Raises TypeError and ValueError that name the argument.
    """
    options = (recipe, grad_dtype, use_fast_accum)
    key: Any = None
    if type(x) in PLAIN_TYPES and type(weight) in PLAIN_TYPES and not _is_compiling():
        tensors = (x, weight) if bias is None else (x, weight, bias)
        try:
            key = (x.shape, bias is None, _autocast_dtype(x), options)
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
        else:
            y: torch.Tensor | None = call_cache.served(_CALLS, key, tensors, (x, weight, bias))
            if y is not None:
                return y
    _check(x, weight, bias)
    _check_options(*options)
    refuse_forward_mode("scaled_linear", {"x": x, "weight": weight, "bias": bias})
    if sharded((x, weight, bias)):
        over_shards = importlib.import_module("kernels_dsl.distributed.linear").scaled_linear
        made: torch.Tensor = over_shards(x, weight, bias, options)
        return made
    made = product(x, weight, bias, options)
    if key is not None:
        _keep(key, tensors, options)
    return made


Options = tuple[str, torch.dtype, bool]
"""recipe, grad_dtype and use_fast_accum of `scaled_linear`."""


def _keep(key: Any, tensors: tuple[torch.Tensor, ...], options: Options) -> None:
    """Keeps a plan for calls like this one, which was served, where launches are all that they need."""
    x, weight = tensors[:2]
    if 0 in (x.numel(), weight.numel()) or QUANTIZE.target_of(QuantizeArguments(x)).emulated:
        return
    if not needs_dispatcher(tensors) or only_recorded(tensors):
        call_cache.keep(_CALLS, key, tensors, plan_of(tensors, options))


def plan_of(tensors: tuple[torch.Tensor, ...], options: Options) -> Any:
    """The plan of calls like that of x, weight and, where there is one, bias, which was served."""
    from kernels_dsl.nn.scaled_plan import First, Plan

    x, weight = tensors[:2]
    recipe, grad_dtype, fast = options
    scalings = _scalings(weight, recipe)
    recorded = torch.is_grad_enabled()
    x_needs, weight_needs, *bias_needs = [recorded and t.requires_grad for t in tensors]
    dtypes = (x.dtype, weight.dtype, tensors[2].dtype if bias_needs else None)
    first = First(
        x=x, rows=_rows(x, weight), weight=weight, needs=(x_needs, weight_needs, any(bias_needs)),
        scalings=scalings, dtype=_autocast_dtype(x) or x.dtype, fast=fast and scalings[1] != "128x128",
        facts=Facts(scalings[0], grad_dtype, weight.dim() == 3, dtypes, x.shape), gradients=gradients,
    )  # fmt: skip
    return Plan(first)


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype of autocast where that is on for x."""
    kind = "cuda" if x.is_cuda else x.device.type
    if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


class Shared(NamedTuple):
    """Process groups over which an operand, and the output, have shards on other ranks."""

    x: tuple[Any, ...] = ()
    weight: tuple[Any, ...] = ()
    output: tuple[Any, ...] = ()


ALONE = Shared()


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    shared: Shared = ALONE,
) -> torch.Tensor:
    """`scaled_linear` of tensors that were checked, this rank's shards of larger ones.

    With the recipe "tensor" all ranks of the groups in `shared` have one scale.
    """
    recipe, grad_dtype, fast = options
    dtype = _autocast_dtype(x) or x.dtype
    if not torch.is_grad_enabled() and not _is_compiling():
        scalings = _scalings(weight, recipe)
        return _output(x, weight, bias, scalings, dtype, fast, (False, False), shared)[0]
    return _Product.apply(x, weight, bias, recipe, grad_dtype, dtype, fast, shared)


def _check_options(recipe: Any, grad_dtype: Any, use_fast_accum: Any) -> None:
    one_of("recipe", recipe, tuple(RECIPES))
    boolean("use_fast_accum", use_fast_accum)
    if not isinstance(grad_dtype, torch.dtype) or grad_dtype not in _FP8:
        raise TypeError(f"grad_dtype is {grad_dtype}, must be torch.float8_e5m2 or torch.float8_e4m3fn")


def _check(x: Any, weight: Any, bias: Any) -> None:
    for name, tensor, modes in (("x", x, ()), ("weight", weight, (2, 3)), ("bias", bias, (1,))):
        if name == "bias" and tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.dtype not in _FLOATS:
            raise TypeError(
                f"{name} is {tensor.dtype}, must be torch.bfloat16, torch.float16 or torch.float32"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, must be on {x.device}, where x is")
        if modes and tensor.dim() not in modes:
            raise ValueError(f"{name} has {tensor.dim()} modes, must have {' or '.join(map(str, modes))}")
    if x.dim() < 1 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, must be (…, {weight.shape[-1]}) as weight has columns"
        )
    if weight.dim() == 3:
        if x.dim() != 3 or x.shape[0] != weight.shape[0]:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, must be ({weight.shape[0]}, M, {weight.shape[2]}): a matrix "
                "for each weight"
            )
        if bias is not None:
            raise ValueError("bias is given, must be None with a weight for each group")
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, must be ({weight.shape[0]},) as weight has rows"
        )


def _quantized(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    plain: bool,
    turned: bool,
    groups: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Values and scales of x, of x.mT, or of both. `groups`: of ranks that have other shards of x."""
    transpose = "both" if plain and turned else turned
    scale = _common_scale(x, dtype, groups) if groups and scaling == "tensor" else None
    if not _is_compiling():
        return quantize(x, dtype, scaling=scaling, transpose=transpose, scale=scale)
    from kernels_dsl.ops.quantize import register

    # The checks of `quantize` ask a tensor for what may not be traced in a backward pass.
    return register.operator(QuantizeArguments(x, scale, dtype, scaling, transpose))


def _common_scale(x: torch.Tensor, dtype: torch.dtype, groups: tuple[Any, ...]) -> torch.Tensor:
    """The scale that `quantize` would give to the tensor of which the ranks of the groups have shards."""
    from torch.distributed._functional_collectives import all_reduce

    magnitude = torch.nan_to_num(x.detach().abs().float(), nan=0.0, posinf=0.0)
    largest = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    for group in groups:
        largest = all_reduce(largest, "max", group)
    limits = torch.finfo(dtype)
    scale = (largest * torch.tensor(1 / limits.max, dtype=torch.float32, device=x.device)).clamp(
        min=2.0**-126
    )
    return torch.where(largest == 0, torch.ones_like(scale), scale)


def _product(
    left: tuple[torch.Tensor, ...],
    right: tuple[torch.Tensor, ...],
    scaling: str,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    fast: bool = False,
) -> torch.Tensor:
    """left @ rightᵀ + bias, each (values, scales of rows, of groups in rows, or of all)."""
    tensors = (left[0], right[0].mT, left[1], right[1] if scaling == "tensor" else right[1].mT)
    if not _is_compiling():
        return scaled_gemm(*tensors, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    from kernels_dsl.ops.gemm import register  # noqa: F401

    return torch.ops.kernels_dsl.scaled_gemm(*tensors, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def _scalings(weight: torch.Tensor, recipe: str) -> tuple[str, str]:
    """Of activations and gradients, and of weights."""
    return ("matrix", "matrix") if recipe == "tensor" and weight.dim() == 3 else RECIPES[recipe]


def _rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x as one matrix for a weight, or as one for each."""
    return x if weight.dim() == 3 or x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _output(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scalings: tuple[str, str],
    dtype: torch.dtype,
    fast: bool,
    needs: tuple[bool, bool],
    shared: Shared,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The output, and what the gradients of x and of weight need, as far as they are needed."""
    needs_x, needs_weight = needs
    e4m3 = torch.float8_e4m3fn
    rows = _quantized(_rows(x, weight), e4m3, scalings[0], True, needs_weight, shared.x)
    columns = _quantized(weight, e4m3, scalings[1], True, needs_x, shared.weight)
    # Scales of blocks are multiplied into float32 sums, so there are none that could be fast.
    y = _product(rows[:2], columns[:2], scalings[1], dtype, bias, fast and scalings[1] != "128x128")
    kept = (*(rows[2:] if needs_weight else (None, None)), *(columns[2:] if needs_x else (None, None)))
    if weight.dim() == 2 and x.dim() != 2:  # no view: one that a node makes may not be changed in place
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
    return y, kept


class Facts(NamedTuple):
    """A call's facts that gradients need beside tensors.

    `scaling`: of activations and gradients. `groups`: whether each has a weight. `dtypes`, `shape`: of x,
    weight and bias, of x. `shared`: process groups that have shards of the output.
    """

    scaling: str
    grad_dtype: torch.dtype
    groups: bool
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None]
    shape: torch.Size
    shared: tuple[Any, ...] = ()


def gradients(
    ctx: Any, gradient: torch.Tensor, kept: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight and bias, and None. `kept`: values and scales of x.mT and of weight.mT."""
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    facts: Facts = ctx.facts
    x_turned, x_scale, weight_turned, weight_scale = kept
    lead, n = gradient.shape[:-1], gradient.shape[-1]
    flat = gradient if facts.groups else gradient.reshape(math.prod(lead), n)
    d_x = d_weight = d_bias = None
    if needs_x or needs_weight:
        parts = _quantized(flat, facts.grad_dtype, facts.scaling, needs_x, needs_weight, facts.shared)
        if needs_x:
            d_x = _product(parts[:2], (weight_turned, weight_scale), facts.scaling, facts.dtypes[0])
            d_x = d_x.view(facts.shape)
        if needs_weight:
            d_weight = _product(parts[-2:], (x_turned, x_scale), facts.scaling, facts.dtypes[1])
    if needs_bias:
        from kernels_dsl.ops.gemm.grad import summed_over

        d_bias = summed_over(flat, (0,), facts.dtypes[2])
    return d_x, d_weight, d_bias, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: str,
        grad_dtype: torch.dtype,
        dtype: torch.dtype,
        fast: bool,
        shared: Shared,
    ) -> torch.Tensor:
        scalings = _scalings(weight, recipe)
        y, kept = _output(x, weight, bias, scalings, dtype, fast, ctx.needs_input_grad[:2], shared)
        ctx.save_for_backward(*kept)
        dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.facts = Facts(scalings[0], grad_dtype, weight.dim() == 3, dtypes, x.shape, shared.output)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*gradients(ctx, gradient, ctx.saved_tensors), None, None, None, None)


class ScaledLinear(torch.nn.Linear):
    """`torch.nn.Linear` multiplied in fp8 by `scaled_linear`; parameters and state are those of Linear.

    The weight stays bf16, fp16 or fp32 for the optimizer and is quantised in each forward pass.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: str = "row",
        grad_dtype: torch.dtype = torch.float8_e5m2,
        use_fast_accum: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_options(recipe, grad_dtype, use_fast_accum)

    def _set_options(self, recipe: str, grad_dtype: torch.dtype, use_fast_accum: bool) -> None:
        _check_options(recipe, grad_dtype, use_fast_accum)
        self.recipe = recipe
        self.grad_dtype = grad_dtype
        self.use_fast_accum = use_fast_accum

    @staticmethod
    def from_linear(
        linear: torch.nn.Linear,
        *,
        recipe: str = "row",
        grad_dtype: torch.dtype = torch.float8_e5m2,
        use_fast_accum: bool = True,
    ) -> ScaledLinear:
        """The layer with `linear`'s own parameters, which the two then share: an optimizer that has them goes
        on with them."""
        instance("linear", linear, torch.nn.Linear)
        made = ScaledLinear.__new__(ScaledLinear)
        torch.nn.Module.__init__(made)  # without weights of its own to fill with random numbers
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made.register_parameter("weight", linear.weight)
        made.register_parameter("bias", linear.bias)
        made._set_options(recipe, grad_dtype, use_fast_accum)
        return made.train(linear.training)

    @staticmethod
    def replace(
        model: torch.nn.Module,
        where: Callable[[str, torch.nn.Linear], bool] | None = None,
        **options: Any,
    ) -> list[str]:
        """Put a `ScaledLinear` in the place of each `torch.nn.Linear` inside of `model`, or of those for
        which `where(name, layer)` is true; returns their names. Layers of derived classes stay, and one that
        has several names is one again. options: those of `from_linear`."""
        instance("model", model, torch.nn.Module)
        if where is not None and not callable(where):
            raise TypeError(f"where is {shown(where)}, must be a function or None")
        found = [
            (name, layer)
            for name, layer in model.named_modules(remove_duplicate=False)
            if type(layer) is torch.nn.Linear and name and (where is None or where(name, layer))
        ]
        made = {layer: ScaledLinear.from_linear(layer, **options) for _, layer in found}
        for name, layer in found:
            model.set_submodule(name, made[layer])
        return [name for name, _ in found]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) to (…, out_features)."""
        return scaled_linear(
            x, self.weight, self.bias,
            recipe=self.recipe, grad_dtype=self.grad_dtype, use_fast_accum=self.use_fast_accum,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The text that `print` shows."""
        return f"{super().extra_repr()}, recipe={self.recipe!r}, grad_dtype={self.grad_dtype}"
