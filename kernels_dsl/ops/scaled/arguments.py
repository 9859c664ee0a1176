"""What a call of `scaled_gemm` asks for: `gemm.arguments` with fp8 operands and their scales."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.functions import ScaledEpilogue
from kernels_dsl.config.gemm import MAXIMUM, NUMBER
from kernels_dsl.config.promotion import GROUP, Promotion
from kernels_dsl.ops import options
from kernels_dsl.ops.eager_path import check_output, check_tensor
from kernels_dsl.ops.gemm.arguments import (
    BLOCK_SCALE,
    FP8_DTYPES,
    INPUT_DTYPES,
    GemmCall,
    OperandSpec,
    batch_of,
    check_device,
    check_dtype,
    check_extents,
    check_matrices,
    check_out,
    describe_epilogue,
    result_dtype,
)
from lowering.records import frozen

OUT_DTYPES = (*INPUT_DTYPES, *FP8_DTYPES)
EXTRAS = 4
"""What `scaled_gemm` has beyond the arguments of `gemm`: the scales of a, b and the result, and the place for
the result's largest magnitude, which have these numbers as their `OperandSpec.index`."""


@frozen
class _Operand:
    """One operand and its scale: `extent` rows (of a) or columns (of b), `groups` of 128 along K."""

    name: str
    index: int
    shape: tuple[int, ...]
    extent: int
    groups: int
    batch: int | None

    def _oriented(self, along: int, across: int) -> tuple[int, int]:
        return (along, across) if self.index == 0 else (across, along)

    @property
    def _has_fitting_batch(self) -> bool:
        lead = self.shape[:-2]
        return len(self.shape) >= 2 and lead in ((), (1,), (self.batch,))

    def broadcast(self) -> OperandSpec | None:
        """The scale as an operand of the epilogue, by its own modes; None where it is none."""
        rank, wanted = len(self.shape), self._oriented(self.extent, 1)
        if math.prod(self.shape) == 1:
            return OperandSpec("args", NUMBER, self.index)
        if not self._has_fitting_batch or self.shape[-2:] not in (wanted, (1, 1)):
            return None
        modes = "11" if self.shape[-2:] == (1, 1) else ("m1", "1n")[self.index]
        lead = "" if rank == 2 else "1" if self.shape[0] == 1 else "l"
        return OperandSpec("args", lead + modes, self.index)

    def by_blocks(self) -> tuple[OperandSpec, int] | None:
        """The scale as one of 128 elements of K, and of how many rows; None where it is none."""
        if not self._has_fitting_batch:
            return None
        for rows in (1, GROUP):
            if self.shape[-2:] == self._oriented(-(-self.extent // rows), self.groups):
                count = 1 if self.batch is None else self.batch
                one_for_all = len(self.shape) == 3 and self.shape[0] == 1 != count
                expand = (count, *self.shape[1:]) if one_for_all else None
                return OperandSpec("args", BLOCK_SCALE, self.index, expand=expand), rows
        return None

    def error(self) -> ValueError:
        """What the scale must be."""
        single, block, large = (
            self._oriented(*pair)
            for pair in (
                (self.extent, 1),
                (self.extent, self.groups),
                (-(-self.extent // GROUP), self.groups),
            )
        )
        lead = "" if self.batch is None else f", with a batch of {self.batch} before it or without"
        return ValueError(
            f"{self.name} has shape {self.shape}, must be one element, {single} for a scale a "
            f"{'row' if self.index == 0 else 'column'}, or for 128 elements of K {block} or {large}, both "
            f"scales then{lead}"
        )


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    scale_result: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
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
    groups = -(-k // GROUP)
    scales, promotion = _scales(
        _Operand("scale_a", 0, tuple(scale_a.shape), m, groups, batch),
        _Operand("scale_b", 1, tuple(scale_b.shape), n, groups, batch),
    )
    if not fast_sums(use_fast_accum, promotion) and promotion is None and k > GROUP:
        promotion = Promotion()
    if k == 0 and promotion is not None:
        scales, promotion = (), None  # scales of no elements
    inner, operands = describe_epilogue(d_shape, a.device, **epilogue)
    shifted = tuple(replace(x, index=x.index + EXTRAS) if x.source == "args" else x for x in operands)
    out_dtype = result_dtype(out, out_dtype, torch.bfloat16, OUT_DTYPES)
    in_epilogue = sum(spec.modes != BLOCK_SCALE for spec in scales)
    if scale_result is not None:
        scales = (*scales, result_spec(scale_result, out_dtype, a.device))
    if amax is not None:
        scales = (*scales, amax_spec(amax, a.device, EXTRAS - 1))
    further = scale_result is not None, amax is not None
    function = ScaledEpilogue(inner, in_epilogue, *further) if in_epilogue or any(further) else inner
    call = GemmCall(
        m, n, k, batch, a.dtype, out_dtype, epilogue=function, operands=(*scales, *shifted),
        promotion=promotion,
    )  # fmt: skip
    if out is not None:
        check_out(out, call, a.device)
    return call


def fast_sums(use_fast_accum: bool, promotion: Promotion | None) -> bool:
    """`use_fast_accum`; ValueError where scales of 128 elements of K, which it cannot go with, have made
    `promotion` necessary."""
    if options.boolean("use_fast_accum", use_fast_accum) and promotion is not None:
        raise ValueError(
            "use_fast_accum is True, must be False with scales of 128 elements of K: their sums are float32"
        )
    return use_fast_accum


def result_spec(scale: torch.Tensor, out_dtype: torch.dtype, device: torch.device) -> OperandSpec:
    """The scale of an fp8 result as an operand of the epilogue."""
    check_tensor("scale_result", scale)
    check_dtype("scale_result", scale.dtype, (torch.float32,))
    check_device("scale_result", scale, device)
    if out_dtype not in FP8_DTYPES:
        raise ValueError(f"scale_result is given and the result is {out_dtype}, must be fp8 then")
    if scale.numel() != 1:
        raise ValueError(f"scale_result has shape {tuple(scale.shape)}, must be one element")
    return OperandSpec("args", NUMBER, 2)


def amax_spec(amax: torch.Tensor, device: torch.device, index: int) -> OperandSpec:
    """The place for the result's largest magnitude as an operand of the epilogue, number `index`."""
    check_output("amax", amax)
    check_dtype("amax", amax.dtype, (torch.float32,))
    check_device("amax", amax, device)
    if amax.numel() != 1:
        raise ValueError(f"amax has shape {tuple(amax.shape)}, must be one element")
    return OperandSpec("args", MAXIMUM, index)


def _scales(a: _Operand, b: _Operand) -> tuple[tuple[OperandSpec, ...], Promotion | None]:
    """The scales as operands, and the promotion that those of 128 elements of K make necessary."""
    plain_a, plain_b = a.broadcast(), b.broadcast()
    if plain_a is not None and plain_b is not None:
        return (plain_a, plain_b), None
    block_a, block_b = a.by_blocks(), b.by_blocks()
    if block_a is not None and block_b is not None:
        return (block_a[0], block_b[0]), Promotion(block_a[1], block_b[1])
    wrong = a if plain_a is None and (block_a is None or plain_b is not None) else b
    raise wrong.error()
