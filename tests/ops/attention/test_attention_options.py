"""Options of a wrong type or out of range are refused by every public attention operation, by name, before
anything is compiled: also after a call that Python takes for the same, and where there is nothing to compute.
"""

from __future__ import annotations

import math

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.ops.attention import arguments, fp8_plan, register
from kernels_dsl.ops.attention import plan as attention_plan
from kernels_dsl.sparse import attention_blocks as blocks
from lowering import emulator

EMPTY = torch.zeros(2, 0, 4, 64, dtype=torch.bfloat16), *[torch.zeros(2, 50, 2, 64, dtype=torch.bfloat16)] * 2
SUMS = torch.zeros(1, dtype=torch.int32)
PACKED = tuple(x[0] for x in EMPTY)


@pytest.fixture(autouse=True)
def _emulated():
    """Calls have no queries, so nothing is launched."""
    with emulator.run(arch="sm_90a"):
        yield


def _dense(**options):
    return kernels_dsl.attention(*EMPTY, **options)


def _varlen(**options):
    return kernels_dsl.attention_varlen(*PACKED, SUMS, SUMS, **{"max_seqlen_q": 8, **options})


def _fp8(**options):
    return kernels_dsl.attention_fp8(*(x.to(torch.float8_e4m3fn) for x in EMPTY), **options)


def _fp8_varlen(**options):
    tensors = (x.to(torch.float8_e4m3fn) for x in PACKED)
    return kernels_dsl.attention_fp8_varlen(*tensors, SUMS, SUMS, **{"max_seqlen_q": 8, **options})


CALLS = {"dense": _dense, "varlen": _varlen, "fp8": _fp8, "fp8 varlen": _fp8_varlen}
OF_ALL = [
    ({"causal": "no"}, "causal is 'no', must be True or False"),
    ({"causal": 1}, "causal is 1, must be True or False"),
    ({"causal": None}, "causal is None, must be True or False"),
    ({"return_lse": 1}, "return_lse is 1, must be True or False"),
    ({"return_lse": "no"}, "return_lse is 'no', must be True or False"),
    ({"scale": "1"}, "scale is '1', must be a Python number"),
    ({"scale": True}, "scale is True, must be a Python number"),
    ({"scale": torch.ones(())}, "scale is a Tensor, must be a Python number"),
    ({"scale": math.nan}, "scale is nan, must be greater than 0 and finite"),
    ({"scale": math.inf}, "scale is inf, must be greater than 0 and finite"),
    ({"scale": 1e39}, "scale is 1e[+]39, must be greater than 0 and finite in float32"),
    ({"scale": -1}, "scale is -1, must be greater than 0"),
    ({"softcap": False}, "softcap is False, must be a Python number"),
    ({"softcap": math.nan}, "softcap is nan, must be at least 0 and finite"),
    ({"softcap": [1.0]}, "softcap is a list, must be a Python number"),
    ({"softcap": 1e-42}, "softcap is 1e-42, must be 0 .none. or from"),
    ({"softcap": 3e38}, "softcap is 3e.38, must be 0 .none. or from"),
    ({"window": "12"}, "window is a str, must be .left, right. or None"),
    ({"window": (True, 0)}, "window's left is True, must be None, -1 .no limit. or at least 0"),
    ({"window": (0, 1.0)}, "window's right is 1.0, must be None, -1 .no limit. or at least 0"),
    ({"window": (0, [])}, r"window's right is \[\], must be None, -1 .no limit. or at least 0"),
    ({"window": (0, -2)}, "window's right is -2, must be None, -1 .no limit. or at least 0"),
    ({"alignment": []}, "alignment is a list, must be 'bottom_right' or 'top_left'"),
    ({"alignment": ""}, "alignment is '', must be 'bottom_right' or 'top_left'"),
    ({"config": "fast"}, "config is 'fast', must be Sm90AttentionConfig or Sm80AttentionConfig"),
    ({"config": []}, "config is a list, must be Sm90AttentionConfig or Sm80AttentionConfig"),
    ({"config": Sm90AttentionConfig(128, 128, 32, 64)}, "config is .*, must be one that fits: dim is 32"),
    ({"out": (1, 2)}, "out is a tuple, must be a torch.Tensor"),
    ({"blocks": 3}, "blocks is a int, must be BlockLists"),
    (
        {"blocks": kernels_dsl.BlockLists(None, None, block=(0, 64))},
        r"blocks.block\[0\] is 0, must be at least",
    ),
    ({"blocks": kernels_dsl.BlockLists(None, None, block=64)}, "blocks.block is 64, must be .queries, keys."),
    ({"blocks": kernels_dsl.BlockLists(3, 4)}, "blocks.counts is 3, must be Tensor"),
]
OF_16_BITS = [
    ({"family": "sm70"}, "family is 'sm70', must be None, 'sm90' or 'sm80'"),
    ({"family": 90}, "family is 90, must be str or None"),
    ({"family": ["sm90"]}, "family is a list, must be str or None"),
    ({"aux": 5}, "aux is a int, must be a sequence"),
    ({"aux": torch.ones(2)}, "aux is a Tensor, must be a sequence"),
    ({"aux": (3,)}, "aux is given, must be empty without score_mod and mask_mod"),
    ({"mask_mod": []}, "mask_mod is a list, must be a function"),
    ({"score_mod_bwd": math.sin}, "score_mod_bwd is given, must be None without score_mod"),
    ({"score_mod": "x"}, "score_mod is a str, must be a function"),
]
OF_PACKED = [
    ({"max_seqlen_q": -1}, "max_seqlen_q is -1, must be at least 0"),
    ({"max_seqlen_q": 8.0}, "max_seqlen_q is 8.0, must be an int"),
    ({"max_seqlen_q": "8"}, "max_seqlen_q is '8', must be an int"),
    ({"max_seqlen_q": True}, "max_seqlen_q is True, must be an int"),
    ({"max_seqlen_q": None}, "max_seqlen_q is None, must be "),
    ({"max_seqlen_q": torch.tensor(8)}, "max_seqlen_q is a Tensor, must be an int"),
]
OF_MASKS = [
    ({"max_seqlen_k": -1}, "max_seqlen_k is -1, must be at least 0"),
    ({"max_seqlen_k": 8.0}, "max_seqlen_k is 8.0, must be an int"),
    ({"max_seqlen_k": torch.tensor(8)}, "max_seqlen_k is a Tensor, must be an int"),
]


