"""FlashAttention-2's functions, by its names and in the order of its arguments, on this library's kernels.

A script changes one import: `from kernels_dsl.flash_attn import flash_attn_func`. Meaning of the arguments as
there: causal masks and windows lie at the bottom right, ALiBi subtracts slope · |i + Sk - Sq - j|, a length
of -1 in `window_size` is no limit. Unless `deterministic` is True, which is not the default, the same call
may give gradients of other bits.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks.eager_path import asks_gradients, check_tensor
from kernels_dsl.checks.options import boolean, real
from kernels_dsl.ops.attention.attention import attention, attention_varlen

Window = tuple[int, int]
UNLIMITED: Window = (-1, -1)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (B, Sq, H, D) to k and v (B, Sk, Hk, D): (B, Sq, H, D), see `kernels_dsl.attention`.

    alibi_slopes: float32 (H,) or (B, H). dropout_p must be 0. With `return_attn_probs` a tuple: the output,
    the log-sum-exp (B, H, Sq), and None, as there are no probabilities to return without dropout.
    """
    _check(dropout_p, deterministic, return_attn_probs)
    options = options_of(softmax_scale, causal, window_size, softcap)
    if alibi_slopes is not None:
        shift = check_tensor("k", k).shape[1] - check_tensor("q", q).shape[1]
        slopes = _slopes_of(alibi_slopes, q.shape[0])
        options.update(score_mod=alibi, score_mod_bwd=alibi_bwd, aux=(slopes, shift))
        if asks_gradients((q, k, v)):  # of an operator, whose extra arguments are tensors
            shift = torch.full((q.shape[0],), shift, dtype=torch.int32, device=q.device)
            options.update(score_mod=shifted_alibi, aux=(slopes, shift))
    found = attention(
        q, k, v, return_lse=return_attn_probs, deterministic=deterministic, **options
    )  # fmt: skip
    return (*found, None) if return_attn_probs else found


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """The same of packed sequences, q (Tq, H, D): see `kernels_dsl.attention_varlen`.

    block_table: int32 (sequences, n), the pages of each sequence, where k and v are a cache (pages, keys of a
    page, Hk, D); cu_seqlens_k then gives the lengths alone. Not differentiable. The log-sum-exp is (H, Tq).
    """
    _check(dropout_p, deterministic, return_attn_probs)
    starts_k: torch.Tensor | None = cu_seqlens_k
    used: torch.Tensor | None = None
    if block_table is not None:
        starts_k, used = None, check_tensor("cu_seqlens_k", cu_seqlens_k).diff()
    options = options_of(softmax_scale, causal, window_size, softcap)
    if alibi_slopes is not None:
        slopes = _slopes_of(alibi_slopes, check_tensor("cu_seqlens_q", cu_seqlens_q).shape[0] - 1)
        options.update(
            score_mod=packed_alibi, score_mod_bwd=alibi_bwd, aux=(slopes, cu_seqlens_q, cu_seqlens_k)
        )
    found = attention_varlen(
        q, k, v, cu_seqlens_q, starts_k, max_seqlen_q, max_seqlen_k, seqused_k=used, block_table=block_table,
        return_lse=return_attn_probs, deterministic=deterministic, **options,
    )  # fmt: skip
    return (*found, None) if return_attn_probs else found


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_func` of qkv (B, S, 3, H, D); its other arguments go by name."""
    q, k, v = _parts("qkv", qkv, 5, 3)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, **options)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_func` of q and kv (B, Sk, 2, Hk, D); its other arguments go by name."""
    k, v = _parts("kv", kv, 5, 2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_varlen_func` of qkv (T, 3, H, D); its other arguments go by name."""
    q, k, v = _parts("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, **options,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Any:
    """`flash_attn_varlen_func` of q and kv (Tk, 2, Hk, D); its other arguments go by name."""
    k, v = _parts("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, **options,
    )  # fmt: skip


def _parts(name: str, packed: torch.Tensor, modes: int, count: int) -> tuple[torch.Tensor, ...]:
    """Views of the `count` tensors that lie beside each other, two modes before the head dimension."""
    check_tensor(name, packed)
    if packed.dim() != modes or packed.shape[-3] != count:
        form = "(B, S, {}, H, D)" if modes == 5 else "(T, {}, H, D)"
        raise ValueError(f"{name} has shape {tuple(packed.shape)}, must be {form.format(count)}")
    return packed.unbind(-3)


def _check(dropout_p: Any, deterministic: Any, return_attn_probs: Any) -> None:
    if real("dropout_p", dropout_p) != 0.0:
        raise ValueError(f"dropout_p is {dropout_p}, must be 0: there is no dropout")
    boolean("deterministic", deterministic)
    boolean("return_attn_probs", return_attn_probs)


def options_of(scale: Any, causal: Any, window: Any, softcap: Any) -> dict[str, Any]:
    """The same options by `attention`'s names."""
    unlimited = window is None or tuple(window) in ((-1, -1), (None, None))
    return {"scale": scale, "causal": causal, "window": None if unlimited else window, "softcap": softcap}


def _slopes_of(slopes: Any, batch: int) -> torch.Tensor:
    """The slopes (B, H) of ALiBi; B is the number of sequences where they are packed."""
    check_tensor("alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes has dtype {slopes.dtype}, must be torch.float32")
    if slopes.dim() not in (1, 2) or (slopes.dim() == 2 and slopes.shape[0] != batch):
        raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}, must be (H,) or ({batch}, H)")
    return slopes if slopes.dim() == 2 else slopes.expand(batch, -1)


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, shift: Any) -> Any:
    """The score minus slope · |i + shift - j|."""
    from kernels_dsl.blocks.hw.dsl import choose

    distance = i + shift - j
    return score - slopes[b, h] * choose(distance >= 0, distance, -distance)


def shifted_alibi(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, shift: Any) -> Any:
    """`alibi` with a shift for each sequence."""
    return alibi(score, b, h, i, j, slopes, shift[b])


def alibi_bwd(
    gradient: Any,
    score: Any,
    b: Any,
    h: Any,
    i: Any,
    j: Any,
    slopes: Any,
    starts_q: Any,
    starts_k: Any = None,
) -> Any:
    """The backward function of all three: a number is added to the score."""
    return gradient


def packed_alibi(
    score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, starts_q: Any, starts_k: Any
) -> Any:
    """`alibi` of packed sequences, each of its own shift."""
    shift = starts_k[b + 1] - starts_k[b] - starts_q[b + 1] + starts_q[b]
    return alibi(score, b, h, i, j, slopes, shift)
