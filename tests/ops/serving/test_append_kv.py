"""`append_kv` in the emulator, compared with PyTorch's indexing, bit for bit and byte for byte."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops import checked
from lowering import emulator

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Caches(NamedTuple):
    """Caches of keys and values."""

    k: torch.Tensor
    v: torch.Tensor


def _new(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Caches:
    generator = torch.Generator().manual_seed(seed)
    return Caches(*(300 * torch.randn(shape, generator=generator).to(dtype) for _ in "kv"))


def _caches(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Caches:
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


def _check(new: Caches, caches: Caches, slots: torch.Tensor, scales: tuple = (None, None), **places) -> None:
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


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", BF16), ("sm_89", E4M3), ("sm_90a", E4M3)])
def test_slots_layouts_and_scales(arch, dtype, seed):
    slots = torch.tensor([5, -1, 0, 47, 13, 48, -2, 1 << 40])  # of 48: three of them are no place
    scales = (torch.tensor(0.75), torch.tensor([0.5, 2.0, 1.25])) if dtype == E4M3 else (None, None)
    with emulator.run(arch=arch):
        for layout in ("nhd", "hnd", "turns"):
            _check(_new(8, 3, 64, seed=seed), _caches(layout, (6, 8, 3, 64), dtype), slots, scales)
        new = _new(8, 3, 20, dtype=torch.float16, seed=seed)
        caches = _caches("nhd", (6, 8, 3, 20), torch.float16 if dtype == BF16 else E4M3)
        _check(new, caches, slots.clamp(max=100).int())
        strided = Caches(*(x.transpose(0, 2).contiguous().transpose(0, 2) for x in _new(8, 3, 64)))
        _check(strided, _caches("nhd", (6, 8, 3, 64), dtype), slots)


@pytest.mark.parametrize("paged", [True, False])
def test_lengths(paged, seed):
    """Tokens after a sequence's last page, pages outside the cache, wrong lengths: none is written."""
    lengths = torch.tensor([0, 6, 15, -3], dtype=torch.int32)
    table = torch.tensor([[3, 1], [0, 9], [5, 4], [2, 2]], dtype=torch.int32) if paged else None
    positions = lengths[:, None] + torch.arange(3)
    if paged:
        pages = table.gather(1, (positions // 8).clamp(0, 1))
        slots = torch.where((positions < 16) & (pages < 6), pages * 8 + positions % 8, -1)
    else:
        slots = torch.where(positions < 8, torch.arange(4)[:, None] * 8 + positions, -1)
    slots[3] = -1
    with emulator.run(arch="sm_90a"):
        _check(
            _new(4, 3, 2, 32, seed=seed), _caches("hnd", (6, 8, 2, 32), BF16), slots.long(),
            cache_seqlens=lengths, block_table=table,
        )  # fmt: skip


def test_values_are_looked_at_in_checked_mode():
    new, caches = _new(2, 1, 16), _caches("nhd", (2, 4, 1, 16), BF16)
    batched = [x[:, None] for x in new]
    with emulator.run(arch="sm_90a"), checked.checked():
        for slots, words in (([8, 0], "slot_mapping has 8"), ([-2, 0], "has -2"), ([3, 3], "a slot twice")):
            with pytest.raises(ValueError, match=words):
                kernels_dsl.append_kv(*new, *caches, torch.tensor(slots))
        kernels_dsl.append_kv(*new, *caches, torch.tensor([-1, -1]))
        table = torch.tensor([[0], [2]], dtype=torch.int32)
        for lengths, words in (([0, 4], r"cache_seqlens\[1\] is 4"), ([0, 0], r"block_table\[1, 0\] is 2")):
            with pytest.raises(ValueError, match=words):
                lengths = torch.tensor(lengths, dtype=torch.int32)
                kernels_dsl.append_kv(*batched, *caches, cache_seqlens=lengths, block_table=table)


def test_errors_name_the_argument():
    (k, v), (kc, vc) = _new(2, 3, 1, 16), _caches("nhd", (4, 8, 1, 16), BF16)
    slots, ints = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    cases = [
        ((k.float(), v, kc, vc, slots), {}, "k is torch.float32"),
        ((k, v.half(), kc, vc, slots), {}, "v is torch.float16"),
        ((k, v, kc.transpose(1, 2), vc, slots), {}, r"k_cache has shape \(4, 1, 8, 16\)"),
        ((k, v, kc, vc.half(), slots), {}, "v_cache is torch.float16"),
        ((k, v, kc, kc, slots), {}, "v_cache shares memory with k_cache"),
        ((kc[:2, :3], v, kc, vc, slots), {}, "k_cache shares memory with k"),
        ((k, v, kc[:1].expand(4, -1, -1, -1), vc, slots), {}, "k_cache has strides"),
        ((k, v, kc, vc), {}, "slot_mapping and cache_seqlens: neither"),
        ((k, v, kc, vc, slots[0]), {}, r"slot_mapping has shape \(3,\)"),
        ((k, v, kc, vc, slots.short()), {}, "slot_mapping is torch.int16"),
        ((k, v, kc, vc, slots), {"block_table": ints[:, None]}, "block_table is given with slot_mapping"),
        ((k, v, kc, vc), {"cache_seqlens": ints[:1]}, r"cache_seqlens has shape \(1,\), must be \(2,\)"),
        ((k, v, kc[:1], vc[:1]), {"cache_seqlens": ints}, "k_cache has shape"),
        ((k, v, kc, vc, slots), {"k_scale": torch.ones(1)}, "k_scale is given, must be None"),
        ((k.clone().requires_grad_(), v, kc, vc, slots), {}, "k_cache is given and a tensor requires grad"),
    ]
    with emulator.run(arch="sm_90a"):
        for arguments, options, words in cases:
            with pytest.raises((TypeError, ValueError), match=f"^{words}"):
                kernels_dsl.append_kv(*arguments, **options)
        fp8 = _caches("nhd", (4, 8, 1, 16), E4M3)
        with emulator.run(arch="sm_80"), pytest.raises(ValueError, match=r"^k_cache is .* must be of 8.9"):
            kernels_dsl.append_kv(k.detach(), v, *fp8, slots)
