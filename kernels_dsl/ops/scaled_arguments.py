"""What a call of `scaled_gemm` asks for: `gemm_arguments` with fp8 operands and their scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue_fns import ScaledEpilogue
from kernels_dsl.ops.gemm_arguments import (
    FP8_DTYPES,
    GemmCall,
    OperandSpec,
    batch_of,
    check_device,
    check_dtype,
    check_extents,
    check_matrices,
    check_out,
    check_tensor,
    describe_epilogue,
)

SCALES = 2
"""What `scaled_gemm` has beyond the arguments of `gemm`, in the order of `OperandSpec.index`: the scales."""


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    **epilogue: Any,
) -> GemmCall:
    """Check the arguments of `scaled_gemm` and say what they ask for. TypeError or ValueError says what is
    wrong."""
    check_matrices(a, b, FP8_DTYPES, mixed=True)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    check_extents(m, n, k)
    batch = batch_of(a, b)
    d_shape = (m, n) if batch is None else (batch, m, n)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        check_tensor(name, scale)
        check_dtype(name, scale.dtype, (torch.float32,))
        check_device(name, scale, a.device)
    if not use_fast_accum:
        raise ValueError("use_fast_accum is False, must be True: partial sums are not promoted yet")
    scales = (_scale_spec("scale_a", 0, scale_a, m, batch), _scale_spec("scale_b", 1, scale_b, n, batch))
    inner, operands = describe_epilogue(d_shape, a.device, **epilogue)
    shifted = tuple(replace(x, index=x.index + SCALES) if x.source == "args" else x for x in operands)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if out is None else out.dtype
    check_dtype("out" if out is not None else "out_dtype", out_dtype)
    function = ScaledEpilogue(inner, SCALES)
    call = GemmCall(m, n, k, batch, a.dtype, out_dtype, function, (*scales, *shifted))
    if out is not None:
        check_out(out, call, a.device)
    return call


def _scale_spec(name: str, index: int, scale: torch.Tensor, extent: int, batch: int | None) -> OperandSpec:
    """The scale as an operand of the epilogue: its own modes, those of size 1 among them."""
    shape = tuple(scale.shape)
    mode, wanted = ("m", (extent, 1)) if name == "scale_a" else ("n", (1, extent))
    if len(shape) == 0:
        return OperandSpec("args", "1", index, expand=(1,))
    if scale.numel() == 1:
        return OperandSpec("args", "1" * len(shape), index)
    if _fits(shape[-2:], (wanted, (1, 1))) and (len(shape) == 2 or _fits(shape[:-2], ((1,), (batch,)))):
        letters = "m1" if mode == "m" else "1n"
        modes = letters if shape[-2:] == wanted else "11"
        return OperandSpec(
            "args", modes if len(shape) == 2 else ("1" if shape[0] == 1 else "l") + modes, index
        )
    lead = "" if batch is None else f", with a batch of {batch} before it or without"
    raise ValueError(
        f"{name} has shape {shape}, must be one element, or {wanted} for a scale a "
        f"{'row' if mode == 'm' else 'column'}{lead}"
    )


def _fits(shape: Sequence[int], choices: Sequence[tuple[int | None, ...]]) -> bool:
    return tuple(shape) in choices
