"""`grouped_gemm`, `scaled_grouped_gemm`: groups of rows, each times its own matrix, by `gemm`'s kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.grouped_arguments import GROUPED_GEMM, GroupedArguments
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among


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
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    key: Any = None
    tensors: tuple[Any, ...] = (a, b, offs)
    if type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES:
        extras = (None, bias, residual, None, None, None, offs, None, *epilogue_args)
        kinds: Any = None
        if not bias is residual is out is None or epilogue_args:
            kinds, tensors = tuple(map(type, extras)), (a, b, *tensors_among((out, *extras)))
        options = (alpha, activation, epilogue, out_dtype, False, config, family)
        try:
            key = (a.shape, b.shape, kinds, out is None, options)
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
        else:
            result = repeated(GROUPED_GEMM.calls, key, tensors, out, alpha, 1.0, extras)
            if result is not None:
                return result
    call = GroupedArguments(
        a, b, offs, bias=bias, residual=residual, epilogue_args=epilogue_args, alpha=alpha,
        activation=activation, epilogue=epilogue, out_dtype=out_dtype, config=config, family=family, out=out,
    )  # fmt: skip
    return GROUPED_GEMM.first(call, key, tensors, _operator)


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
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if not isinstance(scale, torch.Tensor):
            raise TypeError(f"{name} is a {type(scale).__name__}, must be a torch.Tensor")
    key: Any = None
    tensors: tuple[Any, ...] = (a, b, scale_a, scale_b, offs)
    if type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES:
        extras = (None, bias, residual, scale_a, scale_b, scale_result, offs, amax, *epilogue_args)
        kinds: Any = "scaled"
        if not bias is residual is scale_result is out is amax is None or epilogue_args:
            kinds, tensors = tuple(map(type, extras)), (a, b, *tensors_among((out, *extras)))
        options = (alpha, activation, epilogue, out_dtype, use_fast_accum, config, family)
        try:
            key = (a.shape, b.shape, kinds, out is None, options)
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
        else:
            result = repeated(GROUPED_GEMM.calls, key, tensors, out, alpha, 1.0, extras, amax)
            if result is not None:
                return result
    call = GroupedArguments(
        a, b, offs, scale_a, scale_b, scale_result, bias, residual,
        epilogue_args=epilogue_args, alpha=alpha, activation=activation, epilogue=epilogue,
        out_dtype=out_dtype, use_fast_accum=use_fast_accum, config=config, family=family, out=out, amax=amax,
    )  # fmt: skip
    return GROUPED_GEMM.first(call, key, tensors, _operator)


def _operator() -> Callable[[GroupedArguments], torch.Tensor]:
    from kernels_dsl.ops.gemm import register

    return register.GROUPED_GEMM_OPERATOR


def grouped_gemm_supports(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, **arguments: Any
) -> str | None:
    """Says why `grouped_gemm(a, b, offs, …)` cannot run here; None if it can. Compiles nothing."""
    return GROUPED_GEMM.why_not(a=a, b=b, offs=offs, **arguments)


def scaled_grouped_gemm_supports(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    **arguments: Any,
) -> str | None:
    """Says why `scaled_grouped_gemm(a, b, scale_a, scale_b, offs, …)` cannot run here; None if it can.
    Compiles nothing."""
    return GROUPED_GEMM.why_not(a=a, b=b, scale_a=scale_a, scale_b=scale_b, offs=offs, **arguments)
