"""`bsr_scaled_gemm`: block-sparse products of fp8 factors, with a scale a kept block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.ops import overlap
from kernels_dsl.ops.bsr import plan as bsr_plan
from kernels_dsl.ops.bsr.bsr import _check_overlap, _pattern
from kernels_dsl.ops.bsr.plan import BsrConfig
from kernels_dsl.ops.bsr.tensor import BsrTensor
from kernels_dsl.ops.plain import plain, signature
from kernels_dsl.ops.target import target_of

_MAX_PLANS = 256  # of one matrix
_Tensor = torch.Tensor
_STRIDED = torch.strided
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack


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
    if check:
        sparse.check()
    extras = (c, bias, residual, blocks, other, *epilogue_args)
    options = (alpha, beta, bias_axis, activation, epilogue, out_dtype)
    key: Any = None
    if c is bias is residual is None and not epilogue_args:
        key = _short_key((sparse, dense, blocks, other), out, (left, options, config, family))
        plan = sparse._kept.get(key)
        if plan is not None and (
            out is None or not overlap.ranges_meet(out, (dense, sparse.values, *extras), plan.extents)
        ):
            make = plan.operands
            operands = None if make is None else make((float(alpha), float(beta), *extras))
            return plan.run(sparse.values, dense, out, operands)
    values = (sparse.values, dense, out, *extras)
    if _is_compiling() or _dispatch_modes() or _functorch_level() is not None or not plain(values):
        from kernels_dsl.ops.bsr import scaled_register as bsr_scaled_register

        return bsr_scaled_register.call(sparse, dense, left, extras, options, out, (config, family))
    return run_direct(sparse, dense, left, extras, options, out, (config, family), key)


def _short_key(factors: tuple[Any, ...], out: Any, rest: tuple[Any, ...]) -> Any:
    """What finds the plan of a call with no other tensors; None where it must go the long way.

    `factors`: the sparse one, the dense one, and their scales.
    """
    sparse, dense, blocks, other = factors
    values = sparse.values
    if (
        not type(dense) is type(values) is type(blocks) is type(other) is _Tensor
        or not dense.layout is blocks.layout is other.layout is _STRIDED
        or not (out is None or (type(out) is _Tensor and out.layout is _STRIDED))
        or _is_compiling()
        or _dispatch_modes()
        or _functorch_level() is not None
        or not plain((values, dense, blocks, other, out))
    ):
        return None
    return (
        dense.dtype, dense.shape, dense.stride(), dense.data_ptr() & 15, dense.get_device(),
        blocks.dtype, blocks.shape, blocks.stride(), blocks.data_ptr() & 15, blocks.get_device(),
        other.dtype, other.shape, other.stride(), other.data_ptr() & 15, other.get_device(),
        sparse.transposed, rest, out if out is None else signature(out),
    )  # fmt: skip


def run_direct(
    sparse: BsrTensor,
    dense: torch.Tensor,
    left: bool,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    forced: tuple[BsrConfig | None, str | None],
    key: Any = None,
) -> torch.Tensor:
    """`bsr_scaled_gemm` past the dispatcher; `key`: that of the plan, None to make it here.

    `extras`: c, bias, residual, scales of the blocks and of the dense factor, the epilogue's arguments;
    `options`: alpha, beta, bias_axis, activation, epilogue, out_dtype; `forced`: configuration, family.
    """
    config, family = forced
    if key is None:
        signatures = (*map(signature, (sparse.values, dense, out)), *map(signature, extras))
        key = ("scaled", left, sparse.transposed, options, forced, signatures)
    plan = sparse._kept.get(key)
    if plan is None:
        call = described(sparse, dense, left, extras, options, out)
        overlap.check_self_overlap(out)
        target = target_of(dense)
        plan = bsr_plan.build(
            call, dense, out, target, _pattern(sparse), config=config, family=family, extras=extras
        )
        if not target.emulated:  # the emulator may be another one next time
            if len(sparse._kept) >= _MAX_PLANS:
                sparse._kept.clear()
            sparse._kept[key] = plan
    if out is not None and overlap.ranges_meet(out, (dense, sparse.values, *extras), plan.extents):
        scales = ("scale_b", "scale_a") if left else ("scale_a", "scale_b")
        factor = "a" if left else "b"
        named = {factor: dense, "the values": sparse.values}
        named.update(zip(("c", "bias", "residual", *scales), extras))
        named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(extras[5:]))
        _check_overlap(out, named, (factor, "the values", *scales))
    make = plan.operands
    operands = None if make is None else make((float(options[0]), float(options[1]), *extras))
    return plan.run(sparse.values, dense, out, operands)


def described(
    sparse: BsrTensor,
    dense: torch.Tensor,
    left: bool,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
) -> bsr_plan.BsrCall:
    """The checked call; arguments as those of `run_direct`."""
    c, bias, residual, blocks, other, *epilogue_args = extras
    alpha, beta, bias_axis, activation, epilogue, out_dtype = options
    return bsr_plan.describe(
        sparse, dense, left, out=out, out_dtype=out_dtype, scales=(blocks, other), c=c, bias=bias,
        bias_axis=bias_axis, residual=residual, alpha=alpha, beta=beta, activation=activation,
        epilogue=epilogue, epilogue_args=epilogue_args,
    )  # fmt: skip


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
    arguments.pop("check", None)
    try:
        sparse, dense, left = _factors(a, b)
        scales = (scale_b, scale_a) if left else (scale_a, scale_b)
        call = bsr_plan.describe(sparse, dense, left, out=out, scales=scales, **arguments)
        overlap.check_self_overlap(out)
        pattern = _pattern(sparse)
        bsr_plan.build(call, dense, out, target_of(dense), pattern, config=config, family=family)
    except (TypeError, ValueError) as error:
        return str(error)
    return None
