"""The arguments of `scaled_gemm`: those of `gemm` with fp8 operands and their scales."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.blocks.epilogue.functions import ScaledEpilogue
from kernels_dsl.checks import options
from kernels_dsl.checks.eager_path import check_output
from kernels_dsl.config.gemm import MAXIMUM, NUMBER
from kernels_dsl.config.promotion import GROUP, Promotion
from kernels_dsl.ops.gemm.arguments import (
    BLOCK_SCALE,
    FP8_DTYPES,
    INPUT_DTYPES,
    DenseArguments,
    GemmCall,
    OperandSpec,
    batch_of,
    check_device,
    check_dtype,
    check_matrices,
    check_out,
    describe_epilogue,
    extents_of,
    result_dtype,
)
from kernels_dsl.ops.gemm.product import Product
from kernels_dsl.ops.operation import Named
from kernels_dsl.ops.scaled.operand_scale import OperandScale, check_scale
from lowering.records import frozen

OUT_DTYPES = (*INPUT_DTYPES, *FP8_DTYPES)


@frozen
class ScaledArguments(DenseArguments):
    """The arguments of `scaled_gemm`."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    scale_result: torch.Tensor | None = None
    c: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    epilogue_args: tuple[Any, ...] = ()
    alpha: float = 1.0
    beta: float = 1.0
    bias_axis: str = "n"
    activation: str | None = None
    epilogue: Named = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    config: Named = None
    family: str | None = None
    out: torch.Tensor | None = None
    amax: torch.Tensor | None = None

    outputs = ("out", "amax")
    operands = (
        "alpha", "beta", "c", "bias", "residual", "scale_a", "scale_b", "scale_result", "amax",
    )  # fmt: skip


def describe(call: ScaledArguments) -> GemmCall:
    """Check the arguments of `scaled_gemm` and say what they ask for. TypeError or ValueError says what is
    wrong."""
    a, b = call.a, call.b
    check_matrices(a, b, FP8_DTYPES, mixed=True)
    m, n, k = extents_of(a, b)
    batch = batch_of(a, b)
    d_shape = (m, n) if batch is None else (batch, m, n)
    check_scales(call)
    groups = -(-k // GROUP)
    scales, promotion = _scales(
        OperandScale("scale_a", True, tuple(call.scale_a.shape), m, groups, batch),
        OperandScale("scale_b", False, tuple(call.scale_b.shape), n, groups, batch),
    )
    scales, promotion = promoted(scales, promotion, call.use_fast_accum, k)
    epilogue, operands = describe_epilogue(d_shape, a.device, vars(call))
    out_dtype = result_dtype(call.out, call.out_dtype, torch.bfloat16, OUT_DTYPES)
    epilogue, scales = scaled_epilogue(call, epilogue, scales, out_dtype)
    found = GemmCall(
        m, n, k, batch, a.dtype, out_dtype, epilogue, operands=(*scales, *operands), promotion=promotion
    )
    if call.out is not None:
        check_out(call.out, found, a.device)
    return found


def check_scales(call: Any) -> None:
    """TypeError or ValueError where the scales of a and b are no float32 tensors on their device."""
    for name in ("scale_a", "scale_b"):
        check_scale(name, getattr(call, name), call.a.device)


def promoted(
    scales: tuple[OperandSpec, ...], promotion: Promotion | None, use_fast_accum: bool, k: int
) -> tuple[tuple[OperandSpec, ...], Promotion | None]:
    """The scales that a kernel reads, and the promotion of its sums where scales ask for `promotion`."""
    if not fast_sums(use_fast_accum, promotion) and promotion is None and k > GROUP:
        promotion = Promotion()
    return ((), None) if k == 0 and promotion is not None else (scales, promotion)  # of no elements


def scaled_epilogue(
    call: Any, epilogue: Any, scales: tuple[OperandSpec, ...], out_dtype: torch.dtype
) -> tuple[Any, tuple[OperandSpec, ...]]:
    """The epilogue with scales, the result's scale and its largest magnitude around it, and these as operands
    before its own."""
    in_epilogue = sum(spec.modes != BLOCK_SCALE for spec in scales)
    if call.scale_result is not None:
        scales = (*scales, _result_spec(call.scale_result, out_dtype, call.a.device))
    if call.amax is not None:
        scales = (*scales, _amax_spec(call.amax, call.a.device))
    further = call.scale_result is not None, call.amax is not None
    wrapped = in_epilogue or any(further)
    return ScaledEpilogue(epilogue, in_epilogue, *further) if wrapped else epilogue, scales


def fast_sums(use_fast_accum: bool, promotion: Promotion | None) -> bool:
    """`use_fast_accum`; ValueError where scales of 128 elements of K, which it cannot go with, have made
    `promotion` necessary."""
    if options.boolean("use_fast_accum", use_fast_accum) and promotion is not None:
        raise ValueError(
            "use_fast_accum is True, must be False with scales of 128 elements of K: their sums are float32"
        )
    return use_fast_accum


def _result_spec(scale: torch.Tensor, out_dtype: torch.dtype, device: torch.device) -> OperandSpec:
    """The scale of an fp8 result as an operand of the epilogue."""
    check_scale("scale_result", scale, device)
    if out_dtype not in FP8_DTYPES:
        raise ValueError(f"scale_result is given and the result is {out_dtype}, must be fp8 then")
    if scale.numel() != 1:
        raise ValueError(f"scale_result has shape {tuple(scale.shape)}, must be one element")
    return OperandSpec("scale_result", NUMBER)


def _amax_spec(amax: torch.Tensor, device: torch.device) -> OperandSpec:
    """The place for the result's largest magnitude as an operand of the epilogue."""
    check_output("amax", amax)
    check_dtype("amax", amax.dtype, (torch.float32,))
    check_device("amax", amax, device)
    if amax.numel() != 1:
        raise ValueError(f"amax has shape {tuple(amax.shape)}, must be one element")
    return OperandSpec("amax", MAXIMUM)


def _scales(a: OperandScale, b: OperandScale) -> tuple[tuple[OperandSpec, ...], Promotion | None]:
    """The scales as operands, and the promotion that those of 128 elements of K make necessary."""
    plain_a, plain_b = a.broadcast(), b.broadcast()
    if plain_a is not None and plain_b is not None:
        return (plain_a, plain_b), None
    block_a, block_b = a.by_blocks(), b.by_blocks()
    if block_a is not None and block_b is not None:
        return (block_a[0], block_b[0]), Promotion(block_a[1], block_b[1])
    wrong = a if plain_a is None and (block_a is None or plain_b is not None) else b
    raise wrong.error()


SCALED_GEMM = Product("scaled_gemm", ScaledArguments, describe)
