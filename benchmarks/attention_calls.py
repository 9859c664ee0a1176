"""Inputs of the attention benchmarks, and the calls of this project and its peers on them.

All tensors are (B, S, H, D), N(0, 1). A peer that is not installed raises at its first call, and the harness
leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import DTYPES
from kernels_dsl.measure import Call
from reference import tolerance
from reference.attention import Masking
from reference.attention import attention as reference_attention

DEVICE = "cuda"
CHECKED_ROWS = 128
"""Query rows at each end of a sequence that are compared with float64 before a timing."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: batch, query heads, length of queries and keys, head dimension."""

    batch: int
    heads: int
    length: int
    dim: int
    dtype: str = "bf16"

    def __str__(self) -> str:
        return f"{self.batch},{self.heads},{self.length},{self.dim}"

    def flops(self, pairs: float) -> float:
        """Operations of both products for `pairs` of (query, key) a head."""
        return 4.0 * self.batch * self.heads * self.dim * pairs


def causal_pairs(length: int) -> float:
    """Half of all pairs: how attention benchmarks count causal work."""
    return length * length / 2


def window_pairs(length: int, width: int) -> float:
    """Pairs of a causal window of `width` keys."""
    width = min(width, length)
    return width * (width + 1) / 2 + (length - width) * width


def tensors(shape: Shape, seed: int = 0) -> tuple[Any, Any, Any]:
    """q, k, v."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(seed)
    size = (shape.batch, shape.length, shape.heads, shape.dim)
    kind = getattr(torch, DTYPES[shape.dtype])
    q, k, v = (torch.randn(size, generator=generator, device=DEVICE, dtype=kind) for _ in range(3))
    return q, k, v


def ours(q: Any, k: Any, v: Any, **options: Any) -> Call:
    """`kernels_dsl.attention`, which allocates its output as the peers do."""
    import kernels_dsl

    return lambda _set: kernels_dsl.attention(q, k, v, **options)


def sdpa(q: Any, k: Any, v: Any, backend: str, causal: bool = False) -> Call:
    """PyTorch's attention with one backend, "cudnn" or "fa2" (FlashAttention-2)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[backend]
    views = [x.transpose(1, 2) for x in (q, k, v)]

    def call(_set: int) -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(*views, is_causal=causal)

    return call


def flash4(q: Any, k: Any, v: Any, **options: Any) -> Call:
    """flash-attn-4's `flash_attn_func`."""

    def call(_set: int) -> Any:
        from flash_attn.cute import flash_attn_func

        return flash_attn_func(q, k, v, **options)

    return call


def flash4_lists(q: Any, k: Any, v: Any, counts: Any, indices: Any, block: tuple[int, int]) -> Call:
    """flash-attn-4 on listed blocks, all of them unmasked."""
    import torch

    nothing = torch.zeros_like(counts), torch.zeros_like(indices)

    def call(_set: int) -> Any:
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        lists = BlockSparseTensorsTorch(*nothing, counts, indices, block_size=block)
        return flash_attn_func(q, k, v, block_sparse_tensors=lists)

    return call


def output_of(result: Any) -> Any:
    """The output of a call that may return more than that."""
    return result[0] if isinstance(result, tuple) else result


def verifier(call: Call, q: Any, k: Any, v: Any, masking: Masking) -> Callable[[], None]:
    """Compares the first and last rows of a call's output, of the first and last head, with float64.

    Those of the last sequence, as a run over all rows would take longer than the benchmark.
    """

    def verify() -> None:
        out = output_of(call(0))
        causal, length = masking.right is not None, q.shape[1]
        for head in {0, q.shape[2] - 1}:
            kept = [x[-1:, :, head : head + 1] for x in (q, k, v)]
            for rows in (slice(0, CHECKED_ROWS), slice(max(length - CHECKED_ROWS, 0), length)):
                keys = slice(0, rows.stop if causal else k.shape[1])
                part = (kept[0][:, rows], kept[1][:, keys], kept[2][:, keys])
                compare(out[-1:, rows, head : head + 1], part, masking)

    return verify


def compare(out: Any, part: tuple[Any, Any, Any], masking: Masking) -> None:
    """ToleranceError where `out` is further from float64 than twice what PyTorch in its dtype is."""
    expected, _ = reference_attention(*part, masking)
    peer, _ = reference_attention(*part, masking, dtype=out.dtype)
    tolerance.check(*(x.transpose(1, 2) for x in (out, expected, peer)), ulps=4.0)
