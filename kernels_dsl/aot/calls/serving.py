"""Common calls of decoding: from dense caches and pages, writes into them, merges of results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels_dsl.aot.calls.call import BF16, DTYPES, E4M3, FP32, Arguments, Call, Source
from kernels_dsl.ops.serving.append_kv import append_kv
from kernels_dsl.ops.serving.decode import attention_decode
from kernels_dsl.ops.serving.merge_states import merge_states

_SEQUENCES = ((1, 4096), (1, 32768), (16, 4096), (64, 2048))
"""Sequences that are decoded, and the keys of each."""
_PAGE = 16
_HEADS = ((32, 8), (8, 8), (64, 8), (28, 4), (40, 8))
_VARIANTS: dict[str, dict[str, Any]] = {
    "lse": {"return_lse": True},
    "window": {"window": (1023, 0)},
    "sinks": {"sinks": True},
    "window sinks": {"window": (1023, 0), "sinks": True},
    "as prefill": {"decode_equals_prefill": True},
}


def _decode(
    source: Source,
    batch: int,
    keys: int,
    dim: int,
    dtype: torch.dtype = BF16,
    heads: tuple[int, int] = _HEADS[0],
    queries: int = 1,
    paged: bool = True,
    fp8: bool = False,
    packed: bool = False,
    **more: Any,
) -> Arguments:
    q_heads, kv_heads = heads
    pages = keys // _PAGE
    shape = (batch * pages, _PAGE) if paged else (batch, keys)
    kind = E4M3 if fp8 else dtype
    made = {name: source.values(*shape, kv_heads, dim, dtype=kind) for name in ("k_cache", "v_cache")}
    q = source.values(batch, queries, q_heads, dim, dtype=dtype)
    if packed:
        starts = source.integers(range(0, batch * queries + 1, queries))
        more |= {"cu_seqlens_q": starts, "max_seqlen_q": queries}
        q = q.flatten(0, 1)
    if more.get("sinks") is True:
        more["sinks"] = source.values(q_heads, dtype=FP32)
    if fp8:
        more |= {name: source.factors(kv_heads) for name in ("k_scale", "v_scale")}
    if paged:
        more["block_table"] = source.integers(range(batch * pages)).view(batch, pages)
    return {"q": q, **made, "seqused_k": source.integers([keys - 3] * batch), **more}


def decodes() -> Iterator[Call]:
    """`attention_decode` of steps of one token, of several, packed; fp8 caches; options in bf16."""
    name = "attention_decode"
    for (kind, dtype), dim, paged, heads, (batch, keys) in itertools.product(
        DTYPES.items(), (64, 128), (False, True), _HEADS, _SEQUENCES
    ):
        make = partial(_decode, batch=batch, keys=keys, dim=dim, dtype=dtype, heads=heads, paged=paged)
        words = f"{kind} d{dim}" + " paged" * paged + f" {heads[0]} heads {batch}x{keys}"
        yield Call(name, attention_decode, words, make)
    for (kind, dtype), dim, heads in itertools.product(DTYPES.items(), (64, 128), _HEADS):
        make = partial(_decode, batch=16, keys=4096, dim=dim, dtype=dtype, heads=heads, fp8=True)
        yield Call(name, attention_decode, f"{kind} d{dim} fp8 paged {heads[0]} heads", make, fp8=True)
    for (words, more), dim in itertools.product(_VARIANTS.items(), (64, 128)):
        make = partial(_decode, batch=16, keys=4096, dim=dim, **more)
        yield Call(name, attention_decode, f"bf16 d{dim} paged {words}", make)
    for (kind, dtype), dim, packed in itertools.product(DTYPES.items(), (64, 128), (False, True)):
        make = partial(_decode, batch=16, keys=4096, dim=dim, dtype=dtype, queries=4, packed=packed)
        yield Call(name, attention_decode, f"{kind} d{dim} paged of 4" + " packed" * packed, make)


def _append(source: Source, dim: int, dtype: torch.dtype, fp8: bool, index: torch.dtype | None) -> Arguments:
    """index: the dtype of the slots; None: lengths and a table."""
    heads, tokens, sequences = _HEADS[0][1], 4, 16
    shape = (sequences, tokens, heads, dim) if index is None else (sequences * tokens, heads, dim)
    made = {name: source.values(*shape, dtype=dtype) for name in "kv"}
    kind = E4M3 if fp8 else dtype
    for name in ("k_cache", "v_cache"):
        made[name] = source.values(sequences * 4, _PAGE, heads, dim, dtype=kind)
    if fp8:
        made |= {name: source.factors(heads) for name in ("k_scale", "v_scale")}
    if index is not None:
        return {**made, "slot_mapping": source.integers(range(sequences * tokens), index)}
    table = source.integers(range(sequences * 4)).view(sequences, 4)
    return {**made, "cache_seqlens": source.integers(range(sequences)), "block_table": table}


def appends() -> Iterator[Call]:
    """`append_kv` by slots of either dtype and by lengths."""
    for (kind, dtype), dim, fp8, index in itertools.product(
        DTYPES.items(), (64, 128), (False, True), (torch.int64, torch.int32, None)
    ):
        words = f"{kind} d{dim}" + " fp8" * fp8 + (" lengths" if index is None else f" {index}"[7:])
        make = partial(_append, dim=dim, dtype=dtype, fp8=fp8, index=index)
        yield Call("append_kv", append_kv, words, make, fp8=fp8)


def _states(source: Source, dim: int, dtype: torch.dtype, turned: bool) -> Arguments:
    """`turned`: log-sum-exps as attention returns them."""
    states, batch, length, heads = 3, 2, 16, 32
    lse = (
        source.values(states, batch, heads, length, dtype=FP32).mT
        if turned
        else source.values(states, batch, length, heads, dtype=FP32)
    )
    return {"out": source.values(states, batch, length, heads, dim, dtype=dtype), "lse": lse}


def merges() -> Iterator[Call]:
    """`merge_states` of results in each dtype, with and without gradients."""
    for (kind, dtype), dim, turned in itertools.product(
        {**DTYPES, "fp32": FP32}.items(), (64, 128), (False, True)
    ):
        words = f"{kind} d{dim}" + " turned" * turned
        make = partial(_states, dim=dim, dtype=dtype, turned=turned)
        yield Call("merge_states", merge_states, words, make)
        yield Call("merge_states", merge_states, words, make, ("out", "lse"))
