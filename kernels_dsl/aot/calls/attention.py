"""Common calls of attention: of prompts, of packed sequences, in training, with lists of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels_dsl.aot.calls.call import BF16, DTYPES, Arguments, Call, Source
from kernels_dsl.ops.attention.attention import attention, attention_varlen, scaled_dot_product_attention
from kernels_dsl.sparse.attention_blocks import (
    causal_blocks,
    document_blocks,
    document_mask,
    topk_blocks,
    window_blocks,
)
from kernels_dsl.sparse.block_lists import BlockLists

LENGTHS = ((1, 512), (1, 4096), (1, 32768), (16, 1024))
"""Batch and length."""
HEADS = (32, 8)
"""Of queries and of keys."""
_AS_MANY = (16, 16)
_GROUPS = ((28, 4), (40, 8), (64, 8), (16, 2), (12, 12))
_SHORT = ((1, 100), (1, 700), (4, 512), (1, 2048), (1, 8192))
_TRAINED = ((1, 512), (2, 1024), (1, 4096))
_WINDOW = (1023, 0)
_PAGE = 16
_CAUSAL: dict[bool, dict[str, Any]] = {False: {}, True: {"causal": True}}
_VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": _WINDOW},
    "window sinks": {"causal": True, "window": _WINDOW, "sinks": True},
    "causal sinks": {"causal": True, "sinks": True},
    "causal softcap": {"causal": True, "softcap": 30.0},
    "mask": {"mask": True},
}


def qkv(
    source: Source,
    batch: int,
    length: int,
    dim: int,
    dtype: torch.dtype = BF16,
    heads: tuple[int, int] = HEADS,
    dim_v: int | None = None,
    **more: Any,
) -> Arguments:
    """q, k and v (B, S, H, D). `more`: further arguments; True for sinks or a mask makes them."""
    q, kv = heads
    sizes = {"q": (q, dim), "k": (kv, dim), "v": (kv, dim_v or dim)}
    made = {name: source.values(batch, length, *size, dtype=dtype) for name, size in sizes.items()}
    if more.get("sinks") is True:
        more["sinks"] = source.values(q, dtype=torch.float32)
    if more.get("mask") is True:
        more["mask"] = source.values(1, 1, length, length, dtype=dtype)
    return {**made, **more}


def _words(dtype: str, dim: int, options: str, batch: int, length: int) -> str:
    return " ".join(filter(None, (dtype, f"d{dim}", options, f"{batch}x{length}")))


def prompts() -> Iterator[Call]:
    """Dense and causal, both dtypes; rarer head dimensions and options in bf16."""
    for (name, dtype), dim, causal, lse in itertools.product(
        DTYPES.items(), (64, 128), _CAUSAL, (False, True)
    ):
        more = {**_CAUSAL[causal], **({"return_lse": True} if lse else {})}
        for batch, length in LENGTHS:
            words = _words(name, dim, "causal" * causal + " lse" * lse, batch, length)
            yield Call(
                "attention",
                attention,
                words,
                partial(qkv, batch=batch, length=length, dim=dim, dtype=dtype, **more),
            )
            if not lse:
                make = partial(qkv, batch=batch, length=length, dim=dim, dtype=dtype, heads=_AS_MANY, **more)
                yield Call("attention", attention, words + " 16 heads", make)
    for dim, causal, heads, (batch, length) in itertools.product((64, 128), _CAUSAL, _GROUPS, _SHORT):
        make = partial(qkv, batch=batch, length=length, dim=dim, heads=heads, **_CAUSAL[causal])
        words = _words("bf16", dim, "causal" * causal, batch, length)
        yield Call("attention", attention, f"{words} {heads[0]} over {heads[1]} heads", make)
    for (dim, dim_v), causal, (batch, length) in itertools.product(
        ((256, 256), (192, 128), (96, 96)), _CAUSAL, LENGTHS
    ):
        make = partial(qkv, batch=batch, length=length, dim=dim, dim_v=dim_v, **_CAUSAL[causal])
        yield Call("attention", attention, _words("bf16", dim, "causal" * causal, batch, length), make)
    for (words, more), dim, (batch, length) in itertools.product(_VARIANTS.items(), (64, 128), LENGTHS[:2]):
        make = partial(qkv, batch=batch, length=length, dim=dim, **more)
        yield Call("attention", attention, _words("bf16", dim, words, batch, length), make)


def _lists(kind: str, source: Source, length: int) -> tuple[BlockLists, dict[str, Any]]:
    """Lists of blocks of 128 × 128, and what else a call with them says."""
    device, blocks = source.device, length // 128
    if kind == "causal":
        return causal_blocks(length, length, device=device), {"causal": True}
    if kind == "window":
        return window_blocks(length, length, left=_WINDOW[0], device=device), {
            "causal": True,
            "window": _WINDOW,
        }
    if kind == "documents":
        documents = (torch.arange(length, device=device) // 300).int()[None]
        return document_blocks(documents), {"causal": True, "mask_mod": document_mask, "aux": (documents,)}
    causal = kind == "causal top-k"
    scores = source.scores(1, HEADS[0], blocks, blocks)
    return topk_blocks(scores, min(8, blocks), causal=causal), {"causal": causal}


def _with_lists(source: Source, kind: str, length: int, dim: int) -> Arguments:
    blocks, more = _lists(kind, source, length)
    return qkv(source, 1, length, dim, blocks=blocks, **more)


_LISTS = ("causal", "window", "documents", "top-k", "causal top-k")


def sparse() -> Iterator[Call]:
    """With lists of blocks, forward at two lengths, gradients at one."""
    for kind, dim in itertools.product(_LISTS, (64, 128)):
        for length in (1024, 8192):
            make = partial(_with_lists, kind=kind, length=length, dim=dim)
            yield Call("attention", attention, f"bf16 d{dim} lists {kind} 1x{length}", make)
        make = partial(_with_lists, kind=kind, length=2048, dim=dim)
        yield Call("attention", attention, f"bf16 d{dim} lists {kind} 1x2048", make, ("q", "k", "v"))


def training() -> Iterator[Call]:
    """Gradients of dense and causal attention, with and without the same bits in each run; with options."""
    choices = itertools.product(
        DTYPES.items(), (64, 128), _CAUSAL, (None, False), (HEADS, _AS_MANY), _TRAINED
    )
    for (name, dtype), dim, causal, deterministic, heads, (batch, length) in choices:
        more = {**_CAUSAL[causal], **({} if deterministic is None else {"deterministic": False})}
        words = _words(name, dim, "causal" * causal + " fast" * (deterministic is False), batch, length)
        make = partial(qkv, batch=batch, length=length, dim=dim, dtype=dtype, heads=heads, **more)
        yield Call("attention", attention, words + f" {heads[0]} heads", make, ("q", "k", "v"))
    for words, dim in itertools.product(("window", "window sinks", "causal softcap"), (64, 128)):
        make = partial(qkv, batch=1, length=2048, dim=dim, **_VARIANTS[words])
        wanted = ("q", "k", "v", *(["sinks"] if "sinks" in words else []))
        yield Call("attention", attention, _words("bf16", dim, words, 1, 2048), make, wanted)


def _torchs(
    source: Source, batch: int, length: int, dim: int, dtype: torch.dtype, turned: bool, **more: Any
) -> Arguments:
    """(B, H, S, D), as PyTorch has it; `turned`: transposed views of (B, S, H, D)."""

    def tensor() -> torch.Tensor:
        if turned:
            return source.values(batch, length, 16, dim, dtype=dtype).transpose(1, 2)
        return source.values(batch, 16, length, dim, dtype=dtype)

    return {**{name: tensor() for name in ("query", "key", "value")}, **more}


def torchs() -> Iterator[Call]:
    """`scaled_dot_product_attention`, forward and with gradients."""
    choices = itertools.product(DTYPES.items(), (64, 128), (False, True), (False, True))
    for (name, dtype), dim, causal, turned in choices:
        options = "causal" * causal + " turned" * turned
        for batch, length in LENGTHS[:2]:
            make = partial(
                _torchs, batch=batch, length=length, dim=dim, dtype=dtype, turned=turned, is_causal=causal
            )
            words = _words(name, dim, options, batch, length)
            yield Call("scaled_dot_product_attention", scaled_dot_product_attention, words, make)
        make = partial(_torchs, batch=1, length=2048, dim=dim, dtype=dtype, turned=turned, is_causal=causal)
        wanted = ("query", "key", "value")
        words = _words(name, dim, options, 1, 2048)
        yield Call("scaled_dot_product_attention", scaled_dot_product_attention, words, make, wanted)


def packed(
    source: Source,
    lengths: tuple[int, ...],
    dim: int,
    dtype: torch.dtype = BF16,
    heads: tuple[int, int] = HEADS,
    **more: Any,
) -> Arguments:
    """Packed sequences of these lengths."""
    made = qkv(source, 1, sum(lengths), dim, dtype, heads, **more)
    starts = source.integers([0, *itertools.accumulate(lengths)])
    for name in "qkv":
        made[name] = made[name][0]
    longest = max(lengths)
    return {
        **made,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


PACKED = ((100, 412), (1000, 24, 3072), (16384,))
_MORE_PACKED = ((1,) * 30 + (500,), (300,) * 8, (8000, 100))
"""Lengths of packed sequences."""


def _paged(
    source: Source, lengths: tuple[int, ...], dim: int, dtype: torch.dtype, seen: int, **more: Any
) -> Arguments:
    """New tokens of sequences of which `seen` keys are in the cache already, pages of 16 keys."""
    made = packed(source, lengths, dim, dtype, **more)
    pages = -(-(max(lengths) + seen) // _PAGE)
    for name in ("k", "v"):
        made[name] = source.values(len(lengths) * pages, _PAGE, HEADS[1], dim, dtype=dtype)
    table = source.integers(range(len(lengths) * pages)).view(len(lengths), pages)
    for name in ("cu_seqlens_k", "max_seqlen_k"):
        del made[name]
    return {**made, "seqused_k": source.integers(n + seen for n in lengths), "block_table": table}


def packed_sequences() -> Iterator[Call]:
    """`attention_varlen`: both dtypes, with pages, windows, sinks, gradients."""
    name = "attention_varlen"
    for (kind, dtype), dim, causal, lengths in itertools.product(DTYPES.items(), (64, 128), _CAUSAL, PACKED):
        words = f"{kind} d{dim}" + " causal" * causal + f" {lengths}"
        make = partial(packed, lengths=lengths, dim=dim, dtype=dtype, **_CAUSAL[causal])
        yield Call(name, attention_varlen, words, make)
    for dim, heads, lengths in itertools.product((64, 128), (HEADS, _AS_MANY, *_GROUPS), _MORE_PACKED):
        make = partial(packed, lengths=lengths, dim=dim, heads=heads, causal=True)
        words = f"bf16 d{dim} causal {len(lengths)} of up to {max(lengths)}"
        yield Call(name, attention_varlen, f"{words} {heads[0]} over {heads[1]} heads", make)
    for (kind, dtype), dim, lengths in itertools.product(DTYPES.items(), (64, 128), PACKED):
        make = partial(_paged, lengths=lengths, dim=dim, dtype=dtype, seen=512, causal=True)
        yield Call(name, attention_varlen, f"{kind} d{dim} causal paged {lengths}", make)
    for (kind, dtype), dim, causal in itertools.product(DTYPES.items(), (64, 128), _CAUSAL):
        make = partial(packed, lengths=PACKED[1], dim=dim, dtype=dtype, **_CAUSAL[causal])
        yield Call(name, attention_varlen, f"{kind} d{dim}" + " causal" * causal, make, ("q", "k", "v"))
    for words, dim in itertools.product(("window", "window sinks"), (64, 128)):
        for lengths in PACKED[:2]:
            make = partial(packed, lengths=lengths, dim=dim, **_VARIANTS[words])
            yield Call(name, attention_varlen, f"bf16 d{dim} {words} {lengths}", make)
