"""`scaled_gemm`: D = epilogue((A · scale_a) @ (B · scale_b)) of fp8 operands, by the kernels of `gemm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops.gemm import plan as gemm_plan
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.repeated import repeated, tensors_among
from kernels_dsl.ops.scaled.arguments import SCALED_GEMM, ScaledArguments


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
    of an fp8 result, after everything else: the reciprocal of what dequantises it.

    amax: float32, one element, written: the largest magnitude of the result before scale_result and before it
    is rounded to out_dtype, as cuBLASLt's amaxD; the same bits in every call. NaN where an element is NaN, 0
    for a result without elements. It must share no memory with the other tensors.

    use_fast_accum: the tensor cores sum all of K, with about 14 bits each time they add. Otherwise, and with
    scales of 128 elements of K, they sum 128 of K at a time, and those sums are added in float32.

    Returns (M, N), or (L, M, N) where a or b has a batch. No gradients. Compute capability 8.9 and later.
    Raises TypeError and ValueError before any launch, naming the argument; `scaled_gemm_supports` gives the
    same reasons as text.
    """
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    key: Any = None
    tensors: tuple[Any, ...] = (a, b, scale_a, scale_b)
    if type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES:
        options = (alpha, beta, bias_axis, activation, epilogue, out_dtype, use_fast_accum, config, family)
        extras = (c, bias, residual, scale_a, scale_b, scale_result, amax, *epilogue_args)
        kinds: Any = bias is None
        if c is residual is scale_result is amax is None and not epilogue_args:
            if not bias is out is None:
                tensors += tuple([x for x in (bias, out) if x is not None])
        else:
            kinds, tensors = tuple(map(type, extras)), (a, b, *tensors_among((out, *extras)))
        try:
            key = (a.shape, b.shape, kinds, out is None, options)
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
        else:
            result = repeated(SCALED_GEMM.calls, key, tensors, out, alpha, beta, extras, amax)
            if result is not None:
                return result
    call = ScaledArguments(
        a, b, scale_a, scale_b, scale_result, c, bias, residual,
        epilogue_args=epilogue_args, alpha=alpha, beta=beta, bias_axis=bias_axis, activation=activation,
        epilogue=epilogue, out_dtype=out_dtype, use_fast_accum=use_fast_accum, config=config, family=family,
        out=out, amax=amax,
    )  # fmt: skip
    return SCALED_GEMM.first(call, key, tensors, _operator)


def _operator() -> Callable[[ScaledArguments], torch.Tensor]:
    from kernels_dsl.ops.gemm import register

    return register.SCALED_GEMM_OPERATOR


def scaled_gemm_supports(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    **arguments: Any,
) -> str | None:
    """Says why `scaled_gemm(a, b, scale_a, scale_b, …)` cannot run here; None if it can. Compiles nothing.

    Takes the arguments of `scaled_gemm`.
    """
    return SCALED_GEMM.why_not(a=a, b=b, scale_a=scale_a, scale_b=scale_b, **arguments)


def plan_for(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **arguments: Any
) -> gemm_plan.Plan:
    """The plan that `scaled_gemm` with these arguments would follow: for tests and benchmarks."""
    call = SCALED_GEMM.call_of(a=a, b=b, scale_a=scale_a, scale_b=scale_b, **arguments)
    return SCALED_GEMM.new_plan(call)
