"""`append_kv`: new keys and values into a cache of pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.checked import is_checked
from kernels_dsl.ops.serving.append_operation import APPEND_KV, AppendArguments


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes new keys and values into a cache of pages, in one launch and with nothing read by the host.

    k, v: (T, H, D) or (B, S, H, D), bf16 or fp16, any strides; D may differ. k_cache, v_cache: (pages, tokens
    of a page, H, D) of k's dtype or float8_e4m3fn, any strides: of a cache with heads before tokens, its
    `transpose(1, 2)`. They may be views of one tensor.

    Where the tokens go, one of two:
    slot_mapping: int32 or int64, (T,) or (B, S): page · tokens of a page + place in it. -1 is not written.
    cache_seqlens: int32 (B,), the tokens that each sequence has: token s of sequence b goes to position
    cache_seqlens[b] + s. block_table: int32 (B, n), the pages of each sequence; without it sequence b has
    page b. It is not changed.

    A place outside the cache is not written, nor is a sequence with a length below 0; inside
    `kernels_dsl.checked()` they are errors, as are two tokens in one slot, of which either may be kept.

    k_scale, v_scale: with fp8 caches, float32 (), or (H,) for one a head: k / k_scale is stored, rounded to
    nearest even and saturated. None is 1. fp8 needs compute capability 8.9.

    Not differentiable. Raises TypeError and ValueError that name the argument.
    """
    tensors = (k, v, k_cache, v_cache, slot_mapping, cache_seqlens, block_table, k_scale, v_scale)
    key: Any = None
    present: tuple[Any, ...] = ()
    if type(k) in PLAIN_TYPES and not k.is_nested and not is_checked():
        present = tuple([x for x in tensors if x is not None])
        key = (k.shape, *map(type, tensors))
        plan = call_cache.find(APPEND_KV.calls, key, present)
        if plan is not None and plan.apart(tensors):
            try:
                plan.run(tensors)
                return
            except ValueError as error:
                call_cache.refused(APPEND_KV.calls, key, error)
    APPEND_KV.first(AppendArguments(*tensors), key, present, _operator)


def _operator() -> Callable[[AppendArguments], None]:
    from kernels_dsl.ops.serving import register

    return register.append_kv
