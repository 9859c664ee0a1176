"""Attention of packed queries to a cache of pages, by the kernel that suits their number."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.config.decode import MAX_ROWS
from kernels_dsl.ops.attention.attention import attention_varlen
from kernels_dsl.ops.serving.decode import attention_decode
from kernels_dsl.ops.serving.scales import FP8


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    block_table: torch.Tensor,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """`attention_decode` or `attention_varlen` of q (T, H, D), with the arguments that both have.

    k_cache, v_cache: (pages, keys of a page, Hk, D); `seqused_k` is among the options. `attention_varlen`
    takes a batch in which some sequence has more than 64 rows of a KV head, unless the cache is fp8, which it
    does not read. max_seqlen_k: no sequence has more keys; it then sees no more of the table, and needs less
    memory. batch_invariant: it takes none, so that the kernel, and with it the bits of a sequence, do not
    depend on the other sequences.

    Gives out (T, H, D), with `return_lse` and the log-sum-exp (H, T).
    """
    rows = max_seqlen_q * (q.shape[1] // max(k_cache.shape[2], 1))
    if rows > MAX_ROWS and not batch_invariant and k_cache.dtype != FP8:
        if max_seqlen_k is not None:
            block_table = block_table[:, : -(-max_seqlen_k // k_cache.shape[1])]
        return attention_varlen(
            q, k_cache, v_cache, cu_seqlens_q, None, max_seqlen_q, block_table=block_table, **options
        )
    return attention_decode(
        q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, block_table=block_table,
        k_scale=k_scale, v_scale=v_scale, **options,
    )  # fmt: skip
