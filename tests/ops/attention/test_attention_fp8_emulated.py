"""fp8 attention end to end without a GPU: the compiled PTX of both kernels runs in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.config.problem import H200
from kernels_dsl.ops import operation
from kernels_dsl.ops.attention import fp8_plan
from kernels_dsl.sparse import attention_blocks
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from reference import quantize as ref
from reference.attention import Masking, allowed_by_lists
from reference.buffers import check_output, poisoned
from tests.ops.attention.attention_fp8_cases import quantised, run, run_packed

ONE = torch.ones(1, 4, 1, 64).to(torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a"):
        yield


def _shapes(heads, lengths, dims, batch=1):
    (h, hk), (sq, sk), (d, dv) = heads, lengths, dims
    return (batch, sq, h, d), (batch, sk, hk, d), (batch, sk, hk, dv)


@pytest.mark.parametrize(
    ("heads", "lengths", "dims"),
    [((1, 1), (70, 200), (64, 64)), ((2, 1), (130, 65), (64, 128)), ((1, 1), (64, 33), (48, 16))],
)
def test_shapes(heads, lengths, dims, seed):
    run(_shapes(heads, lengths, dims, batch=2), seed, Masking())


def test_causal_with_the_widest_tile(seed):
    config = Sm90AttentionConfig(128, 224, 64, 64, late_wait=True)
    run(_shapes((2, 2), (130, 500), (64, 64)), seed, Masking(right=0), causal=True, config=config)


def test_window_softcap_and_sinks(seed):
    sinks = torch.tensor([-1.0, 3.0])
    masking = Masking(left=40, right=3, softcap=2.0, sinks=sinks)
    run(_shapes((2, 2), (70, 200), (64, 64)), seed, masking, window=(40, 3), softcap=2.0, sinks=sinks)


def test_block_lists(seed):
    lists = attention_blocks.window_blocks(200, 230, left=100, block=(64, 64), device="cpu")
    masking = Masking(left=100, right=0)
    run(_shapes((1, 1), (200, 230), (64, 64)), seed, masking, blocks=lists, window=(100, 0))


def test_v_of_later_heads_beside_the_products(seed, monkeypatch):
    """Two CTAs, so that they take several tiles; numbers are 0 again."""
    target, counters = operation.target_of, []
    few = replace(H200, sm_count=2)
    monkeypatch.setattr(operation, "target_of", lambda *a: replace(target(*a), device=few))
    make = fp8_plan.counter_and_workspace
    monkeypatch.setattr(
        fp8_plan, "counter_and_workspace", lambda *a: counters.append(make(*a)) or counters[-1]
    )
    config = Sm90AttentionConfig(192, 96, 128, 128, stages=3, watch_sums=True, linear_exps=3, later_v=2)
    shapes = _shapes((3, 3), (200, 120), (128, 128))
    out = run(shapes, seed, Masking(right=0), causal=True, lse=False, config=config)
    assert len(counters) == 1 and not bool(counters[0][0].any())
    # NaN of key 60 of a head reaches the queries that see it, those from 140 on, and nothing else.
    (q, qs, _), (k, ks, _), (v, vs, _) = (quantised(shape, seed + i) for i, shape in enumerate(shapes))
    k.view(torch.uint8)[0, 60, 1, 5] = 0x7F
    found = kernels_dsl.attention_fp8(
        q, k, v, q_descale=qs, k_descale=ks, v_descale=vs, causal=True, config=config
    )
    assert bool(found[0, 140:, 1].isnan().all())
    found[0, 140:, 1] = out[0, 140:, 1]
    assert torch.equal(found, out)


@pytest.mark.parametrize(
    ("lengths", "masking", "options"),
    [
        ((200, 330), Masking(right=0), {"causal": True}),  # blocks that the diagonal cuts are not aligned
        ((200, 330), Masking(right=200), {"window": (-1, 200)}),  # it leaves the keys
        ((200, 330), Masking(left=100, right=3), {"window": (100, 3)}),
        ((250, 120), Masking(right=0), {"causal": True}),  # rows without a key
    ],
)
def test_masked_blocks_of_tall_tiles(lengths, masking, options, seed):
    """A causal tile visits those of its masked blocks last that some warpgroups see nothing of."""
    config = Sm90AttentionConfig(192, 96, 128, 128, stages=3, watch_sums=True, linear_exps=3)
    run(_shapes((1, 1), lengths, (128, 128)), seed, masking, lse=False, config=config, **options)


def test_rows_that_attend_to_nothing(seed):
    out = run(_shapes((1, 1), (100, 40), (64, 64)), seed, Masking(right=0), causal=True)
    assert bool((out[:, :60] == 0).all())


def test_no_keys():
    out, lse = kernels_dsl.attention_fp8(ONE, ONE[:, :0], ONE[:, :0], return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
    assert kernels_dsl.attention_fp8(ONE[:, :0], ONE, ONE).shape == (1, 0, 1, 64)


def test_compiled_in_one_graph():
    """The short way of repeated calls is not traced; without keys, so that no kernel runs."""
    torch.compiler.reset()
    call = torch.compile(kernels_dsl.attention_fp8, fullgraph=True, backend="eager")
    out = call(ONE, ONE[:, :0], ONE[:, :0], q_descale=torch.ones(1))
    assert out.shape == (1, 4, 1, 64) and bool((out == 0).all())


def test_one_descale_for_all_and_for_heads_of_keys(seed):
    """Into outputs between NaNs: rows at multiples of 16 bytes, and not."""
    q, k, v = (quantised((1, 40, h, 64), seed + h, "cpu")[0] for h in (2, 1, 1))
    aligned, odd = (poisoned((1, 40, 2, 64), torch.bfloat16, pad=pad) for pad in (8, 3))
    expected = kernels_dsl.attention_fp8(q, k, v, v_descale=torch.full((1, 1), 0.25), out=aligned.tensor)
    found = kernels_dsl.attention_fp8(
        q, k, v, q_descale=torch.full((1, 1), 0.5), v_descale=torch.tensor(0.25), scale=0.25, out=odd.tensor
    )
    assert expected is aligned.tensor and found is odd.tensor and torch.equal(found, expected)
    check_output(aligned)
    check_output(odd)


def test_operator_and_its_fake(seed):
    import kernels_dsl.ops.attention.register

    (q, qs, _), (k, ks, _), (v, vs, _) = (quantised((1, 40, 1, 64), seed + i) for i in range(3))
    torch.library.opcheck(
        torch.ops.kernels_dsl.attention_fp8.default,
        (q, k, v, qs, ks, vs),
        {"causal": True, "return_lse": True},
        # PyTorch cannot compute with fp8 what test_schema needs
        test_utils=("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"),
    )
    out = torch.zeros(1, 40, 1, 64).bfloat16()
    compiled = torch.compile(
        lambda *x: kernels_dsl.attention_fp8(*x, causal=True, return_lse=True, out=out)[0] + 0,
        backend="aot_eager", fullgraph=True, dynamic=True,
    )  # fmt: skip
    assert torch.equal(compiled(q, k, v), out) and bool(out.any())


def test_the_whole_way_from_bf16(seed):
    """Quantised by the op a head at a time, Q and K rotated; 8-bit values cost what they cost."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 40, 1, 64, generator=generator).bfloat16() for _ in range(3))
    out = kernels_dsl.attention_fp8(**kernels_dsl.quantize_qkv(q, k, v, rotate=True))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v))
    ).transpose(1, 2)
    assert ref.signal_to_noise(out, expected) > 22


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": ONE.bfloat16()}, "q is torch.bfloat16, must be torch.float8_e4m3fn"),
        ({"q": ONE[..., :8], "k": ONE[..., :8]}, "q has head dimension 8, must be a multiple of 16"),
        ({"q_descale": torch.ones(3)}, r"q_descale is torch.float32 \(3,\)"),
        ({"v_descale": 2.0}, "v_descale is a float"),
        ({"window": 5}, "window is a int, must be .left, right. or None"),
        ({"blocks": 3}, "blocks is a int, must be BlockLists"),
        ({"out": ONE}, r"out is torch.float8_e4m3fn \(1, 4, 1, 64\) on cpu, must be torch.bfloat16"),
        ({"out": ONE[..., :1].bfloat16().expand(ONE.shape)}, "out has strides .* must not overlap itself"),
        ({"config": Sm90AttentionConfig(64, 176, 64, 64)}, "tile_n is 176, must be a multiple of 32"),
        ({"config": Sm90AttentionConfig(128, 128, 64, 64, later_v=2)}, "later_v must be 0 with packed"),
        ({"config": Sm90AttentionConfig(192, 128, 64, 64, later_v=8)}, "later_v must be from 0 to 7"),
        (
            {"config": Sm90AttentionConfig(64, 128, 64, 64, turns_v=True, ctas_per_sm=2)},
            "turns_v must be False with packed sequences, tile_m above 128, and several CTAs an SM",
        ),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"q": ONE, "k": ONE, "v": ONE, **change}
    with pytest.raises((TypeError, ValueError), match=message):
        kernels_dsl.attention_fp8(**arguments)
    assert kernels_dsl.attention_fp8_supports(**arguments) is not None


