"""`gemm`: D = activation(alpha · A @ B + beta · C + bias) + residual, or a user's own epilogue of A @ B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops import call_cache, overlap
from kernels_dsl.ops.eager_path import (
    PLAIN_TYPES,
    check_memory,
    check_output,
    needs_dispatcher,
    signature,
    watched,
    written_out,
)
from kernels_dsl.ops.gemm import arguments as gemm_arguments
from kernels_dsl.ops.gemm import plan as gemm_plan
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.options import LARGEST
from kernels_dsl.ops.target import target_of

_PLANS: dict[Any, Any] = {}
_NO_EXTRAS: tuple[Any, ...] = ()
_READ = ("c", "bias", "residual")
_OPTIONS = (
    *_READ, "bias_axis", "alpha", "beta", "activation", "epilogue", "epilogue_args", "out", "out_dtype",
)  # fmt: skip
_Tensor = torch.Tensor


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
    `bias_axis` "n", (M,) with "m". activation: None or a name of the table in docs/gemm.md, such as "relu".

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
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    extras = _NO_EXTRAS
    if not (c is bias is residual is epilogue is None) or epilogue_args:
        extras = (c, bias, residual, *epilogue_args)
    key: Any = None
    usual: tuple[Any, ...] = (a, b) if out is None else (a, b, out)
    if type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES:
        one: Any = alpha == 1.0
        if alpha.__class__ is not float:
            one = (alpha.__class__, alpha)
        elif not one and not -LARGEST <= alpha <= LARGEST:
            one = alpha
        try:
            key = (a.shape, b.shape, out.__class__, one, activation, out_dtype, config, family)
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    if key is not None:
        if extras:
            usual += tuple([x for x in extras if isinstance(x, _Tensor)])
            zero: Any = beta
            if c is not None and beta.__class__ is float and -LARGEST <= beta <= LARGEST:
                zero = beta == 0.0
            elif beta.__class__ is not float:
                zero = (beta.__class__, beta)
            key = (key, epilogue, bias_axis, zero, *map(type, extras))
        elif beta.__class__ is not float or beta != 1.0 or bias_axis != "n":
            key = (key, bias_axis, beta.__class__, beta)  # without effect: an error
        plan = call_cache.find(_PLANS, key, usual)
        if plan is not None and (out is None or not overlap.ranges_meet(out, (a, b, *extras), plan.extents)):
            make = plan.operands
            operands = None if make is None else make((float(alpha), float(beta), *extras))
            try:
                return plan.run(a, b, out, operands)
            except ValueError:
                call_cache.look_at_addresses(_PLANS, key)
    options: dict[str, Any] = {
        "c": c, "bias": bias, "bias_axis": bias_axis, "residual": residual, "alpha": alpha, "beta": beta,
        "activation": activation, "epilogue": epilogue, "epilogue_args": epilogue_args,
        "out_dtype": out_dtype,
    }  # fmt: skip
    return _unknown(a, b, out, (config, family), options, (key, usual))


def _unknown(
    a: Any, b: Any, out: Any, forced: tuple[Any, Any], options: dict[str, Any], known: tuple[Any, Any]
) -> torch.Tensor:
    """A call that was not found; `forced`: configuration, family; `known`: what it is to be kept by."""
    config, family = forced
    product_options.check(options)
    product_options.check_forced(config, family)
    if not watched():
        if out is not None:
            check_output("out", out)
        tensors = written_out((a, b, *map(options.get, _READ), *options["epilogue_args"]))
        if tensors is not None:
            a, b, *others = tensors
            options.update(zip(_READ, others), epilogue_args=tuple(others[len(_READ) :]))
            known = (None, ())
    if needs_dispatcher((a, b, out, *map(options.get, _READ), *options["epilogue_args"])):
        from kernels_dsl.ops.gemm import register as gemm_register

        return gemm_register.through_dispatcher(a, b, out=out, config=config, family=family, **options)
    plan = _plan_of(a, b, out, config, family, options)
    result = _follow(plan, a, b, out, options)
    if known[0] is not None and not target_of(a).emulated:
        call_cache.keep(_PLANS, *known, plan)
    return result


def run_direct(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None,
    config: GemmConfig | None,
    family: str | None,
    **options: Any,
) -> torch.Tensor:
    """`gemm` on plain tensors, past the dispatcher and autograd. All arguments of `gemm` must be given."""
    return _follow(_plan_of(a, b, out, config, family, options), a, b, out, options)


def _plan_of(a: Any, b: Any, out: Any, config: Any, family: Any, options: dict[str, Any]) -> gemm_plan.Plan:
    key: Any = None
    if _strided(a) and _strided(b):
        depends = {**options, "alpha": options["alpha"] == 1.0, "beta": options["beta"] == 0.0}
        key = (*map(signature, (a, b, out)), config, family, *map(_part, depends.values()))
    plan: gemm_plan.Plan | None = None if key is None else _PLANS.get(key)
    if plan is None:
        call = gemm_arguments.describe(a, b, out=out, **options)
        overlap.check_self_overlap(out)
        check_memory({**_named(a, b, options), "out": out})
        target = target_of(a)
        extras = (options["c"], options["bias"], options["residual"], *options["epilogue_args"])
        plan = gemm_plan.build(call, a, b, out, target, config, family, extras)
        if key is not None and not target.emulated:  # the emulator may be another one next time
            call_cache.put(_PLANS, key, plan)
    return plan


def _follow(plan: gemm_plan.Plan, a: Any, b: Any, out: Any, options: dict[str, Any]) -> torch.Tensor:
    """The call, after what depends on addresses was looked at."""
    if out is not None:
        overlap.check_overlap(out, _named(a, b, options))
    operands = None
    if plan.operands is not None:
        c, bias, residual, epilogue_args = (options[x] for x in ("c", "bias", "residual", "epilogue_args"))
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
        _check_names(options)
        call = gemm_arguments.describe(a, b, **options)
        out = options.get("out")
        overlap.check_self_overlap(out)
        named = _named(a, b, options)
        if out is not None:
            overlap.check_overlap(out, named)
        if torch.is_grad_enabled():
            from kernels_dsl.ops.gemm import register as gemm_register

            functions = options.get("epilogue"), options.get("activation")
            gemm_register.refuse_gradients(tuple(named.values()), *functions, out)
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
    _check_names(options)
    call = gemm_arguments.describe(a, b, **options)
    return gemm_plan.build(call, a, b, options.get("out"), target_of(a), config, family)


def _check_names(options: dict[str, Any]) -> None:
    """TypeError for one that is no argument of `gemm`."""
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"{name} is given, must not: gemm has no such argument")


def _named(a: torch.Tensor, b: torch.Tensor, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that a call reads, by the names of its arguments."""
    named = {"a": a, "b": b, **{name: options.get(name) for name in ("c", "bias", "residual")}}
    named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(options.get("epilogue_args", ())))
    return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _part(option: Any) -> Any:
    """What of an optional argument a plan depends on."""
    if isinstance(option, (tuple, list)):
        return tuple(map(signature, option))
    return signature(option) if isinstance(option, torch.Tensor) else option