def _cases():
    for name in CALLS:
        cases = list(OF_ALL)
        cases += [] if name.startswith("fp8") else OF_16_BITS
        cases += OF_PACKED if name.endswith("varlen") else []
        cases += OF_MASKS if name == "varlen" else []
        for options, message in cases:
            yield pytest.param(name, options, message, id=f"{name} {message[:40]}")


@pytest.mark.parametrize(("name", "options", "message"), list(_cases()))
def test_wrong_options(name, options, message):
    call = CALLS[name]
    call(causal=True, scale=1.0, window=(1, 0), max_seqlen_q=1) if "varlen" in name else call(causal=True)
    with pytest.raises((TypeError, ValueError), match=message):
        call(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": 1}, "is_causal is 1, must be True or False"),
        ({"enable_gqa": "no"}, "enable_gqa is 'no', must be True or False"),
        ({"dropout_p": "0"}, "dropout_p is '0', must be a Python number"),
        ({"dropout_p": 0.5}, "dropout_p is 0.5, must be 0"),
        ({"scale": True}, "scale is True, must be a Python number"),
    ],
)
def test_wrong_options_of_pytorchs_call(options, message):
    views = [x.transpose(1, 2) for x in EMPTY]
    kernels_dsl.scaled_dot_product_attention(*views, is_causal=True, scale=1.0, enable_gqa=True)
    with pytest.raises((TypeError, ValueError), match=message):
        kernels_dsl.scaled_dot_product_attention(*views, **{"enable_gqa": True, **options})


def test_whether_a_call_is_supported_says_the_same():
    assert kernels_dsl.attention_supports(*EMPTY, causal="no") == "causal is 'no', must be True or False"
    assert "layout is 'sbhd', must be" in kernels_dsl.attention_supports(*EMPTY, layout="sbhd")
    assert "alignment is ''" in kernels_dsl.attention_supports(*EMPTY, alignment="")
    values = [x.to(torch.float8_e4m3fn) for x in EMPTY]
    assert "return_lse is 2" in kernels_dsl.attention_fp8_supports(*values, return_lse=2)
    for supports, tensors in (
        (kernels_dsl.attention_supports, EMPTY), (kernels_dsl.attention_fp8_supports, values)
    ):  # fmt: skip
        for name in ("max_seqlen_q", "seqused_k", "nonsense"):  # of packed sequences, and of no call
            assert f"{name} is given, must not: attention" in supports(*tensors, **{name: None})
    assert "max_seqlen_q is 8.0" in kernels_dsl.attention_supports(
        *PACKED, layout="thd", cu_seqlens_q=SUMS, cu_seqlens_k=SUMS, max_seqlen_q=8.0
    )