def test_what_is_not_there():
    assert "mask_mod" in kernels_dsl.attention_fp8_supports(ONE, ONE, ONE, mask_mod=lambda *a: True)
    for arch in ("sm_86", "sm_100a"):
        with emulator.run(arch=arch):
            assert "must be 8.9, 9.0 or 12.0" in kernels_dsl.attention_fp8_supports(ONE, ONE, ONE)
    elsewhere = ONE.to("meta")
    assert kernels_dsl.attention_fp8_supports(*[elsewhere] * 3).startswith("q is on meta, must be on a CUDA")


@pytest.mark.parametrize(("gap", "causal"), [(0, True), (13, False)])
def test_packed(gap, causal, seed):
    """Empty and one-token sequences, starts at any key, NaN behind what counts."""
    run_packed((40, 0, 1, 30), (150, 5, 1, 21), gap, seed, heads=(1, 1), causal=causal)


def test_packed_with_window_sinks_and_lists(seed):
    """Lists of each sequence's own, unsorted, with garbage past the count and blocks past the keys."""
    q_lens, k_lens, block = (70, 1, 0, 65), (150, 5, 3, 130), (64, 64)
    counts = torch.tensor([[3, 1], [2, 0], [0, 0], [2, 1]]).int()[:, None]
    indices = torch.tensor([[2, 0, 1], [1, -9, 99]]).int()[None, None].repeat(4, 1, 1, 1)
    lists, sinks = BlockLists(counts, indices, block=block), torch.tensor([0.5, -1.0])
    allowed = allowed_by_lists(lists.tensors, block, (4, 1, 128, 192))
    maskings = [
        Masking(left=90, right=20, sinks=sinks, allowed=allowed[n : n + 1, :, :i, :j])
        for n, (i, j) in enumerate(zip(q_lens, k_lens))
    ]
    options = {"window": (90, 20), "blocks": lists, "sinks": sinks}
    run_packed(q_lens, k_lens, 13, seed, maskings=maskings, **options)


@pytest.mark.parametrize(
    ("by_block", "options", "masking"),
    [("kv", {"causal": True}, Masking(right=0)),
     ("k", {"softcap": 3.0, "window": (200, 9)}, Masking(left=200, right=9, softcap=3.0))],
)  # fmt: skip
def test_descales_of_blocks_of_keys(by_block, options, masking, seed):
    run(_shapes((1, 1), (20, 300), (64, 64)), seed, masking, by_block=by_block, **options)


def test_descales_of_blocks_with_lists_and_sinks(seed):
    """Blocks in an order of their own; a sink counts in the units of whichever comes first."""
    sinks = torch.tensor([0.5])
    counts, indices = torch.tensor([[[2]]]).int(), torch.tensor([[[[2, 0, 1]]]]).int()
    lists = BlockLists(None, None, counts, indices, (64, 128))
    hidden = (torch.arange(420) // 128 == 1) | (torch.arange(420) // 128 == 3)
    masking = Masking(allowed=~hidden.expand(1, 1, 20, 420), sinks=sinks)
    run(_shapes((1, 1), (20, 420), (64, 64)), seed, masking, by_block="kv", blocks=lists, sinks=sinks)
