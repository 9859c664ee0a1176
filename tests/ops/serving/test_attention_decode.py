"""`attention_decode` in the emulator, compared with float64."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.decode import MAX_SPLITS, extra_part_rows, most_splits, split_keys
from lowering import emulator
from reference.attention import Masking
from tests.ops.serving.decode_cases import check, paged

ALL = os.environ.get("TEST_ALL_KERNELS") == "1"
ARCHES = ("sm_80", "sm_90a")
CAUSAL = Masking(right=0)


@pytest.mark.parametrize("arch", ARCHES)
def test_pages_of_any_size(arch, seed):
    """Lengths of 0 and 1, at the borders of pages and of splits; more items than CTAs."""
    with emulator.run(arch=arch, sms=1):
        for page, lengths in ((16, (130, 0, 1, 16)), (64, (64, 65, 128)), (1, (70, 3)), (13, (26, 40))):
            case = paged(lengths, page, seed, queries=2)
            check(case, case.decode(), CAUSAL)


@pytest.mark.parametrize("arch", ARCHES)
def test_window_softcap_sinks(arch, seed):
    """Pages before the window are none, and keys there hold NaN."""
    sinks = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    case = paged((200, 150), 16, seed, queries=3, heads=(12, 1), dim=128, hidden=66, dtype=torch.float16)
    masking = Masking(left=80, right=0, softcap=3.0, sinks=sinks)
    with emulator.run(arch=arch):
        found = case.decode(window=(80, 0), softcap=3.0, sinks=sinks)
    check(case, found, masking)


@pytest.mark.parametrize("rows", [(16, 256), (64, 256), (64, 96)] if ALL else [(64, 256)])
def test_many_rows_and_wide_heads(rows, seed):
    heads, dim = rows
    with emulator.run(arch="sm_80"):
        case = paged((70, 33), 32, seed, heads=(heads, 1), dim=dim)
        check(case, case.decode(causal=False), Masking())


def test_dense_caches(seed):
    """Heads before keys, a head dimension that no tile has, an output with strides, all keys."""
    case = paged((80, 80), 80, seed, dim=72)
    k, v = (torch.stack(x).transpose(1, 2).contiguous().transpose(1, 2) for x in zip(*case.whole))
    out = torch.full((2, 4, 1, 80), 7.0, dtype=torch.bfloat16).transpose(1, 2)
    with emulator.run(arch="sm_90a"):
        found = kernels_dsl.attention_decode(case.q, k, v, out=out[..., :72], return_lse=True)
        short = torch.tensor([80, 41], dtype=torch.int32)
        same = kernels_dsl.attention_decode(case.q, k, v, seqused_k=short)
    check(case, found, CAUSAL)
    assert (out[..., 72:] == 7.0).all() and found[0].data_ptr() == out.data_ptr()
    assert torch.equal(same[:1], found[0][:1]) and not torch.equal(same[1:], found[0][1:])


def test_a_sequences_bits_depend_on_itself_alone(seed):
    """Whatever the batch beside it, the place of its pages and the room in the table."""
    batch = paged((300, 17, 90), 16, seed)
    alone = paged((300,), 16, seed + 1, spare=40)
    for cache, whole in zip(alone[1:3], batch.whole[0]):
        for p, page in enumerate(alone.block_table[0].tolist()[:19]):
            part = whole[p * 16 : (p + 1) * 16]
            cache[page, : len(part)] = part
    alone = alone._replace(q=batch.q[:1])
    with emulator.run(arch="sm_90a", sms=1):
        many, one = batch.decode(), alone.decode()
    assert torch.equal(many[0][:1], one[0]) and torch.equal(many[1][:1], one[1])


def test_splits():
    """Enough of them at 1024 keys, few enough at 131072, fewer with more rows, and room for those of any
    length."""
    assert [split_keys(keys) for keys in (1024, 8192, 65536, 131072)] == [128, 1024, 1024, 2048]
    assert -(-131072 // split_keys(131072, 16)) == MAX_SPLITS
    assert [split_keys(4096, rows) for rows in (4, 16, 64, 256, 257)] == [512, 512, 1024, 2048, 4096]
    for rows in (1, 16, 64, 256, 257):
        room = 0
        for keys in (*range(1, 3000, 7), *range(3000, 1 << 20, 9997), 1 << 20, 1 << 24, 1 << 30):
            size = split_keys(keys, rows)
            room = max(room, -(-keys // size))
            assert size % 64 == 0 and room <= most_splits(keys, rows) <= MAX_SPLITS


def test_room_for_partial_results():
    """Of packed sequences, whatever their numbers of queries."""
    for keys, pack, most in product((1, 700, 4096, 131072), (1, 4, 12, 100), (1, 3, 40, 500)):
        more = extra_part_rows(keys, pack, pack * most)
        for queries in range(1, most + 1):
            rows = queries * pack
            assert rows * -(-keys // split_keys(keys, rows)) <= rows + more


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values one element off an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_errors_name_the_argument(seed):
    case = paged((40,), 16, seed)
    q, k, v, used, table = case[:5]
    wrong = [
        ({"q": q.float()}, "q is torch.float32"),
        ({"k_cache": k.half()}, "k_cache is torch.float16"),
        ({"v_cache": v[:, :8]}, "v_cache has shape"),
        ({"k_cache": k[..., :1].expand(k.shape)}, "k_cache has strides"),
        ({"k_cache": _shifted(k)}, "k_cache begins at address"),
        ({"max_seqlen_q": 1}, "max_seqlen_q is given, must be None without cu_seqlens_q"),
        ({"cu_seqlens_q": used}, r"q has shape \(1, 1, 4, 64\), must be \(T, H, D\)"),
        ({"q": q[0], "cu_seqlens_q": used[None]}, "cu_seqlens_q is torch.int32"),
        (
            {"q": q[0], "cu_seqlens_q": table[0, :3]},
            r"seqused_k is torch.int32 \(1,\), must be torch.int32 \(2,\)",
        ),
        ({"q": q[:, :, :3]}, "q has 3 heads"),
        ({"seqused_k": None}, "seqused_k is None"),
        ({"seqused_k": used.long()}, "seqused_k is torch.int64"),
        ({"block_table": table[0]}, "block_table is torch.int32"),
        ({"block_table": None}, "k_cache has shape"),
        ({"window": (3,)}, "window has 1 entries"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"sinks": torch.ones(3)}, "sinks has shape"),
        ({"out": q.float()}, "out is torch.float32"),
        ({"out": q}, "out"),
        ({"k_scale": torch.ones(2)}, "k_scale is given, must be None"),
        ({"k_cache": k.to(torch.float8_e4m3fn)}, "v_cache is torch.bfloat16, must be torch.float8_e4m3fn"),
    ]
    given = {"q": q, "k_cache": k, "v_cache": v, "seqused_k": used, "block_table": table}
    with emulator.run(arch="sm_90a"):
        for change, words in wrong:
            with pytest.raises((TypeError, ValueError), match=words):
                kernels_dsl.attention_decode(**{**given, **change})
        assert kernels_dsl.attention_decode_supports(**given) is None
        assert "window has" in str(kernels_dsl.attention_decode_supports(**given, window=(1,)))
        with kernels_dsl.checked(), pytest.raises(ValueError, match=r"seqused_k\[0\] is 100"):
            kernels_dsl.attention_decode(**{**given, "seqused_k": used + 60})
        with kernels_dsl.checked(), pytest.raises(ValueError, match=r"block_table\[0, 0\] is 99"):
            kernels_dsl.attention_decode(**{**given, "block_table": torch.full_like(table, 99)})


def test_latents_are_refused_by_name():
    """Absorbed multi-head latent attention: values are the first 512 columns of the keys."""
    latents = torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16)
    q, lengths = torch.zeros(2, 1, 16, 576, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int32)
    options = {"seqused_k": lengths, "block_table": torch.zeros(2, 2, dtype=torch.int32)}
    why = kernels_dsl.attention_decode_supports(q, latents, latents[..., :512], **options)
    assert why is not None and "latents (MLA)" in why and "v_cache has head dimension 512" in why
    with pytest.raises(ValueError, match="no kernel yet"):
        kernels_dsl.attention_decode(q, latents, latents[..., :512], **options)


def test_no_rows_and_no_keys():
    q, cache = torch.ones(2, 1, 32, 64).bfloat16(), torch.ones(2, 0, 2, 64).bfloat16()
    sinks = torch.linspace(-2, 2, 32)
    with emulator.run(arch="sm_90a"):
        out, lse = kernels_dsl.attention_decode(q, cache, cache, sinks=sinks, return_lse=True)
        none = kernels_dsl.attention_decode(q[:, :0], cache, cache)
        roomy = torch.ones(2, 8, 2, 64).bfloat16()  # with room for keys, though it has none
        used = torch.zeros(2, dtype=torch.int32)
        same = kernels_dsl.attention_decode(q, roomy, roomy, seqused_k=used, sinks=sinks, return_lse=True)
    assert not out.any() and none.shape == (2, 0, 32, 64)
    torch.testing.assert_close(lse, sinks[:, None].expand(2, 32, 1))
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])
