"""`append_kv` in the emulator."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops import checked
from lowering import emulator
from tests.ops.serving.append_cases import BF16, E4M3, Caches, check, filled_caches, new_tokens


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", BF16), ("sm_89", E4M3), ("sm_90a", E4M3)])
def test_slots_layouts_and_scales(arch, dtype, seed):
    slots = torch.tensor([5, -1, 0, 47, 13, 48, -2, 1 << 40])  # of 48: three of them are no place
    scales = (torch.tensor(0.75), torch.tensor([0.5, 2.0, 1.25])) if dtype == E4M3 else (None, None)
    with emulator.run(arch=arch):
        for layout in ("nhd", "hnd", "turns"):
            check(new_tokens(8, 3, 64, seed=seed), filled_caches(layout, (6, 8, 3, 64), dtype), slots, scales)
        new = new_tokens(8, 3, 20, dtype=torch.float16, seed=seed)
        caches = filled_caches("nhd", (6, 8, 3, 20), torch.float16 if dtype == BF16 else E4M3)
        check(new, caches, slots.clamp(max=100).int())
        strided = Caches(*(x.transpose(0, 2).contiguous().transpose(0, 2) for x in new_tokens(8, 3, 64)))
        check(strided, filled_caches("nhd", (6, 8, 3, 64), dtype), slots)


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
        check(
            new_tokens(4, 3, 2, 32, seed=seed), filled_caches("hnd", (6, 8, 2, 32), BF16), slots.long(),
            cache_seqlens=lengths, block_table=table,
        )  # fmt: skip


@pytest.mark.parametrize("paged", [True, False])
def test_lengths_whose_sums_overflow(paged):
    """They are no place: the table is read where it has entries alone."""
    lengths = torch.tensor([2**31 - 1, 1, -(2**31), 2**31 - 2], dtype=torch.int32)
    table = torch.tensor([[3], [0], [5], [2]], dtype=torch.int32) if paged else None
    slots = torch.full((4, 3), -1)
    slots[1] = (0 if paged else 8) + torch.arange(1, 4)
    with emulator.run(arch="sm_90a"):
        check(
            new_tokens(4, 3, 2, 32), filled_caches("nhd", (6, 8, 2, 32), BF16), slots,
            cache_seqlens=lengths, block_table=table,
        )  # fmt: skip


def test_values_are_looked_at_in_checked_mode():
    new, caches = new_tokens(2, 1, 16), filled_caches("nhd", (2, 4, 1, 16), BF16)
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
    (k, v), (kc, vc) = new_tokens(2, 3, 1, 16), filled_caches("nhd", (4, 8, 1, 16), BF16)
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
        fp8 = filled_caches("nhd", (4, 8, 1, 16), E4M3)
        with emulator.run(arch="sm_80"), pytest.raises(ValueError, match=r"^k_cache is .* must be of 8.9"):
            kernels_dsl.append_kv(k.detach(), v, *fp8, slots)
