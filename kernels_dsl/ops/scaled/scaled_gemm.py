"""`scaled_gemm`: D = epilogue((A · scale_a) @ (B · scale_b)) of fp8 operands, by the kernels of `gemm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops import overlap
from kernels_dsl.ops.gemm import plan as gemm_plan
from kernels_dsl.ops.plain import PLAIN_TYPES, plain, signature
from kernels_dsl.ops.scaled import arguments as scaled_arguments
from kernels_dsl.ops.target import target_of

_PLANS: dict[Any, gemm_plan.Plan] = {}
_AMAX = 6
"""Where amax stands among the extras of `run_direct`."""
_MAX_PLANS = 8192
_Tensor = torch.Tensor
_STRIDED = torch.strided
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    scale_result: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
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
    use_fast_accum: bool = False,
    config: GemmConfig | None = None,
    family: str | None = None,
) -> torch.Tensor:
    """activation(alpha · (a · scale_a) @ (b · scale_b) + beta · c + bias) + residual of fp8 operands.

    a: (M, K) or (L, M, K), b: (K, N) or (L, K, N), torch.float8_e4m3fn or torch.float8_e5m2 each; any M, N,
    K, L ≥ 0; a batch of 1 and a missing batch are broadcast. As in `torch._scaled_mm` a should be row-major
    and b column-major, rows and columns at multiples of 16 bytes (what `kernels_dsl.quantize` returns, and
    `.mT` of that): fp8 matrix instructions read along K only, and other operands are copied first.

    scale_a, scale_b: float32 factors that undo the quantisation, any strides. Each one element for the whole
    operand, or one a row of a, (M, 1), and one a column of b, (1, N); with a batch also (L, 1, 1), (L, M, 1),
    (L, 1, N). Or both one for 128 elements of K, G = ceil(K / 128): of a row of a, (M, G), or of 128 rows,
    (ceil(M / 128), G); of a column of b, (G, N), or of 128 columns, (G, ceil(N / 128)). The modes are those
    of a and b, as in `torch._scaled_mm`; DeepGEMM has b and its scales transposed, (N, K) and
    (N / 128, K / 128).

    The other arguments are those of `kernels_dsl.gemm`, after the scaling. out_dtype: bf16 (the default),
    fp16, fp32, or an fp8 dtype, which the result saturates to. scale_result: float32, one element, a factor
    of an fp8 result, behind everything else: the reciprocal of what dequantises it.

    amax: float32, one element, written: the largest magnitude of the result before scale_result and before it
    is rounded to out_dtype, as cuBLASLt's amaxD; the same bits in every call. NaN where an element is NaN, 0
    for a result without elements. It must share no memory with the other tensors.

    use_fast_accum: the tensor cores sum all of K, with about 14 bits each time they add. Otherwise, and with
    scales of 128 elements of K, they sum 128 of K at a time, and those sums are added in float32.

    Returns (M, N), or (L, M, N) where a or b has a batch. No gradients. Compute capability 8.9 and later.
    Raises TypeError and ValueError before any launch, naming the argument; `scaled_gemm_supports` gives the
    same reasons as text.
    """
    extras = (c, bias, residual, scale_a, scale_b, scale_result, amax, *epilogue_args)
    options = (alpha, beta, bias_axis, activation, epilogue, out_dtype, use_fast_accum)
    key: Any = None
    if c is residual is scale_result is amax is None and not epilogue_args:
        key = _short_key((a, b, scale_a, scale_b), bias, out, (options, config, family))
        plan = _PLANS.get(key)
        if plan is not None and (out is None or not overlap.ranges_meet(out, (a, b, *extras), plan.extents)):
            make = plan.operands
            operands = None if make is None else make((float(alpha), float(beta), *extras))
            return plan.run(a, b, out, operands)
    if (
        _is_compiling()
        or _dispatch_modes()
        or _functorch_level() is not None
        or not plain((a, b, out, *extras))
    ):
        from kernels_dsl.ops.scaled import register as scaled_register

        return scaled_register.call(a, b, extras, options, out, (config, family))
    return run_direct(a, b, extras, options, out, (config, family), key)


def _short_key(tensors: tuple[Any, ...], bias: Any, out: Any, rest: tuple[Any, ...]) -> Any:
    """What finds the plan of a call with no other tensors; None where it must go the long way.

    `tensors`: a, b, scale_a, scale_b.
    """
    a, b, scale_a, scale_b = tensors
    if (
        not type(a) is type(b) is type(scale_a) is type(scale_b) is _Tensor
        or not a.layout is b.layout is scale_a.layout is scale_b.layout is _STRIDED
        or not ((bias is None or type(bias) in PLAIN_TYPES) and (out is None or type(out) is _Tensor))
        or _is_compiling()
        or _dispatch_modes()
        or _functorch_level() is not None
        or scale_a.is_neg()
        or scale_b.is_neg()
        or (_grad_enabled() and (a.requires_grad or b.requires_grad))
        or (_grad_enabled() and (scale_a.requires_grad or scale_b.requires_grad))
        or not (bias is out is None or plain((bias, out)))
    ):
        return None
    return (
        a.dtype, a.shape, a.stride(), a.data_ptr() & 15, a.get_device(),
        b.dtype, b.shape, b.stride(), b.data_ptr() & 15, b.get_device(),
        scale_a.dtype, scale_a.shape, scale_a.stride(), scale_a.data_ptr() & 15, scale_a.get_device(),
        scale_b.dtype, scale_b.shape, scale_b.stride(), scale_b.data_ptr() & 15, scale_b.get_device(),
        rest, bias if bias is None else signature(bias), out if out is None else signature(out),
    )  # fmt: skip


def run_direct(
    a: torch.Tensor,
    b: torch.Tensor,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    forced: tuple[GemmConfig | None, str | None],
    key: Any = None,
) -> torch.Tensor:
    """`scaled_gemm` past the dispatcher; `key`: that of the plan, None to make it here.

    `extras`: c, bias, residual, the scales of a, b and the result, amax, the epilogue's arguments; `options`:
    alpha, beta, bias_axis, activation, epilogue, out_dtype, use_fast_accum; `forced`: configuration, family.
    """
    if key is None:
        key = (signature(a), signature(b), *map(signature, extras), options, forced, signature(out))
    plan = _PLANS.get(key)
    if plan is None:
        plan = _plan(a, b, extras, options, out, forced)
        if not target_of(a).emulated:
            if len(_PLANS) >= _MAX_PLANS:
                _PLANS.clear()
            _PLANS[key] = plan
    if out is not None and overlap.ranges_meet(out, (a, b, *extras), plan.extents):
        overlap.check_overlap(out, _named_tensors(a, b, extras))
    if extras[_AMAX] is not None:
        others = {**_named_tensors(a, b, extras), "out": out}
        overlap.check_alone("amax", others.pop("amax"), others)
        extras[_AMAX].zero_()
    make = plan.operands
    operands = None if make is None else make((float(options[0]), float(options[1]), *extras))
    return plan.run(a, b, out, operands)


def _named_tensors(a: torch.Tensor, b: torch.Tensor, extras: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    names = ("a", "b", "c", "bias", "residual", "scale_a", "scale_b", "scale_result", "amax")
    named = dict(zip(names, (a, b, *extras)))
    named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(extras[_AMAX + 1 :]))
    return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}


def described(
    a: torch.Tensor,
    b: torch.Tensor,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
) -> Any:
    """The checked call; arguments as those of `run_direct`."""
    c, bias, residual, scale_a, scale_b, scale_result, amax, *epilogue_args = extras
    alpha, beta, bias_axis, activation, epilogue, out_dtype, use_fast_accum = options
    return scaled_arguments.describe(
        a, b, scale_a, scale_b, scale_result=scale_result, amax=amax, c=c, bias=bias, bias_axis=bias_axis,
        residual=residual, alpha=alpha, beta=beta, activation=activation, epilogue=epilogue,
        epilogue_args=epilogue_args, out=out, out_dtype=out_dtype, use_fast_accum=use_fast_accum,
    )  # fmt: skip


def _plan(
    a: torch.Tensor,
    b: torch.Tensor,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    forced: tuple[GemmConfig | None, str | None],
) -> gemm_plan.Plan:
    call = described(a, b, extras, options, out)
    overlap.check_self_overlap(out)
    return gemm_plan.build(call, a, b, out, target_of(a), *forced, extras)


def scaled_gemm_supports(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    config: GemmConfig | None = None,
    family: str | None = None,
    **arguments: Any,
) -> str | None:
    """Why `scaled_gemm(a, b, scale_a, scale_b, …)` cannot run here; None if it can. Compiles nothing.

    Takes the arguments of `scaled_gemm`.
    """
    try:
        plan_for(a, b, scale_a, scale_b, config=config, family=family, **arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def plan_for(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    config: GemmConfig | None = None,
    family: str | None = None,
    out: torch.Tensor | None = None,
    **arguments: Any,
) -> gemm_plan.Plan:
    """The plan that `scaled_gemm` with these arguments would follow: for tests and benchmarks."""
    extras = (
        *(arguments.pop(name, None) for name in ("c", "bias", "residual")), scale_a, scale_b,
        arguments.pop("scale_result", None), arguments.pop("amax", None), *arguments.pop("epilogue_args", ()),
    )  # fmt: skip
    options = tuple(arguments.pop(name, default) for name, default in OPTIONS.items())
    if arguments:
        raise TypeError(f"{sorted(arguments)[0]} is given, must not: scaled_gemm has no such argument")
    return _plan(a, b, extras, options, out, (config, family))


OPTIONS = {
    "alpha": 1.0, "beta": 1.0, "bias_axis": "n", "activation": None, "epilogue": None, "out_dtype": None,
    "use_fast_accum": False,
}  # fmt: skip
