"""GEMM as plainly as it can be said: D = activation(alpha · A @ B + beta · C + bias) + residual.

`gemm` is the float64 reference, `gemm_same_dtype` what PyTorch makes of the same inputs in their own dtype
(float32: as tf32), which the tolerance rule measures against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS

_STEP = 8  # products of 16-bit operands that tensor cores of sm_80 add at a time; those of sm_90 add more
_TF32_DROPPED_BITS = 13  # tf32 keeps 10 of float32's 23 mantissa bits


def activation_function(name: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation of that name, as PyTorch's definition in the library's table; None: identity."""
    if name is None:
        return lambda x: x
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}, must be None or one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name].exact


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 values rounded to tf32 (10 mantissa bits), to nearest, ties away as `cvt.rna` does."""
    if x.dtype != torch.float32:
        raise ValueError(f"x has dtype {x.dtype}, must be torch.float32")
    half = 1 << (_TF32_DROPPED_BITS - 1)
    mask = -(1 << _TF32_DROPPED_BITS)
    rounded = ((x.contiguous().view(torch.int32) + half) & mask).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


class _Tf32Matmul(torch.autograd.Function):
    """a @ b of operands rounded to tf32, and gradients that are such products themselves."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _tf32_product(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        d_a, d_b = _tf32_product(gradient, b.mT), _tf32_product(a.mT, gradient)
        return d_a.sum_to_size(a.shape), d_b.sum_to_size(b.shape)


def _tf32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _float32_matmul(round_to_tf32(a), round_to_tf32(b))


def _float32_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in full float32, whatever the process allows cuBLAS to do."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return torch.matmul(a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def finish(
    product: torch.Tensor,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str | None,
) -> torch.Tensor:
    """The epilogue, in the dtype of `product`."""
    dtype = product.dtype
    value = product * alpha if alpha != 1.0 else product
    if c is not None and beta != 0.0:
        value = value + beta * c.to(dtype)
    if bias is not None:
        value = value + bias.to(dtype)
    value = activation_function(activation)(value)
    if residual is not None:
        value = value + residual.to(dtype)
    return value


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(alpha · a @ b + beta · c + bias) + residual in float64.

    a: (…, M, K), b: (…, K, N), batch modes broadcast. c, bias, residual: anything that broadcasts to
    (…, M, N), so a bias a column is (N,) and a bias a row is (M, 1). beta counts only where c is given; with
    beta 0 c is not read. K = 0 gives a product of zeros. Returns (…, M, N), float64.
    """
    return finish(torch.matmul(a.double(), b.double()), c, bias, residual, alpha, beta, activation)


def gemm_same_dtype(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tf32: bool = True,
) -> torch.Tensor:
    """The same by PyTorch's own operations in the inputs' dtype, as `gemm` is in float64.

    out_dtype (default the inputs'): where it differs from the inputs', the product comes in float32, since
    rounding it to the inputs' dtype would make too generous a yardstick for a wider output. On a GPU the
    products of 16-bit operands are cuBLAS's, with the tensor cores' rounding of partial sums; on a CPU
    float32 sums of the same operands stand in.

    tf32: float32 operands are rounded to tf32, to nearest, and summed in float32, on a GPU too, in the
    gradients too. cuBLAS, when allowed to use tf32, does so for some shapes and alignments only and computes
    in full float32 elsewhere: it would be another yardstick from case to case.
    """
    if a.dtype != b.dtype:
        raise ValueError(f"a has dtype {a.dtype} and b {b.dtype}, must be the same")
    out_dtype = a.dtype if out_dtype is None else out_dtype
    if a.dtype == torch.float32:
        product = _Tf32Matmul.apply(a, b) if tf32 else _float32_matmul(a, b)
    elif out_dtype == a.dtype:
        product = torch.matmul(a, b)
    else:
        product = _widening_matmul(a, b)
    return finish(product, c, bias, residual, alpha, beta, activation).to(out_dtype)


def tensor_core_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of 16-bit operands as tensor cores add, one K step of 8 after the other, in float32.

    Each step's products are summed exactly and added to the running sum, of which what float32 does not hold
    is cut off: tensor cores truncate. A kernel whose result is wider than its operands shows that error. It
    grows with K; cuBLAS shows it for some shapes, for others it splits K among more sums.
    """
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = torch.zeros(shape, dtype=torch.float64, device=a.device)
    for start in range(0, a.shape[-1], _STEP):
        step = slice(start, start + _STEP)
        total = _truncated(total + a[..., step].double() @ b[..., step, :].double())
    return total.float()


def _truncated(x: torch.Tensor) -> torch.Tensor:
    """float64 values cut to what float32 holds, toward 0."""
    nearest = x.float()
    beyond = nearest.double().abs() > x.abs()
    return torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest).double()


def _widening_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of 16-bit operands, the product in float32."""
    if not a.is_cuda or a.numel() == 0 or b.numel() == 0:
        return torch.matmul(a.float(), b.float())
    if a.dim() == b.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a3, b3 = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    return torch.bmm(a3, b3, out_dtype=torch.float32).reshape(*batch, a.shape[-2], b.shape[-1])
