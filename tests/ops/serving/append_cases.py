"""Caches for the tests of `append_kv`, compared with PyTorch's indexing, bit for bit and byte for byte."""

from __future__ import annotations

from typing import NamedTuple

import torch

import kernels_dsl

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Caches(NamedTuple):
    """Caches of keys and values."""

    k: torch.Tensor
    v: torch.Tensor


def new_tokens(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Caches:
    """Keys and values, some too large for fp8 without a scale."""
    generator = torch.Generator().manual_seed(seed)
    return Caches(*(300 * torch.randn(shape, generator=generator).to(dtype) for _ in "kv"))


def filled_caches(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Caches:
    """Caches that hold a byte which no conversion gives."""
    pages, size, heads, columns = shape
    if layout == "hnd":
        pair = torch.empty(2, pages, heads, size, columns, dtype=dtype).transpose(2, 3)
    elif layout == "turns":  # pages of keys and values in turn
        pair = torch.empty(pages, 2, size, heads, columns, dtype=dtype).transpose(0, 1)
    else:
        pair = torch.empty(2, *shape, dtype=dtype)
    pair.untyped_storage().copy_(
        torch.full((pair.untyped_storage().nbytes(),), 0x55, dtype=torch.uint8).untyped_storage()
    )
    return Caches(*pair.unbind(0))


def check(new: Caches, caches: Caches, slots: torch.Tensor, scales: tuple = (None, None), **places) -> None:
    """Appends, and compares all bytes of the caches with what indexing writes to copies of them."""
    expected = []
    pages, size = caches.k.shape[:2]
    for x, cache, scale in zip(new, caches, scales):
        wanted = cache.clone(memory_format=torch.contiguous_format)
        if cache.dtype == E4M3:
            x = x.float() if scale is None else x.float() / scale.view(-1, 1)
            x = x.clamp(-448, 448).to(E4M3)
        flat, inside = slots.flatten(), (slots.flatten() >= 0) & (slots.flatten() < pages * size)
        rows = wanted.view(torch.uint8 if cache.dtype == E4M3 else torch.int16).view(
            pages * size, *cache.shape[2:]
        )
        rows[flat[inside]] = x.view(rows.dtype).flatten(0, -3)[inside]
        expected.append(wanted)
    if not places:
        places = {"slot_mapping": slots}
    kernels_dsl.append_kv(*new, *caches, **places, k_scale=scales[0], v_scale=scales[1])
    for cache, wanted in zip(caches, expected):
        bits = torch.uint8 if cache.dtype == E4M3 else torch.int16
        assert torch.equal(cache.contiguous().view(bits), wanted.view(bits))
