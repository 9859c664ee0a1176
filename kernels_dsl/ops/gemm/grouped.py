"""`grouped_gemm`, `scaled_grouped_gemm`: groups of rows, each times its own matrix, by `gemm`'s kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops import overlap
from kernels_dsl.ops.gemm import grouped_arguments
from kernels_dsl.ops.gemm import plan as gemm_plan
from kernels_dsl.ops.plain import PLAIN_TYPES
from kernels_dsl.ops.target import target_of

_PLANS: dict[Any, gemm_plan.Plan] = {}
_MAX_PLANS = 8192
_AMAX = 7
"""Where amax stands among the extras of `run_direct`."""
_STRIDED = torch.strided
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
OPTIONS = {"alpha": 1.0, "activation": None, "epilogue": None, "out_dtype": None, "use_fast_accum": False}
"""The options of `run_direct` with what they are where they are not given, in their order."""


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    activation: str | None = None,
    epilogue: str | Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    family: str | None = None,
) -> torch.Tensor:
    """activation(alpha · a[rows of group g] @ b[g] + bias) + residual for each group g of rows.

    a: (M, K), b: (G, K, N), both bf16, fp16 or float32 (as tf32), as `torch.nn.functional.grouped_mm` has
    them. offs: (G,) int32, on a's device: group g ends before row offs[g] and starts where the one before
    ends, the first one at row 0. Only the kernel reads them, so nothing waits for the GPU, and a CUDA graph
    may replay with other offsets. A group may be empty. Offsets must not decrease: a group that ends before
    it starts is empty, an end beyond M counts as M, and which of two groups that claim a row gets it is not
    defined.

    bias: (N,), or (G, N) for one a group. residual, and tensors among epilogue_args, broadcast to (M, N). The
    other arguments are those of `gemm`. An a that is not row-major, rows off multiples of 16 bytes and
    float32 operands that are not contiguous along K are copied first.

    Returns (M, N); rows from offs[-1] on are not written. No gradients. Raises TypeError and ValueError
    before any launch, naming the argument; `grouped_gemm_supports` gives the same reasons as text. That
    tiles of all groups make one list, which persistent CTAs walk, is CUTLASS's grouped GEMM.
    """
    extras = (None, bias, residual, None, None, None, offs, None, *epilogue_args)
    options = (alpha, activation, epilogue, out_dtype, False)
    return _call(a, b, extras, options, out, (config, family))


def scaled_grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    *,
    scale_result: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    activation: str | None = None,
    epilogue: str | Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    config: GemmConfig | None = None,
    family: str | None = None,
) -> torch.Tensor:
    """`grouped_gemm` of fp8 operands with scales, as `scaled_gemm` has them.

    a: (M, K), b: (G, K, N), torch.float8_e4m3fn or torch.float8_e5m2 each; a should be row-major and each
    matrix of b column-major, rows and columns at multiples of 16 bytes, as in `torch._scaled_grouped_mm`;
    other operands are copied first. offs: (G,) int32, and all else that is not said here, as in
    `grouped_gemm`.

    scale_a, scale_b: float32 factors that undo the quantisation, any strides. Each one element, or (G, 1, 1)
    for one a group, or one a row of a, (M,) or (M, 1), and one a column of b, (G, N) or (G, 1, N). Or both
    one for 128 elements of K, P = ceil(K / 128): of a row of a, (M, P), and of a column of b, (G, P, N), or
    of 128 columns, (G, P, ceil(N / 128)).

    out_dtype: bf16 (the default), fp16, float32 or an fp8 dtype, which the result saturates to, times
    scale_result. use_fast_accum, and amax, which is of the rows of all groups: as in `scaled_gemm`. Compute
    capability 8.9 and later; `scaled_grouped_gemm_supports` says why a call cannot run.
    """
    extras = (None, bias, residual, scale_a, scale_b, scale_result, offs, amax, *epilogue_args)
    options = (alpha, activation, epilogue, out_dtype, use_fast_accum)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if not isinstance(scale, torch.Tensor):
            raise TypeError(f"{name} is a {type(scale).__name__}, must be a torch.Tensor")
    return _call(a, b, extras, options, out, (config, family))


def _call(
    a: torch.Tensor,
    b: torch.Tensor,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    forced: tuple[GemmConfig | None, str | None],
) -> torch.Tensor:
    key = None
    if not (_is_compiling() or _dispatch_modes()) and _functorch_level() is None:
        key = _key((a, b, *extras, out), (options, forced), _grad_enabled())
    if key is None:
        from kernels_dsl.ops.gemm import grouped_register

        return grouped_register.call(a, b, extras, options, out, forced)
    return run_direct(a, b, extras, options, out, forced, key)


def run_direct(
    a: torch.Tensor,
    b: torch.Tensor,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    forced: tuple[GemmConfig | None, str | None],
    key: Any = None,
) -> torch.Tensor:
    """Both operations past the dispatcher; `key`: that of the plan, None to make it here.

    `extras`: None, bias, residual, the scales of a, b and the result, offs, amax, the epilogue's arguments;
    `options`: alpha, activation, epilogue, out_dtype, use_fast_accum; `forced`: configuration, family.
    """
    if key is None:
        key = _key((a, b, *extras, out), (options, forced), grad=False)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _plan(a, b, extras, options, out, forced)
        if key is not None and a.is_cuda:
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
    return plan.run(a, b, out, None if make is None else make((float(options[0]), 1.0, *extras)))


def _named_tensors(a: torch.Tensor, b: torch.Tensor, extras: tuple[Any, ...]) -> dict[str, Any]:
    names = ("a", "b", "", "bias", "residual", "scale_a", "scale_b", "scale_result", "offs", "amax")
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
    _, bias, residual, scale_a, scale_b, scale_result, offs, amax, *epilogue_args = extras
    alpha, activation, epilogue, out_dtype, use_fast_accum = options
    return grouped_arguments.describe(
        a, b, offs, (scale_a, scale_b, scale_result), amax=amax, bias=bias, residual=residual,
        alpha=alpha, activation=activation, epilogue=epilogue, epilogue_args=epilogue_args, out=out,
        out_dtype=out_dtype, use_fast_accum=use_fast_accum,
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


def plan_for(
    a: torch.Tensor,
    b: torch.Tensor,
    *scales_and_offs: torch.Tensor,
    config: GemmConfig | None = None,
    family: str | None = None,
    out: torch.Tensor | None = None,
    **arguments: Any,
) -> gemm_plan.Plan:
    """The plan that `grouped_gemm`, or with two scales before offs `scaled_grouped_gemm`, would follow."""
    if len(scales_and_offs) not in (1, 3):
        raise TypeError(f"{len(scales_and_offs)} tensors after b, must be offs, or scale_a, scale_b and offs")
    *scales, offs = scales_and_offs
    given = {name: arguments.pop(name, None) for name in ("bias", "residual", "scale_result", "amax")}
    extras = (
        None, given["bias"], given["residual"], *(scales or (None, None)), given["scale_result"], offs,
        given["amax"], *arguments.pop("epilogue_args", ()),
    )  # fmt: skip
    options = tuple(arguments.pop(name, default) for name, default in OPTIONS.items())
    if arguments:
        raise TypeError(f"{sorted(arguments)[0]} is given, must not: there is no such argument")
    return _plan(a, b, extras, options, out, (config, family))


def grouped_gemm_supports(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, **arguments: Any
) -> str | None:
    """Why `grouped_gemm(a, b, offs, …)` cannot run here; None if it can. Compiles nothing."""
    try:
        plan_for(a, b, offs, **arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def scaled_grouped_gemm_supports(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    **arguments: Any,
) -> str | None:
    """Why `scaled_grouped_gemm(a, b, scale_a, scale_b, offs, …)` cannot run here; None if it can. Compiles
    nothing."""
    try:
        plan_for(a, b, scale_a, scale_b, offs, **arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _key(values: tuple[Any, ...], rest: tuple[Any, ...], grad: bool) -> Any:
    """What finds the plan of a call; None where a tensor needs the dispatcher, for gradients if `grad`."""
    parts: list[Any] = [rest]
    for value in values:
        if value is None:
            parts.append(None)
        elif type(value) in PLAIN_TYPES and value.layout is _STRIDED:
            if (grad and value.requires_grad) or value.is_neg():
                return None
            parts += (value.dtype, value.shape, value.stride(), value.data_ptr() & 15, value.get_device())
        elif isinstance(value, torch.Tensor) and value.layout is _STRIDED:
            return None
        else:
            parts.append(type(value))
    return tuple(parts)
