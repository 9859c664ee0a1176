"""`gemm`: D = activation(alpha · A @ B + beta · C + bias) + residual, or a user's own epilogue of A @ B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES, refuse_written
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops.gemm import plan as gemm_plan
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.arguments import GemmArguments
from kernels_dsl.ops.gemm.product import GEMM, check_out_apart
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among, weight

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
    batch_invariant: bool = False,
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

    batch_invariant: a row of the result has the same bits whatever M and L are, whatever other rows hold, and
    whatever the alignment of the tensors: K is never split, and the order of an element's sum depends on the
    GPU's architecture and the dtype alone. `config` must keep it then. Of the gradients, a's keeps it too.

    Returns (M, N), or (L, M, N) where a or b has a batch. Differentiable in a, b, c, bias and residual, but
    not with `epilogue` or `out`. Raises TypeError and ValueError before any launch, naming the argument;
    `supports` gives the same reasons as text.
    """
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    key: Any = None
    tensors: tuple[Any, ...] = (a, b) if out is None else (a, b, out)
    if type(a) is type(b) is _Tensor or (type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES):
        one = weight(alpha, 1.0) if alpha.__class__ is not float or alpha != 1.0 else True
        try:
            key = (
                a.shape, b.shape, out.__class__, one, activation, out_dtype, config, family, batch_invariant,
            )  # fmt: skip
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    if key is not None:
        extras: tuple[Any, ...] = ()
        if not (c is bias is residual is epilogue is None) or epilogue_args:
            extras = (c, bias, residual, *epilogue_args)
            tensors += tensors_among(extras)
            zero = weight(beta, 0.0) if c is not None else (beta.__class__, beta)
            key = (key, epilogue, bias_axis, zero, *map(type, extras))
        elif beta.__class__ is not float or beta != 1.0 or bias_axis != "n":
            key = (key, bias_axis, beta.__class__, beta)  # without effect: an error
        result = repeated(GEMM.calls, key, tensors, out, alpha, beta, extras)
        if result is not None:
            return result
    call = GemmArguments(
        a, b, c, bias, residual, epilogue_args, bias_axis, alpha,
        beta=beta, activation=activation, epilogue=epilogue, out_dtype=out_dtype, config=config,
        family=family, batch_invariant=batch_invariant, out=out,
    )  # fmt: skip
    return GEMM.first(call, key, tensors, _operator)


def _operator() -> Callable[[GemmArguments], torch.Tensor]:
    from kernels_dsl.ops.gemm import register

    return register.GEMM_OPERATOR


def supports(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    config: GemmConfig | None = None,
    family: str | None = None,
    **options: Any,
) -> str | None:
    """Says why `gemm(a, b, …)` with these arguments cannot run here; None if it can. Compiles nothing.

    Takes the arguments of `gemm`.
    """
    try:
        call = _call_of(a, b, config=config, family=family, **options).in_memory()
        GEMM.new_plan(call)
        if call.out is not None:
            check_out_apart(call)
        if torch.is_grad_enabled():
            call.refuse_gradients()
            refuse_written(call.read().values(), out=call.out)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def clear_plans() -> None:
    """Forget what was decided for the calls so far: after tuning, or to pick up another cache folder."""
    GEMM.calls.clear()
    GEMM.plans.clear()


def plan_for(a: torch.Tensor, b: torch.Tensor, **options: Any) -> gemm_plan.Plan:
    """The plan that `gemm(a, b, **options)` would follow: for tests, benchmarks and the tuner."""
    return GEMM.new_plan(_call_of(a, b, **options))


def _call_of(a: torch.Tensor, b: torch.Tensor, **options: Any) -> GemmArguments:
    options["epilogue_args"] = product_options.arguments(options.get("epilogue_args", ()))
    return GEMM.call_of(a=a, b=b, **options)
