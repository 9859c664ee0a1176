"""`bsr_scaled_gemm`: block-sparse products of fp8 factors, with a scale a kept block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.ops import call_cache, overlap
from kernels_dsl.ops.bsr import bsr
from kernels_dsl.ops.bsr import plan as bsr_plan
from kernels_dsl.ops.bsr.plan import BsrConfig
from kernels_dsl.ops.bsr.tensor import BsrTensor
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.options import LARGEST, boolean

_Tensor = torch.Tensor


def bsr_scaled_gemm(
    a: BsrTensor | torch.Tensor,
    b: BsrTensor | torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
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
    config: BsrConfig | None = None,
    family: str | None = None,
    check: bool = False,
) -> torch.Tensor:
    """activation(alpha · (a · scale_a) @ (b · scale_b) + beta · c + bias) + residual of fp8 factors.

    One of a and b is a `BsrTensor` (or its `t()`) with e4m3 or e5m2 values, the other dense, (M, K) or
    (L, M, K), (K, N) or (L, K, N), e4m3 or e5m2. The scale of the sparse one is float32 (nnz,), or
    (L, nnz) where the values have a batch, or these with two modes of size 1 behind, as
    `kernels_dsl.quantize(values, scaling="matrix")` returns them. That of the dense one is a single element,
    or one a row of a, (M, 1), or a column of b, (1, N), with a batch before it or without.

    Sums of a block, of 128 of K at most, are the tensor cores'; they are multiplied by the block's scale and
    added in float32. The instructions read along K only: a dense factor whose K is not contiguous, in rows at
    multiples of 16 bytes, is copied first, and so are the values where their rows do not run along K
    (w.t() @ x, x @ w).

    The other arguments are those of `bsr_gemm`. out_dtype: bf16 (the default), fp16 or fp32. Compute
    capability 9.0; from 8.9 on where blocks have a multiple of 32 along the summed mode (family "sm80"), in
    which an instruction then has one scale. No gradients. Raises TypeError and ValueError before any launch,
    naming the argument.
    """
    sparse: BsrTensor
    dense: Any
    if type(a) is BsrTensor and type(b) is _Tensor:
        sparse, dense, left = a, b, False
    elif type(b) is BsrTensor and type(a) is _Tensor:
        sparse, dense, left = b, a, True
    else:
        sparse, dense, left = _factors(a, b)
    blocks, other = (scale_b, scale_a) if left else (scale_a, scale_b)
    if check is not False and boolean("check", check):
        sparse.check()
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    extras = (c, bias, residual, blocks, other, *epilogue_args)
    key: Any = None
    usual: tuple[Any, ...] = ()
    values = sparse.values
    if c is bias is residual is None and not epilogue_args and type(dense) is type(values) is _Tensor:
        usual = (dense, values, blocks, other) if out is None else (dense, values, blocks, other, out)
        one: Any = alpha == 1.0
        if alpha.__class__ is not float:
            one = (alpha.__class__, alpha)
        elif not one and not -LARGEST <= alpha <= LARGEST:
            one = alpha
        try:
            key = (
                dense.shape, left, sparse.transposed, out.__class__, one, activation, epilogue, out_dtype,
                family, config,
            )  # fmt: skip
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    if key is not None:
        if beta.__class__ is not float or beta != 1.0 or bias_axis != "n":
            key = (key, bias_axis, beta.__class__, beta)  # without effect: an error
        plan: bsr_plan.Plan | None = call_cache.find(sparse._kept, key, usual)
        if plan is not None and (
            out is None or not overlap.ranges_meet(out, (dense, values, *extras), plan.extents)
        ):
            make = plan.operands
            operands = None if make is None else make((float(alpha), float(beta), *extras))
            try:
                return plan.run(values, dense, out, operands)
            except ValueError:
                call_cache.look_at_addresses(sparse._kept, key)
    options: dict[str, Any] = {
        "c": c, "bias": bias, "bias_axis": bias_axis, "residual": residual, "alpha": alpha, "beta": beta,
        "activation": activation, "epilogue": epilogue, "epilogue_args": epilogue_args,
        "out_dtype": out_dtype, "scales": (blocks, other),
    }  # fmt: skip
    return bsr.first_call(_dispatched, sparse, dense, left, out, (family, config), options, (key, usual))


def _dispatched(*call: Any) -> torch.Tensor:
    from kernels_dsl.ops.bsr import scaled_register

    return scaled_register.call(*call)


def _factors(a: Any, b: Any) -> tuple[BsrTensor, torch.Tensor, bool]:
    """(sparse, dense, whether the dense one is on the left)."""
    sparse = [isinstance(x, BsrTensor) for x in (a, b)]
    if sum(sparse) != 1:
        raise TypeError(f"a and b are {type(a).__name__} and {type(b).__name__}, one must be a BsrTensor")
    return (b, a, True) if sparse[1] else (a, b, False)


def bsr_scaled_supports(
    a: BsrTensor | torch.Tensor,
    b: BsrTensor | torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    config: BsrConfig | None = None,
    family: str | None = None,
    out: torch.Tensor | None = None,
    **arguments: Any,
) -> str | None:
    """Why `bsr_scaled_gemm` with these arguments cannot run here; None if it can. Compiles nothing."""
    try:
        boolean("check", arguments.pop("check", False))
        bsr.check_names("bsr_scaled_gemm", arguments)
        sparse, dense, left = _factors(a, b)
        scales = (scale_b, scale_a) if left else (scale_a, scale_b)
        bsr.new_plan(sparse, dense, left, out, (family, config), {"scales": scales, **arguments})
    except (TypeError, ValueError) as error:
        return str(error)
    return None
