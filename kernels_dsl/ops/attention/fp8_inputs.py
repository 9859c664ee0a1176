"""From bf16 or fp16 Q, K and V to the arguments of `attention_fp8`: quantisation, and rotations before it."""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels_dsl.checks.eager_path import check_tensor, refuse_forward_mode, watched
from kernels_dsl.checks.options import boolean
from kernels_dsl.config.attention import DESCALE_KEYS
from kernels_dsl.ops.quantize.quantize import quantize
from kernels_dsl.ops.quantize.together import quantize_matrices
from kernels_dsl.ops.tracing import constant_result

INPUT_DTYPES = (torch.bfloat16, torch.float16)
SCALINGS = ("head", "block")


def quantize_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, rotate: bool = False, scaling: str = "head"
) -> dict[str, torch.Tensor]:
    """The tensor arguments of `attention_fp8`, by name, for q, k, v (B, S, H, D), bf16 or fp16.

    scaling: "head", one scale for each head of each batch, or "block", one for every 128 keys of K and V. The
    latter takes D up to 128, or a number of keys that is a multiple of 128.

    With `rotate`, Q and K are multiplied by an orthogonal matrix along the head dimension first, which leaves
    Q Kᵀ as it is and spreads single large elements over their rows: a Hadamard matrix with random signs, as
    FlashAttention-3's 'incoherent processing' (Shah et al., 2024). V is not rotated. What it is worth depends
    on the data (docs/attention_fp8.md): e4m3 is floating point, so that large elements do not cost the small
    ones their digits, as they would with int8.

    The rotation is rounded to the inputs' dtype. Use: `attention_fp8(**quantize_qkv(q, k, v), causal=True)`.
    No gradients. Raises TypeError and ValueError as `quantize` does, and for tensors without four modes.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} is {x.dtype}, must be torch.bfloat16 or torch.float16")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must have 4 modes")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, must be on {q.device} like q")
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}, must be one of {SCALINGS}")
    refuse_forward_mode("quantize_qkv", {"q": q, "k": k, "v": v})
    if boolean("rotate", rotate):
        first, second = rotations(q.shape[-1], q.dtype, q.device)
        q, k = q @ first, k @ second
    if scaling == "block":
        pairs = [quantize(q.transpose(1, 2), scaling="matrix"), _by_block("k", k), _by_block("v", v)]
    else:
        pairs = quantize_matrices(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    found = {}
    for name, (values, scale) in zip("qkv", pairs):
        found[name], found[f"{name}_descale"] = values.transpose(1, 2), scale
    return found


def _by_block(name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values (B, H, S, D) and scales (B, H, blocks, 1) of x (B, S, H, D), one for every DESCALE_KEYS rows."""
    x = x.transpose(1, 2)
    if x.shape[-1] <= DESCALE_KEYS:
        return quantize(x, scaling="128x128")
    if x.shape[2] % DESCALE_KEYS:
        raise ValueError(
            f"{name} has {x.shape[2]} keys, must have a multiple of {DESCALE_KEYS} with head dimension "
            f"{x.shape[-1]} and scaling 'block'"
        )
    values, scale = quantize(x.unflatten(2, (-1, DESCALE_KEYS)), scaling="matrix")
    return values.flatten(2, 3), scale[..., 0]


@constant_result
def rotations(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(D, D) matrices for Q and K whose product with each other's transpose is the identity, exactly.

    Block-diagonal: Hadamard matrices as large as the largest power of two that divides D, rows with random
    signs, always the same ones. All elements are 0 or powers of two, divided so between the two that they
    are exact in any dtype.
    """
    if watched():  # what a mode or a transform makes is not for other calls
        return _rotations(dim, dtype, device)
    return _kept_rotations(dim, dtype, device)


def _rotations(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    size = dim & -dim
    with torch.inference_mode(False):
        block = torch.ones(1, 1)
        while block.shape[0] < size:
            block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
        signs = torch.randint(0, 2, (dim, 1), generator=torch.Generator().manual_seed(dim)) * 2 - 1
        matrix = signs * torch.block_diag(*[block] * (dim // size))
        half = (size.bit_length() - 1) // 2
        first, second = matrix * 2.0**-half, matrix * (2.0**half / size)
        return first.to(device, dtype), second.to(device, dtype)


_kept_rotations = lru_cache(maxsize=64)(_rotations)
