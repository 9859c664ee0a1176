"""The sampled product as an operation."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks.eager_path import check_tensor
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.bsr.arguments import MatrixArguments
from kernels_dsl.ops.bsr.matrix_operation import MatrixOperation
from kernels_dsl.ops.bsr.sampled_plan import build_sampled
from kernels_dsl.ops.gemm.arguments import INPUT_DTYPES, check_device, check_dtype
from kernels_dsl.sparse.tensor import BsrTensor
from lowering.records import frozen


@frozen
class SampledArguments(MatrixArguments):
    """The arguments of `bsr_sddmm`, of a pattern that is not transposed."""

    crow: torch.Tensor
    col: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    shape: tuple[int, int]
    block: tuple[int, int]
    alpha: float = 1.0
    out_dtype: torch.dtype | None = None
    matrix: BsrTensor | None = None

    outputs = ()


@frozen
class SampledCall:
    """A checked call of `bsr_sddmm`: values of `d_shape` and `d_dtype`."""

    d_shape: tuple[int, ...]
    d_dtype: torch.dtype


def describe_sampled(call: SampledArguments) -> SampledCall:
    """Check a sampled product; TypeError or ValueError says what is wrong."""
    dtype = call.out_dtype or call.a.dtype
    batch = check_sampled(call.a, call.b, call.shape, call.block, dtype)
    return SampledCall((*([] if batch is None else [batch]), call.col.shape[0], *call.block), dtype)


def check_sampled(
    a: torch.Tensor, b: torch.Tensor, shape: tuple[int, int], block: tuple[int, int], out_dtype: torch.dtype
) -> int | None:
    """Check the factors of a sampled product and return its batch, None for none."""
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x)
        check_dtype(name, x.dtype, (torch.bfloat16, torch.float16))
        if x.dim() not in (2, 3):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must have two modes, or three with a batch")
    if a.dtype != b.dtype:
        raise TypeError(f"b has dtype {b.dtype}, must be a's dtype, {a.dtype}")
    check_device("b", b, a.device)
    check_dtype("out_dtype", out_dtype, INPUT_DTYPES)
    if (a.shape[-2], b.shape[-1]) != tuple(shape) or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}, must be (M, K) and (K, N) with the "
            f"pattern's M and N, {tuple(shape)}"
        )
    batches = {x.shape[0] for x in (a, b) if x.dim() == 3}
    if len(batches) > 1:
        raise ValueError(f"b has batch {b.shape[0]}, must be a's, {a.shape[0]}")
    return batches.pop() if batches else None


def repeated_sampled(calls: dict[Any, Any], key: Any, factors: tuple[Any, ...], alpha: float) -> Any:
    """The values of a sampled product like an earlier one; None where there was none."""
    return call_cache.served(calls, key, factors, (*factors, None if alpha == 1.0 else (alpha,)))


def _follow_sampled(plan: Any, call: SampledArguments) -> torch.Tensor:
    result: torch.Tensor = plan(call.a, call.b, None if call.alpha == 1.0 else (float(call.alpha),))
    return result


BSR_SDDMM: MatrixOperation[SampledArguments, Any] = MatrixOperation(
    "bsr_sddmm", SampledArguments, describe_sampled, build_sampled, _follow_sampled
)
