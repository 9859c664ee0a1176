"""`flash_attn_with_kvcache`: FlashAttention-2's attention to a cache, on this library's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES, check_tensor
from kernels_dsl.checks.options import boolean, integer
from kernels_dsl.config.decode import MAX_ROWS
from kernels_dsl.flash_attn.functions import UNLIMITED, Window, options_of
from kernels_dsl.ops.attention.attention import attention_varlen
from kernels_dsl.ops.serving.append_kv import append_kv
from kernels_dsl.ops.serving.decode import attention_decode, attention_decode_supports, repeated
from kernels_dsl.ops.serving.scales import FP8, check_cache_scale

_NOT_HERE = {
    "rotary_cos": "rotate q and k beforehand",
    "rotary_sin": "rotate q and k beforehand",
    "cache_leftpad": "keys start at the first place of a cache",
    "alibi_slopes": "attention to a cache has no score functions",
}
"""Arguments that must be None -> the reason."""
MOST_CHECKED = 4096


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> Any:
    """Attention of q (B, Sq, H, D) to caches (B, keys, Hk, D), or (pages, keys of a page, Hk, D).

    k, v: (B, S, Hk, D), written into the caches from position cache_seqlens[b] on, before the attention,
    which sees them (`kernels_dsl.append_kv`). cache_seqlens: int32 (B,), or a number for all: the keys that
    each sequence has, without k's; None: all that the cache has room for. block_table, which FlashAttention-3
    calls page_table: int32 (B, n), the pages of each sequence, where the caches have pages. cache_batch_idx:
    int32 (B,), the cache of each sequence.

    k_descale, v_descale: scales of fp8 caches, float32 (), (Hk,), or without k and v as in FlashAttention-3
    (B, Hk).

    softmax_scale, causal, window_size, softcap: as in `flash_attn_func`; the last query lies on the last
    key. sinks: (H,), as in `kernels_dsl.attention`. num_splits must be 0 or 1: splits have a fixed number of
    keys, and a sequence's result the same bits whatever the batch is, as `kernels_dsl.attention_decode` says.

    Up to 64 rows (queries times query heads of a KV head) go to the kernel for decoding, more, as in a
    prefill, to `kernels_dsl.attention_varlen`, for which fp8 pages are gathered and converted first.
    rotary_cos, rotary_sin, cache_leftpad and alibi_slopes must be None.

    Returns (B, Sq, H, D), with `return_softmax_lse` also the log-sum-exp (B, H, Sq). Not differentiable.
    Raises TypeError and ValueError that name the argument; a call that is refused has written nothing.
    """
    if k is v is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is alibi_slopes is None:
        if sinks is k_descale is v_descale is None and return_softmax_lse is False:
            plain = rotary_interleaved is True and type(num_splits) is int and num_splits == 0
            if plain and type(window_size) is tuple and window_size == UNLIMITED:
                table = page_table if block_table is None else block_table
                if table is not None and (block_table is None or page_table is None):
                    tensors = q, k_cache, v_cache, cache_seqlens, table
                    output = _repeated(tensors, causal, softmax_scale, softcap)
                    if output is not None:
                        return output
    without_counterpart = {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_leftpad": cache_leftpad,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    for name, value in without_counterpart.items():
        if value is not None:
            raise ValueError(f"{name} is given, must be None: {_NOT_HERE[name]}")
    if boolean("rotary_interleaved", rotary_interleaved) is not True:
        raise ValueError("rotary_interleaved is False, must be True: it has no effect without rotary_cos")
    if integer("num_splits", num_splits) not in (0, 1):
        raise ValueError(f"num_splits is {num_splits}, must be 0 or 1: splits have a fixed number of keys")
    boolean("return_softmax_lse", return_softmax_lse)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if check_tensor(name, tensor).dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must have four modes")
    table = _table(block_table, page_table, cache_batch_idx)
    used = _lengths(cache_seqlens, q.shape[0], q.device)
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None, must be given: k and v go together")
    scales = {"k_scale": k_descale, "v_scale": v_descale}
    options = {**options_of(softmax_scale, causal, window_size, softcap), "sinks": sinks, **scales}
    if k is not None and v is not None:
        if used is None:
            raise ValueError("cache_seqlens is None, must be given with k and v: it says where they go")
        if check_tensor("k", k).dim() != 4:
            raise ValueError(f"k has shape {tuple(k.shape)}, must be (B, S, Hk, D)")
        for name, scale in (("k_descale", k_descale), ("v_descale", v_descale)):
            if scale is not None and scale.dim() == 2:
                raise ValueError(f"{name} has two modes, must have one at most with k: a scale for each head")
        _check_once(q, (k_cache, v_cache), table, used, options)  # a call that is refused writes nothing
        append_kv(k, v, k_cache, v_cache, cache_seqlens=used, block_table=table, **scales)
        used = used + k.shape[1]
    if table is not None and used is None:
        used = _lengths(table.shape[-1] * k_cache.shape[1], q.shape[0], q.device)
    rows = q.shape[1] * (q.shape[2] // max(k_cache.shape[2], 1))
    if rows <= MAX_ROWS or k_cache.dtype == FP8:  # of which it alone reads the bytes as they are
        return attention_decode(
            q, k_cache, v_cache, seqused_k=used, block_table=table, return_lse=return_softmax_lse, **options
        )
    return _prefill(q, (k_cache, v_cache), table, used, options, return_softmax_lse)


def _repeated(tensors: tuple[Any, ...], causal: Any, scale: Any, softcap: Any) -> torch.Tensor | None:
    """The output of a call like an earlier one of `attention_decode`, of (q, caches, lengths, table) alone;
    None where there was none, or what is wrong with an argument is to be found."""
    q, k_cache, _, used, table = tensors
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is not float:
        return None
    for x in (q, k_cache, used, table):
        if type(x) not in PLAIN_TYPES or x.is_nested:
            return None
    shape, of_cache = q.shape, k_cache.shape
    if len(shape) != 4 or len(of_cache) != 4 or shape[1] * shape[2] > MAX_ROWS * of_cache[2]:
        return None
    return repeated(tensors, (causal, None, softcap, scale, None, False))[1]


_CHECKED: set[Any] = set()


def _check_once(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor | None,
    used: torch.Tensor,
    options: dict[str, Any],
) -> None:
    """ValueError for a call that `attention_decode` would refuse, whatever the number of queries; calls like
    one that was checked are not looked at again."""
    if torch.compiler.is_compiling():  # the operators check what they are given
        return
    tensors = (q, *caches, table, options["sinks"], options["k_scale"], options["v_scale"])
    window = options["window"]
    facts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    key = (
        *facts,
        options["causal"],
        options["softcap"],
        options["scale"],
        None if window is None else tuple(window),
    )
    if key in _CHECKED:
        return
    few = q[:, :1, : max(caches[0].shape[2], 1)]  # a query head for each KV head
    sinks = options["sinks"]
    options = {**options, "sinks": None if sinks is None else sinks[: few.shape[2]]}
    reason = attention_decode_supports(few, *caches, seqused_k=used, block_table=table, **options)
    if reason is not None:
        raise ValueError(reason)
    if q.shape[2] % max(caches[0].shape[2], 1):
        raise ValueError(f"q has {q.shape[2]} heads, must be a multiple of k_cache's, {caches[0].shape[2]}")
    if sinks is not None and tuple(sinks.shape) != (q.shape[2],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, must be ({q.shape[2]},)")
    if len(_CHECKED) >= MOST_CHECKED:
        _CHECKED.clear()
    _CHECKED.add(key)


def _table(
    block_table: torch.Tensor | None, page_table: torch.Tensor | None, cache_batch_idx: torch.Tensor | None
) -> torch.Tensor | None:
    """The pages of each sequence; a cache of its own is one page."""
    tables = {"block_table": block_table, "page_table": page_table, "cache_batch_idx": cache_batch_idx}
    present = [name for name, tensor in tables.items() if tensor is not None]
    if len(present) > 1:
        raise ValueError(f"{present[1]} is given beside {present[0]}, must be None: one says where keys lie")
    if not present:
        return None
    (name,) = present
    table = check_tensor(name, tables[name])
    modes = 1 if name == "cache_batch_idx" else 2
    if table.dtype != torch.int32 or table.dim() != modes:
        form = "(B,)" if modes == 1 else "(B, n)"
        raise ValueError(f"{name} is {table.dtype} {tuple(table.shape)}, must be torch.int32 {form}")
    return table if modes == 2 else table[:, None]


def _lengths(lengths: Any, batch: int, device: torch.device) -> torch.Tensor | None:
    """The keys of each sequence, int32 (B,), of a number for all."""
    if lengths is None:
        return None
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        if lengths < 0:
            raise ValueError(f"cache_seqlens is {lengths}, must be at least 0")
        return torch.full((batch,), lengths, dtype=torch.int32, device=device)
    check_tensor("cache_seqlens", lengths)
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != (batch,):
        raise ValueError(
            f"cache_seqlens is {lengths.dtype} {tuple(lengths.shape)}, must be torch.int32 ({batch},), or a "
            "number"
        )
    return lengths


def _prefill(
    q: torch.Tensor,
    caches: Sequence[torch.Tensor],
    table: torch.Tensor | None,
    used: torch.Tensor | None,
    options: dict[str, Any],
    return_lse: bool,
) -> Any:
    """Attention of many queries: the caches as packed sequences, each of all that it has room for."""
    batch, rows = q.shape[:2]
    numbers = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    for name in ("k", "v"):
        scale = options.pop(f"{name}_scale")
        check_cache_scale(f"{name}_descale", scale, caches[0].dtype, caches[0].shape[2], batch)
    if table is None and caches[0].shape[0] != batch:
        raise ValueError(
            f"k_cache has {caches[0].shape[0]} sequences, must have q's {batch}, or block_table be given"
        )
    room, starts = caches[0].shape[1], None
    if table is None:
        starts, caches = numbers * room, [x.flatten(0, 1) for x in caches]
    keys, values = caches
    found = attention_varlen(
        q.flatten(0, 1), keys, values, numbers * rows, starts, rows,
        seqused_k=None if used is None else used.contiguous(), block_table=table, return_lse=return_lse,
        **options,
    )  # fmt: skip
    if not return_lse:
        return found.unflatten(0, (batch, rows))
    out, lse = found
    return out.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1)
