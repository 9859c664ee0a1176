"""`gemm`: D = activation(alpha · A @ B + beta · C + bias) + residual, or a user's own epilogue of A @ B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops import overlap
from kernels_dsl.ops.gemm import arguments as gemm_arguments
from kernels_dsl.ops.gemm import plan as gemm_plan
from kernels_dsl.ops.plain import PLAIN_TYPES, plain, signature
from kernels_dsl.ops.target import target_of

_STRIDED = torch.strided
_PLANS: dict[Any, gemm_plan.Plan] = {}
_NO_EXTRAS: tuple[Any, ...] = ()
_MAX_PLANS = 8192  # some hundred bytes each; cleared when full, since plans are cheap to make again

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_forward_ad = torch.autograd.forward_ad


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
    rounded to tf32 (10 bits of mantissa, to nearest) by the kernels as they load them, whatever
    `torch.backends.cuda.matmul.allow_tf32` says.

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
    extras = _NO_EXTRAS
    if not (c is bias is residual is epilogue is None) or epilogue_args:
        extras = (c, bias, residual, *epilogue_args)
    if (
        _is_compiling()
        or type(a) not in PLAIN_TYPES
        or type(b) not in PLAIN_TYPES
        or _dispatch_modes()
        or _functorch_level() is not None
        or _forward_ad._current_level >= 0
        or (
            _grad_enabled()
            and (a.requires_grad or b.requires_grad or (out is not None and out.requires_grad))
        )
        or (a.dtype is torch.float32 and (a.is_neg() or b.is_neg()))
        or (extras and not plain(extras))
    ):
        from kernels_dsl.ops.gemm import register as gemm_register

        return gemm_register.through_dispatcher(
            a, b, c=c, bias=bias, bias_axis=bias_axis, residual=residual, alpha=alpha, beta=beta,
            activation=activation, epilogue=epilogue, epilogue_args=epilogue_args, out=out,
            out_dtype=out_dtype, config=config, family=family,
        )  # fmt: skip
    # From here on every line is host time of every call.
    key: Any = None
    if a.layout is b.layout is _STRIDED and (
        out is None or (type(out) in PLAIN_TYPES and out.layout is _STRIDED)
    ):
        at_a, at_b = a.data_ptr(), b.data_ptr()
        if out is None:
            key = (
                a.dtype, a.shape, a.stride(), at_a & 15, a.get_device(),
                b.dtype, b.shape, b.stride(), at_b & 15, b.get_device(),
                alpha == 1.0, activation, out_dtype, config, family,
            )  # fmt: skip
        else:
            at_out = out.data_ptr()
            key = (
                a.dtype, a.shape, a.stride(), at_a & 15, a.get_device(),
                b.dtype, b.shape, b.stride(), at_b & 15, b.get_device(),
                alpha == 1.0, activation, out_dtype, config, family,
                out.dtype, out.shape, out.stride(), at_out & 15, out.get_device(),
            )  # fmt: skip
        if extras:
            key = (key, epilogue, bias_axis, beta == 0.0, *map(signature, extras))
        plan = _PLANS.get(key)
        if plan is not None:
            if out is not None:
                # The addresses that out spans, against those of a and b; `overlap` asks more exactly.
                spans = plan.extents
                end = at_out + spans[0]
                if (
                    (at_a < end and at_out < at_a + spans[1])
                    or (at_b < end and at_out < at_b + spans[2])
                    or (extras and overlap.ranges_meet(out, extras, (spans[0], *spans[3:])))
                ):
                    plan = None
            if plan is not None:
                make = plan.operands
                operands = None if make is None else make((float(alpha), float(beta), *extras))
                return plan.run(a, b, out, operands)
    return run_direct(
        a, b, key=key, c=c, bias=bias, bias_axis=bias_axis, residual=residual, alpha=alpha, beta=beta,
        activation=activation, epilogue=epilogue, epilogue_args=epilogue_args, out=out,
        out_dtype=out_dtype, config=config, family=family,
    )  # fmt: skip


def run_direct(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    key: Any = None,
    out: torch.Tensor | None,
    config: GemmConfig | None,
    family: str | None,
    **options: Any,
) -> torch.Tensor:
    """`gemm` on plain tensors, past the dispatcher and autograd. All arguments of `gemm` must be given.

    `key` is that of the plan, None to make it here.
    """
    if key is None and _strided(a) and _strided(b):
        key = ("direct", *map(signature, (a, b, out)), config, family, *map(_part, options.values()))
    plan = None if key is None else _PLANS.get(key)
    if plan is None:
        call = gemm_arguments.describe(a, b, out=out, **options)
        overlap.check_self_overlap(out)
        target = target_of(a)
        extras = (options["c"], options["bias"], options["residual"], *options["epilogue_args"])
        plan = gemm_plan.build(call, a, b, out, target, config, family, extras)
        if key is not None and not target.emulated:  # the emulator may be another one next time
            if len(_PLANS) >= _MAX_PLANS:
                _PLANS.clear()
            _PLANS[key] = plan
    c, bias, residual, epilogue_args = (options[x] for x in ("c", "bias", "residual", "epilogue_args"))
    if out is not None:
        overlap.check_overlap(out, _named(a, b, options))
    operands = None
    if plan.operands is not None:
        scalars = (float(options["alpha"]), float(options["beta"]))
        operands = plan.operands((*scalars, c, bias, residual, *epilogue_args))
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
        overlap.check_self_overlap(out)
        named = _named(a, b, options)
        if out is not None:
            overlap.check_overlap(out, named)
        if torch.is_grad_enabled():
            from kernels_dsl.ops.gemm import register as gemm_register

            gemm_register.refuse_gradients(tuple(named.values()), options.get("epilogue"), out)
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


def _named(a: torch.Tensor, b: torch.Tensor, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that a call reads, by the names of its arguments."""
    named = {"a": a, "b": b, **{name: options.get(name) for name in ("c", "bias", "residual")}}
    named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(options.get("epilogue_args", ())))
    return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _part(option: Any) -> Any:
    """What of an optional argument a plan depends on; a scalar's value too, which is more than needed."""
    if isinstance(option, tuple):
        return tuple(map(signature, option))
    return signature(option) if isinstance(option, torch.Tensor) else option