def test_the_operator_refuses_negative_lengths():
    assert register is not None
    with pytest.raises(ValueError, match="max_seqlen_q is -3, must be at least 0"):
        torch.ops.kernels_dsl.attention(
            *PACKED, cu_seqlens_q=SUMS, cu_seqlens_k=SUMS, layout="thd", max_seqlen_q=-3
        )


def test_more_work_tiles_than_kernels_count_are_refused():
    """Of sequences of which one might be long each."""
    q = torch.empty(1, 1, 64, dtype=torch.bfloat16).expand(1 << 20, 1, 64)
    sums = torch.zeros((1 << 20) + 1, dtype=torch.int32)
    arguments = {"layout": "thd", "cu_seqlens_q": sums, "cu_seqlens_k": sums, "max_seqlen_q": 1 << 20}
    assert "max_seqlen_q is 1048576 with 1048576 sequences" in kernels_dsl.attention_supports(
        q, q, q, **arguments
    )
    assert kernels_dsl.attention_supports(q, q, q, **{**arguments, "max_seqlen_q": 512}) is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: blocks.window_blocks(-1, 8, left=1, device="cpu"), "q_len is -1, must be at least 0"),
        (lambda: blocks.window_blocks(8, 8.0, left=1, device="cpu"), "k_len is 8.0, must be an int"),
        (lambda: blocks.window_blocks(8, 8, left="1", device="cpu"), "left is '1', must be an int"),
        (lambda: blocks.window_blocks(8, 8, left=1, right=-1, device="cpu"), "right is -1, must be at least"),
        (lambda: blocks.window_blocks(8, 8, left=1, block=(0, 1), device="cpu"), r"block\[0\] is 0, must be"),
        (lambda: blocks.causal_blocks(8, 8, alignment="left", device="cpu"), "alignment is 'left', must be"),
        (lambda: blocks.document_blocks(torch.zeros(1, 8)), "documents is torch.float32 .1, 8., must be"),
        (lambda: blocks.document_blocks(SUMS[None], causal="no"), "causal is 'no', must be True or False"),
        (lambda: blocks.document_blocks(SUMS[None], max_blocks=-1), "max_blocks is -1, must be at least 0"),
        (lambda: blocks.topk_blocks(torch.zeros(1, 1, 2, 2), -1), "k is -1, must be at least 0"),
        (lambda: blocks.topk_blocks(torch.zeros(1, 1, 2, 2), 1.0), "k is 1.0, must be an int"),
        (lambda: blocks.topk_blocks([1.0], 1), "scores is a list, must be a torch.Tensor"),
        (lambda: kernels_dsl.register_torch_attention(5), "name is 5, must be a str"),
        (lambda: kernels_dsl.register_transformers_attention(""), "name is '', must not be empty"),
        (lambda: kernels_dsl.kernel_function(5), "function is a int, must be callable"),
        (lambda: kernels_dsl.checked("no").__enter__(), "enabled is 'no', must be True or False"),
        (
            lambda: kernels_dsl.quantize_qkv(*EMPTY, rotate="no"),
            "rotate is 'no', must be True or False",
        ),
    ],
)
def test_wrong_options_of_what_is_around_attention(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


def test_an_out_whose_unit_modes_have_odd_strides_is_not_copied():
    """A stride of a mode of size 1 says nothing."""
    extras = arguments.Extras(seqlens=arguments.Seqlens(SUMS, SUMS), max_seqlens=arguments.MaxSeqlens(9))
    tensors = [torch.zeros(9, 1, 64).bfloat16()] * 3
    call = arguments.describe(arguments.AttentionArguments(*tensors, layout="thd", extras=extras))
    out = torch.zeros(9 * 128).bfloat16().as_strided((9, 1, 64), (128, 7, 1))
    to = attention_plan.destination(call, out)
    assert not to.copied and to.of(out).data_ptr() == out.data_ptr() and to.of(out).stride(1) % 8 == 0
    odd = torch.zeros(9 * 128).bfloat16().as_strided((9, 1, 64), (67, 64, 1))
    assert attention_plan.destination(call, odd).copied and fp8_plan.destination is attention_plan.destination
