"""`gemm`: D = activation(alpha · A @ B + beta · C + bias) + residual, or a user's own epilogue of A @ B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops import gemm_arguments, gemm_plan, overlap
from kernels_dsl.ops.target import target_of

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_PLANS: dict[Any, gemm_plan.Plan] = {}
_MAX_PLANS = 8192  # some hundred bytes each; cleared when full, since plans are cheap to make again

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_axis: str = "n",
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    epilogue: str | Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    family: str | None = None,
) -> torch.Tensor:
    """activation(alpha · a @ b + beta · c + bias) + residual, summed in float32.

    a: (M, K) or (L, M, K), b: (K, N) or (L, K, N), bf16, fp16 or fp32, of one dtype; any strides and
    alignment, any M, N, K, L ≥ 0; a batch of 1 and a missing batch are broadcast. fp32 operands are
    multiplied as tf32 (10 bits of mantissa), whatever `torch.backends.cuda.matmul.allow_tf32` says.

    c, residual: tensors that broadcast to the result. With beta 0, c is not read. bias: (N,) with
    `bias_axis` "n", (M,) with "m". activation: None, "relu", "gelu" (by erf), "gelu_tanh" or "silu".

    epilogue: in place of all of these, a function of the float32 accumulator and of `epilogue_args` (tensors
    that broadcast to the result, which it gets as float32, and numbers), or the name of a registered one.
    It is traced by the CuTe DSL: `def scaled(acc, x): return acc * x`.

    out: the result's place, of its shape; any strides without overlap. It may be c or residual itself.
    out_dtype: bf16, fp16 or fp32; default out's, else a's. config: a configuration in place of the
    chosen one. family: "sm90" or "sm80" forces a family of kernels.

    Returns (M, N), or (L, M, N) where a or b has a batch. Differentiable in a, b, c, bias and residual, but
    not with `epilogue` or `out`. Raises TypeError and ValueError before any launch, naming the argument;
    `supports` gives the same reasons as text.
    """
    if (
        _is_compiling()
        or type(a) not in _PLAIN_TYPES
        or type(b) not in _PLAIN_TYPES
        or _dispatch_modes()
        or _functorch_level() is not None
        or (_grad_enabled() and (a.requires_grad or b.requires_grad))
        or (a.dtype is torch.float32 and (a.is_neg() or b.is_neg()))
    ):
        direct = False
    elif c is bias is residual is epilogue is out is None and not epilogue_args:
        # The commonest call, kept short: every line here is host time of every call.
        key = (
            a.dtype, a.shape, a.stride(), a.data_ptr() & 15, a.get_device(),
            b.dtype, b.shape, b.stride(), b.data_ptr() & 15, b.get_device(),
            alpha == 1.0, activation, out_dtype, config, family,
        )  # fmt: skip
        plan = _PLANS.get(key)
        if plan is not None:
            return plan.run(a, b, None, None if plan.operands is None else plan.operands({"alpha": alpha}))
        direct = True
    else:
        key = None
        direct = _plain((c, bias, residual, out, *epilogue_args))
    options: dict[str, Any] = {
        "c": c, "bias": bias, "bias_axis": bias_axis, "residual": residual, "alpha": alpha, "beta": beta,
        "activation": activation, "epilogue": epilogue, "epilogue_args": epilogue_args, "out": out,
        "out_dtype": out_dtype, "config": config, "family": family,
    }  # fmt: skip
    if direct:
        return run_direct(a, b, key=key, **options)
    from kernels_dsl.ops import register

    return register.through_dispatcher(a, b, **options)


def run_direct(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    key: Any = None,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_axis: str,
    residual: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str | None,
    epilogue: str | Callable[..., Any] | None,
    epilogue_args: Sequence[Any],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: GemmConfig | None,
    family: str | None,
) -> torch.Tensor:
    """`gemm` on plain tensors, past the dispatcher and autograd. `key` is a plan's key if it is known."""
    if key is None:
        key = (
            _signature(a), _signature(b), tuple(map(_signature, (c, bias, residual, out, *epilogue_args))),
            bias_axis, alpha == 1.0, beta == 0.0, activation, epilogue, out_dtype, config, family,
        )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        call = gemm_arguments.describe(
            a, b, c=c, bias=bias, bias_axis=bias_axis, residual=residual, alpha=alpha, beta=beta,
            activation=activation, epilogue=epilogue, epilogue_args=epilogue_args, out=out,
            out_dtype=out_dtype,
        )  # fmt: skip
        if out is not None and overlap.self_overlaps(out):
            raise ValueError(
                f"out has strides {out.stride()} for shape {tuple(out.shape)}, must not overlap itself"
            )
        target = target_of(a)
        plan = gemm_plan.build(call, a, b, out, target, config, family)
        if not target.emulated:  # a plan for the emulator is good for as long as it is active
            _keep(key, plan)
    operands = None
    values = {"c": c, "bias": bias, "residual": residual, "alpha": alpha, "beta": beta, "args": epilogue_args}
    if plan.operands is not None:
        operands = plan.operands(values)
    if out is not None:
        others = {"a": a, "b": b, "c": c, "bias": bias, "residual": residual}
        others.update((f"epilogue_args[{i}]", x) for i, x in enumerate(epilogue_args))
        overlap.check_overlap(out, {name: x for name, x in others.items() if isinstance(x, torch.Tensor)})
    return plan.run(a, b, out, operands)


def supports(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    config: GemmConfig | None = None,
    family: str | None = None,
    **options: Any,
) -> str | None:
    """Why `gemm(a, b, …)` with these arguments cannot run here; None if it can. Compiles nothing.

    Takes the arguments of `gemm`.
    """
    try:
        call = gemm_arguments.describe(a, b, **options)
        out = options.get("out")
        if out is not None and overlap.self_overlaps(out):
            return f"out has strides {out.stride()} for shape {tuple(out.shape)}, must not overlap itself"
        gemm_plan.build(call, a, b, out, target_of(a), config, family)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def clear_plans() -> None:
    """Forget what was decided for the calls so far: after tuning, or to pick up another cache folder."""
    _PLANS.clear()


def plan_for(a: torch.Tensor, b: torch.Tensor, **options: Any) -> gemm_plan.Plan:
    """The plan that `gemm(a, b, **options)` would follow: for tests, benchmarks and the tuner."""
    config, family = options.pop("config", None), options.pop("family", None)
    call = gemm_arguments.describe(a, b, **options)
    return gemm_plan.build(call, a, b, options.get("out"), target_of(a), config, family)


def _keep(key: Any, plan: gemm_plan.Plan) -> None:
    if len(_PLANS) >= _MAX_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan


def _signature(value: Any) -> Any:
    """What of an argument a plan depends on: a tensor's layout, and of anything else its type."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() & 15, value.get_device()
    return type(value)


def _plain(values: tuple[Any, ...]) -> bool:
    """Whether all tensors among the values can go past the dispatcher."""
    grad = _grad_enabled()
    for value in values:
        if isinstance(value, torch.Tensor) and (
            type(value) not in _PLAIN_TYPES or (grad and value.requires_grad) or value.is_neg()
        ):
            return False
    return True
