"""Bad calls of attention are refused before anything is compiled, each with a message of its own."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig
from kernels_dsl.config.problem import H200, L40S, Device
from kernels_dsl.ops import operation
from kernels_dsl.ops.attention import plan as attention_plan
from kernels_dsl.ops.attention.operation import ATTENTION
from kernels_dsl.ops.target import Target
from kernels_dsl.sparse.attention_blocks import document_mask
from kernels_dsl.sparse.block_lists import BlockLists


@pytest.fixture
def on_h200(monkeypatch):
    """CPU tensors are taken for tensors on an H200: plans are made, nothing is launched."""
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(H200, -1))
    monkeypatch.setattr(ATTENTION, "calls", {})
    monkeypatch.setattr(ATTENTION, "plans", {})


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _block_mask(q_len: int, k_len: int) -> BlockMask:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, q_len, k_len, device="cpu")


Q, K = _tensor(2, 40, 4, 64), _tensor(2, 50, 2, 64)


def test_a_good_call_is_supported(on_h200):
    assert kernels_dsl.attention_supports(Q, K, K) is None
    assert kernels_dsl.attention_supports(Q, K, K, causal=True, window=(5, 0), softcap=3.0) is None


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (None, K, K, "q is a NoneType, must be a torch.Tensor"),
        (Q.float(), K, K, "q is torch.float32, must be torch.bfloat16 or torch.float16"),
        (Q, K.half(), K, "k is torch.float16, must be torch.bfloat16 like q"),
        (Q[0], K, K, "must have 4 modes"),
        (Q, K[..., :32], K, "k has head dimension 32, must be 64 like q's"),
        (Q, K[:1], K[:1], "k has a batch of 1, must be 2 like q's"),
        (Q, K, K[:, :9], "v has a length of 9, must be 50 like k's"),
        (Q[:, :, :3], K, K, "q has 3 heads, must be a multiple of k's number of heads, 2"),
        (Q[..., :60], K[..., :60], K, "q has head dimension 60, must be a multiple of 8 up to 256"),
        (_tensor(1, 8, 1, 264), _tensor(1, 8, 1, 264), _tensor(1, 8, 1, 64), "head dimension 264"),
    ],
)
def test_bad_tensors(on_h200, q, k, v, message):
    assert message in kernels_dsl.attention_supports(q, k, v)
    with pytest.raises((TypeError, ValueError), match=message.replace("(", r"\(").replace(")", r"\)")):
        kernels_dsl.attention(q, k, v)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale is 0.0, must be greater than 0"),
        ({"softcap": -1.0}, "softcap is -1.0, must be at least 0"),
        ({"alignment": "middle"}, "alignment is 'middle', must be"),
        ({"window": (-5, 0)}, "window's left is -5"),
        ({"sinks": torch.zeros(3)}, "sinks has shape (3,), must be (heads,) = (4,)"),
        ({"mask": torch.zeros(3, 3)}, "mask has shape (3, 3), must broadcast to (B, H, Sq, Sk)"),
        ({"mask": torch.zeros(40, 50).int()}, "mask is torch.int32"),
        ({"mask": [True]}, "mask is a list, must be a torch.Tensor"),
        ({"mask": causal_lower_right(40, 50)}, "mask is a CausalBias, must be None: say causal"),
        ({"scale": "1"}, "scale is '1', must be a Python number"),
        ({"softcap": torch.ones(())}, "softcap is a Tensor, must be a Python number"),
        ({"window": 5}, "window is a int, must be (left, right) or None"),
        ({"window": (1, 2, 3)}, "window has 3 entries, must be (left, right)"),
        ({"window": (1.5, 0)}, "window's left is 1.5, must be None, -1 (no limit) or at least 0"),
        ({"window": (2**40, 2**31 - 1)}, None),
        ({"sinks": [1.0] * 4}, "sinks is a list, must be a torch.Tensor"),
        ({"score_mod": 3}, "score_mod is a int, must be a function"),
        ({"mask_mod": lambda b, h, i, j: Q[b, i, h, j] > 0}, "mask_mod reads the torch.Tensor 'Q', must get"),
        ({"mask_mod": document_mask, "aux": (Q > 0,)}, "aux[0] is torch.bool, must be of numbers: view it"),
        ({"blocks": 3}, "blocks is a int, must be BlockLists or a torch BlockMask"),
        (
            {"blocks": _block_mask(40, 500)},
            "blocks is a BlockMask for (Sq, Sk) = (40, 500), must be for (40, 50)",
        ),
        ({"blocks": _block_mask(40, 50), "mask": torch.zeros(40, 50)}, None),
        ({"blocks": BlockLists(None, None)}, "neither counts nor full_counts"),
        ({"blocks": BlockLists(torch.zeros(1, 1, 1).int(), None)}, "one of counts and indices"),
        (
            {"blocks": BlockLists(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 1).int())},
            "blocks.counts is torch.float32",
        ),
        (
            {"blocks": BlockLists(torch.zeros(1, 1, 2).int(), torch.zeros(1, 1, 2, 1).int())},
            "blocks.counts has shape (1, 1, 2), must be (1 or 2, 1 or 4, 1)",
        ),
        (
            {"blocks": BlockLists(torch.zeros(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), block=(96, 64))},
            "block is (96, 64), must be multiples of 64",
        ),
        ({"out": _tensor(2, 40, 4, 32)}, "out is torch.bfloat16 (2, 40, 4, 32)"),
        ({"out": "here"}, "out is a str, must be a torch.Tensor"),
    ],
)
def test_bad_options(on_h200, options, message):
    found = kernels_dsl.attention_supports(Q, K, K, **options)
    if message is None:
        assert found is None
    else:
        assert message in str(found)
        with pytest.raises((TypeError, ValueError)) as error:
            kernels_dsl.attention(Q, K, K, **options)
        assert str(error.value) == found


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        (torch.tensor([0, 20, 40]), "cu_seqlens_q is torch.int64"),
        (torch.tensor([[0, 40]], dtype=torch.int32), "cu_seqlens_q has shape (1, 2)"),
        (torch.tensor([0, 10, 20, 40], dtype=torch.int32), "cu_seqlens_k has 3 elements, must have 4"),
    ],
)
def test_bad_prefix_sums(on_h200, cu, message):
    packed = _tensor(40, 2, 64)
    other = torch.tensor([0, 20, 40], dtype=torch.int32)
    found = kernels_dsl.attention_supports(
        packed, packed, packed, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=other, max_seqlen_q=20
    )
    assert found is not None and message in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": torch.ones(20, 30).bool()}, "max_seqlen_k is None, must be given beside mask"),
        (
            {"mask": torch.ones(20, 40).bool(), "max_seqlen_k": 30},
            "mask has shape (20, 40), must broadcast to (B, H, Sq, Sk) = (2, 2, 20, 30)",
        ),
        (
            {"blocks": BlockLists(torch.zeros(1, 1, 2).int(), torch.zeros(1, 1, 2, 1).int())},
            "blocks.counts has shape (1, 1, 2), must be (1 or 2, 1 or 2, 1)",
        ),
        ({"blocks": BlockLists(torch.zeros(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int())}, None),
        ({"mask": torch.ones(2, 1, 20, 30).bool(), "max_seqlen_k": 30}, None),
    ],
)
def test_masks_and_lists_of_packed_sequences(on_h200, options, message):
    packed, cu = _tensor(40, 2, 64), torch.tensor([0, 20, 40], dtype=torch.int32)
    sequences = {"layout": "thd", "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 20}
    found = kernels_dsl.attention_supports(packed, packed, packed, **sequences, **options)
    assert found == message if message is None else message in found


def test_lists_are_checked_on_request():
    counts, indices = torch.ones(1, 1, 1).int(), torch.full((1, 1, 1, 2), 3).int()
    lists = BlockLists(counts, indices)
    lists.check_indices(k_len=512)
    with pytest.raises(ValueError, match=r"indices\[0, 0, 0, 0\] is 3, must be from 0 to 2"):
        lists.check_indices(k_len=384)
    with pytest.raises(ValueError, match="counts go from 3 to 3, must be from 0 to 2"):
        BlockLists(counts * 3, indices).check_indices(k_len=512)
    with pytest.raises(ValueError, match=r"block 3 is listed twice at \[0, 0, 0\]"):
        BlockLists(counts * 2, indices).check_indices(k_len=512)
    with pytest.raises(ValueError, match=r"block 3 is listed twice at \[1, 0, 0\]"):
        several = indices.repeat(2, 1, 1, 1)
        several[0] = 1
        BlockLists(counts, indices, counts.repeat(2, 1, 1), several).check_indices(k_len=512)


def test_a_gpu_that_is_too_old_is_refused_with_the_reason(monkeypatch):
    turing = Device("T4", (7, 5), 40, 65536)
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(turing, -1))
    assert "q is on T4 of compute capability 7.5, must be 8.0" in kernels_dsl.attention_supports(Q, K, K)


def test_the_family_follows_from_the_gpu(monkeypatch):
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(L40S, -1))
    assert kernels_dsl.attention_supports(Q, K, K) is None
    assert kernels_dsl.attention_supports(Q, K, K, family="sm80") is None
    assert "family is 'sm90', must be one of ('sm80',)" in kernels_dsl.attention_supports(
        Q, K, K, family="sm90"
    )
    config = Sm90AttentionConfig(64, 64, 64, 64)
    assert "family is 'sm90', must be" in kernels_dsl.attention_supports(Q, K, K, config=config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Sm80AttentionConfig(96, 64, 64, 64), "tile_m is 96, must be 16 or 32 rows"),
        (Sm80AttentionConfig(64, 72, 64, 64), "tile_n is 72, must be a multiple of 16 for 4 warps"),
        (Sm80AttentionConfig(64, 64, 32, 64), "dim is 32, the head dimension is 64"),
        (Sm80AttentionConfig(64, 64, 80, 64), "a head dimension of a tile is 80, must be a multiple of 32"),
        (Sm80AttentionConfig(128, 64, 256, 256), "bytes of shared memory, there are 101376"),
    ],
)
def test_a_configuration_that_does_not_fit(monkeypatch, config, message):
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(L40S, -1))
    assert message in kernels_dsl.attention_supports(Q, K, K, config=config)
    assert "family is 'sm90', must be config's, 'sm80', or None" in kernels_dsl.attention_supports(
        Q, K, K, config=config, family="sm90"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Sm90AttentionConfig(96, 128, 64, 64), "tile_m is 96, must be 64, 128 or 192"),
        (Sm90AttentionConfig(128, 72, 64, 64), "tile_n is 72, must be a multiple of 16 from 16 to 256"),
        (Sm90AttentionConfig(128, 64, 64, 64, ctas_per_sm=2), "ctas_per_sm is 2, must be 1, or 2 with"),
        (Sm90AttentionConfig(128, 256, 128, 128), "bytes of shared memory, there are 232448"),
        (Sm90AttentionConfig(192, 64, 64, 64), "config has tiles of (192, 64), must have such that blocks"),
        (Sm90AttentionConfig(64, 128, 64, 64), None),
    ],
)
def test_a_configuration_for_hopper_that_does_not_fit(on_h200, config, message):
    lists = BlockLists(torch.zeros(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int())
    found = kernels_dsl.attention_supports(Q, K, K, config=config, blocks=lists)
    assert found is None if message is None else message in found


@pytest.mark.parametrize(
    ("name", "asked", "options", "message"),
    [
        ("aux[0]", True, {"mask_mod": document_mask, "aux": (torch.zeros(4),)}, "no gradient of it yet"),
        ("q", False, {"score_mod": lambda score, b, h, i, j: abs(score)}, "score_mod_bwd must be given"),
    ],
)
def test_gradients_that_are_not_there(on_h200, name, asked, options, message):
    for x in (*options.values(), *options.get("aux", ())):
        if isinstance(x, torch.Tensor):
            x.requires_grad_(asked)
    q = Q.clone().requires_grad_(not asked)
    with pytest.raises(RuntimeError, match=f"{re.escape(name)} requires grad, but .*{re.escape(message)}"):
        kernels_dsl.attention(q, K, K, **options)
    assert message in kernels_dsl.attention_supports(q, K, K, **options)


def test_tangents_are_refused():
    with torch.autograd.forward_ad.dual_level():
        q = torch.autograd.forward_ad.make_dual(Q, Q)
        with pytest.raises(NotImplementedError, match="attention has no forward-mode derivative"):
            kernels_dsl.attention(q, K, K)


@pytest.mark.parametrize("other", ["q", "k", "v"])
def test_out_is_no_input(on_h200, monkeypatch, other):
    tensors = {name: _tensor(1, 8, 1, 64) for name in "qkv"}
    with pytest.raises(ValueError, match=f"out shares memory with {other}, must be a tensor of its own"):
        kernels_dsl.attention(**tensors, out=tensors[other])


def test_a_cpu_tensor_without_the_emulator():
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        kernels_dsl.attention(Q, K, K)
    with pytest.raises(ValueError, match="query is on cpu, must be on a CUDA device"):
        kernels_dsl.scaled_dot_product_attention(Q, Q, Q)


def test_torch_arguments_that_cannot_be(on_h200):
    q, sdpa = Q.transpose(1, 2), kernels_dsl.scaled_dot_product_attention
    with pytest.raises(ValueError, match=r"dropout_p is 0\.1, must be 0"):
        sdpa(q, q, q, dropout_p=0.1)
    with pytest.raises(ValueError, match="attn_mask is given beside is_causal"):
        sdpa(q, q, q, attn_mask=torch.ones(40, 40).bool(), is_causal=True)
    with pytest.raises(ValueError, match="key has 2 heads, must have 4"):
        sdpa(q, K.transpose(1, 2), K.transpose(1, 2))
    with pytest.raises(ValueError, match=r"attn_mask is a CausalBias for \(L, S\) = \(40, 41\), must be for"):
        sdpa(q, q, q, attn_mask=causal_lower_right(40, 41))
    with pytest.raises(ValueError, match=r"attn_mask has shape \(7, 40\), must broadcast"):
        sdpa(q, q, q, attn_mask=torch.ones(7, 40))
    with pytest.raises(TypeError, match=r"key is torch\.float16, must be torch\.bfloat16 like query"):
        sdpa(q, q.half(), q)
    with pytest.raises(ValueError, match=r"key has shape \(2, 4, 40, 64\), must have 3 modes like query"):
        sdpa(q[0], q, q)
    with pytest.raises(TypeError, match=r"query is a list, must be a torch\.Tensor"):
        sdpa([1.0], q, q)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"cu_seqlens_q": [0, 20, 10, 40]}, "cu_seqlens_q[2] is 10, must be at least 20, the one before"),
        ({"cu_seqlens_k": [0, 20, 30, 41]}, "cu_seqlens_k[-1] is 41, must be at most 40, the rows of k"),
        ({"cu_seqlens_q": [1, 20, 30, 40]}, "cu_seqlens_q[0] is 1, must be 0"),
        ({"cu_seqlens_q": [0, 20, 30, 39]}, "cu_seqlens_q[-1] is 39, must be 40, the rows of q, or out be"),
        ({"cu_seqlens_q": [0, 20, 30, 39], "out": torch.zeros(40, 2, 64).bfloat16()}, None),
        ({"cu_seqlens_k": [0, 20, 30, 39]}, None),
        ({"max_seqlen_q": 19}, "max_seqlen_q is 19, must be at least 20: sequence 0"),
        ({"seqused_k": [20, -1, 10]}, "seqused_k[1] is -1, must be from 0 to 10, the sequence's keys"),
        ({"seqused_k": [20, 11, 10]}, "seqused_k[1] is 11, must be from 0 to 10, the sequence's keys"),
        (
            {"blocks": BlockLists(torch.ones(1, 1, 1).int(), torch.full((1, 1, 1, 2), 9).int())},
            "indices[0, 0",
        ),
    ],
)
def test_values_are_looked_at_in_checked_mode(on_h200, monkeypatch, changes, message):
    arguments = {
        "cu_seqlens_q": [0, 20, 30, 40],
        "cu_seqlens_k": [0, 20, 30, 40],
        "max_seqlen_q": 20,
        **changes,
    }
    arguments = {n: torch.tensor(x).int() if isinstance(x, list) else x for n, x in arguments.items()}
    ran = []
    plan = attention_plan.Plan(lambda *call: ran.append(call) or (None, None), None)
    monkeypatch.setattr(ATTENTION, "_build", lambda *call: plan)
    packed = _tensor(40, 2, 64)
    kernels_dsl.attention_varlen(packed, packed, packed, **arguments)  # outside of the mode nothing is read
    with kernels_dsl.checked():
        if message is None:
            kernels_dsl.attention_varlen(packed, packed, packed, **arguments)
        else:
            with pytest.raises(ValueError, match=re.escape(message)):
                kernels_dsl.attention_varlen(packed, packed, packed, **arguments)
    assert len(ran) == (2 if message is None else 1)


def test_fake_tensors_go_through_the_operator():
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 40, 4, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = kernels_dsl.attention(q, q, q, causal=True, return_lse=True)
        assert (out.shape, out.dtype) == ((2, 40, 4, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)
        transposed = kernels_dsl.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3)
        assert transposed.shape == (2, 4, 40, 64) and transposed.transpose(1, 2).is_contiguous()
