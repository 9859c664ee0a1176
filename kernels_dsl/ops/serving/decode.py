"""`attention_decode`: attention of few queries to many keys in a cache, dense or in pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.attention.arguments import checked_scalars, widths_of
from kernels_dsl.ops.checked import is_checked
from kernels_dsl.ops.serving.decode_operation import ATTENTION_DECODE, DecodeArguments, Decoded


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    window: Sequence[int | None] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    decode_equals_prefill: bool = False,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Decoded:
    """softmax(scale q Kᵀ) V of the last Sq queries of each sequence, keys and values in a cache.

    q: (B, Sq, H, D), bf16 or fp16, D a multiple of 8 up to 256. The result is like it; with `return_lse` it
    is (out, lse), the log-sum-exp (B, H, Sq) float32. K and V are read again for each 64 rows of a KV head,
    Sq · H / KV heads: with many more use `attention`.
    cu_seqlens_q: int32 (B + 1,), rising from 0: q is (T, H, D), and sequence b has queries cu_seqlens_q[b] to
    cu_seqlens_q[b + 1], none perhaps. lse is (H, T) then. Queries past the last sequence's get 0, and K and V
    are read again for each 16 rows.
    max_seqlen_q: no sequence has more queries, else what is beyond is NaN; None: T. Partial results take less
    memory where it is small; it has no part in the bits.
    k_cache, v_cache: of q's dtype or float8_e4m3fn, (B, keys, KV heads, D), or with block_table (pages, keys
    of a page, KV heads, D); strides multiples of 16 bytes. Of a cache with heads before keys, give its
    `transpose(1, 2)`.
    seqused_k: int32 (B,), the keys of each sequence; None: all (not with block_table). Read by the GPU alone.
    block_table: int32 (B, n), the pages of each sequence. Entries past its keys are not read, nor are those
    before every query's window; keys there may hold NaN.
    k_scale, v_scale: with fp8 caches, float32 (), (KV heads,) or (B, KV heads): what is stored times this is
    the key or the value, as in `append_kv`. None is 1. fp8 needs compute capability 8.9, D a multiple of 16.

    causal, window, softcap, sinks, scale: as those of `attention`; the last query lies on the last key.
    A sequence's result has the same bits whatever the batch, the room in the cache and where its pages lie.
    decode_equals_prefill: a query's result has the same bits, too, however many queries of its sequence come
    with it and whatever keys follow its own: tokens that were decoded one by one can be scored again
    together. Needs causal=True. Partial results take memory for each 512 keys of room, for each query.

    A length is taken as within the cache, and cu_seqlens_q as within q; inside `kernels_dsl.checked()` one
    outside is an error, as is such a page. Not differentiable. Raises TypeError and ValueError that name the
    argument.
    """
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    window = window if window is None else _pair(window)
    options = causal, window, softcap, scale, max_seqlen_q, decode_equals_prefill
    key: Any = None
    present: tuple[Any, ...] = ()
    if sinks is k_scale is v_scale is cu_seqlens_q is out is None and return_lse is False:
        if seqused_k is not None and block_table is not None:
            present = q, k_cache, v_cache, seqused_k, block_table
            key, output = repeated(present, options)
            if output is not None:
                return output
    inputs = (q, k_cache, v_cache, seqused_k, block_table, sinks, k_scale, v_scale, cu_seqlens_q)
    if not present and _may_be_kept(q):
        present = tuple([x for x in (*inputs, out) if x is not None])
        key = (q.shape, tuple([x is None for x in (*inputs[3:], out)]), options, return_lse)
        plan = call_cache.find(ATTENTION_DECODE.calls, key, present)
        if plan is not None and plan.apart(inputs, out):
            try:
                result: Decoded = plan.run((*inputs, out))
                return result if return_lse else result.out
            except ValueError as error:
                call_cache.refused(ATTENTION_DECODE.calls, key, error)
    left, right = (None, None) if window is None else window
    call = DecodeArguments(
        *inputs, causal=causal, window_left=left, window_right=right, softcap=softcap, scale=scale,
        max_seqlen_q=max_seqlen_q, decode_equals_prefill=decode_equals_prefill, return_lse=return_lse,
        out=out,
    )  # fmt: skip
    decoded: Decoded = ATTENTION_DECODE.first(call, key, present, _operator)
    return decoded if return_lse else decoded.out


def repeated(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, torch.Tensor | None]:
    """The key of a call of (q, k_cache, v_cache, seqused_k, block_table) alone, None where a first call must
    look at it; and the output, if it is like an earlier one.

    options: causal, window, softcap, scale, max_seqlen_q, decode_equals_prefill.
    """
    q = tensors[0]
    if not _may_be_kept(q):
        return None, None
    key = q.shape, options
    plan = call_cache.find(ATTENTION_DECODE.calls, key, tensors)
    if plan is None:
        return key, None
    try:
        if plan.bare is not None:
            return key, plan.bare(*tensors)
        return key, plan.run((*tensors, None, None, None, None, None)).out
    except ValueError as error:
        call_cache.refused(ATTENTION_DECODE.calls, key, error)
    return key, None


def _may_be_kept(q: Any) -> bool:
    """True if the call cache may have calls with such a q."""
    return type(q) in PLAIN_TYPES and not q.is_nested and not is_checked()


def attention_decode_supports(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any
) -> str | None:
    """Says why `attention_decode` cannot run with these arguments; None if it can. Compiles nothing."""
    try:
        window = options.pop("window", None)
        left, right = (None, None) if window is None else _pair(window)
        for name in ("window_left", "window_right"):
            if name in options:
                raise TypeError(f"{name} is given, must not: attention_decode has no such argument")
    except (TypeError, ValueError) as error:
        return str(error)
    return ATTENTION_DECODE.why_not(
        q=q, k_cache=k_cache, v_cache=v_cache, window_left=left, window_right=right, **options
    )


def _pair(window: Any) -> tuple[int | None, ...]:
    widths = widths_of(window)
    if len(widths) != 2:
        raise ValueError(f"window has {len(widths)} entries, must be (left, right)")
    return widths


def _operator() -> Callable[[DecodeArguments], Decoded]:
    from kernels_dsl.ops.serving import register

    return register.attention_decode
