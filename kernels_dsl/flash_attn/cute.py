"""FlashAttention-4's functions, by its names and in the order of its arguments, on this library's kernels.

A script changes one import: `from kernels_dsl.flash_attn.cute import flash_attn_func`. An argument that has
no counterpart here must have its default, and is refused by name otherwise. Score and mask functions are
those of `kernels_dsl.attention`, `score_mod(score, b, h, i, j, *aux)`: theirs are of vectors. Unless
`deterministic` is True, which is not the default, the same call may give gradients of other bits.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks.eager_path import check_tensor
from kernels_dsl.checks.options import boolean
from kernels_dsl.ops.attention.attention import attention, attention_varlen
from kernels_dsl.sparse.block_lists import DEFAULT_BLOCK, BlockLists

_Window = tuple[int | None, int | None]
_UNLIMITED: _Window = (None, None)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = _UNLIMITED,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Any:
    """Attention of q (B, Sq, H, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv), see `kernels_dsl.attention`.

    Returns (output, log-sum-exp), the latter None unless `return_lse`, as there. num_splits and pack_gqa are
    hints. block_sparse_tensors: a record with mask_block_cnt, mask_block_idx, full_block_cnt, full_block_idx
    and block_size; block_sparse_tensors_bwd is a hint too.
    """
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    boolean("deterministic", deterministic)
    options = _options(softmax_scale, causal, window_size, softcap)
    found = attention(
        q, k, v, **options, sinks=learnable_sink, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux=_aux(aux_tensors, aux_scalars),
        blocks=_lists(block_sparse_tensors), return_lse=return_lse, deterministic=deterministic,
    )  # fmt: skip
    return found if return_lse else (found, None)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = _UNLIMITED,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Any:
    """The same of packed sequences, q (Tq, H, D): see `kernels_dsl.attention_varlen`.

    cu_seqlens_q and cu_seqlens_k must be given: batches of padded sequences are not supported. With
    page_table, int32 (sequences, n), k and v are a cache of pages, and either cu_seqlens_k or seqused_k gives
    the lengths. Without `max_seqlen_q` none is taken for longer than all of q. Hints: min_seqlen_k,
    num_splits, pack_gqa, scheduler_metadata, disable_scheduler_metadata.
    """
    _refuse(
        qv=qv, seqused_q=seqused_q, gather_kv_indices=gather_kv_indices,
        seqlen_k_per_split=seqlen_k_per_split,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    boolean("deterministic", deterministic)
    if page_table is not None and cu_seqlens_k is not None:
        used = check_tensor("cu_seqlens_k", cu_seqlens_k).diff()
        cu_seqlens_k, seqused_k = None, used if seqused_k is None else seqused_k
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts is None and (name == "cu_seqlens_q" or page_table is None):
            raise ValueError(f"{name} is None, must be given: padded sequences are not supported")
    longest = check_tensor("q", q).shape[0] if max_seqlen_q is None else max_seqlen_q
    options = _options(softmax_scale, causal, window_size, softcap)
    found = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, longest, max_seqlen_k,  # type: ignore[arg-type]
        **options, seqused_k=seqused_k, block_table=page_table, sinks=learnable_sink, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux=_aux(aux_tensors, aux_scalars),
        blocks=_lists(block_sparse_tensors), return_lse=return_lse, deterministic=deterministic,
    )  # fmt: skip
    return found if return_lse else (found, None)


def _refuse(**arguments: Any) -> None:
    """ValueError for an argument that is given and has no counterpart here."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is given, must not be: it is not supported")


def _options(scale: Any, causal: Any, window: Any, softcap: Any) -> dict[str, Any]:
    """The same options by `attention`'s names."""
    return {"scale": scale, "causal": causal, "window": _window(window, causal), "softcap": softcap}


def _window(window: _Window | None, causal: Any) -> _Window | None:
    """The window as `attention` means it: -1 is no limit there. To FlashAttention-4 two negative sides are;
    one alone lies beside the diagonal. ValueError for that."""
    if window is None or len(window) != 2:
        return window
    negative = [isinstance(side, int) and side < 0 for side in window]
    if all(negative) or tuple(window) == _UNLIMITED:
        return None
    if negative[0] or (negative[1] and not causal):  # causal, the right side has no say
        side = ("left", "right")[negative.index(True)]
        raise ValueError(
            f"window_size is {window!r}, its {side} must be None, for no limit, or at least 0: a window that "
            "ends beside the diagonal is not supported"
        )
    return window


def _aux(tensors: Any, scalars: Any) -> tuple[Any, ...]:
    """Extra arguments of score and mask functions: tensors, then numbers."""
    return (*(tensors or ()), *(scalars or ()))


def _lists(record: Any) -> BlockLists | None:
    """Block lists, by the fields of FlashAttention-4's record."""
    if record is None or isinstance(record, BlockLists):
        return record
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    for name in names[:2]:
        if not hasattr(record, name):
            raise TypeError(f"block_sparse_tensors is a {type(record).__name__}, must have a field {name}")
    for name in ("cu_total_m_blocks", "cu_block_idx_offsets"):
        if getattr(record, name, None) is not None:
            raise ValueError(f"block_sparse_tensors.{name} is given, must be None: lists must be padded")
    counts, indices, full_counts, full_indices = (getattr(record, name, None) for name in names)
    block = getattr(record, "block_size", None) or DEFAULT_BLOCK
    return BlockLists(counts, indices, full_counts, full_indices, block)
