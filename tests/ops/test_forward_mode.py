"""Every public operation refuses a tangent and names the argument that has it: none is a constant to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import kernels_dsl
from reference.bsr import random_bsr
from tests.ops.bsr import bsr_cases

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
ONE, OFFS = torch.ones(()), torch.tensor([8, 16], dtype=torch.int32)
HEADS = torch.ones(16, 16, 1, 16)
Q = HEADS.to(BF16)
CACHES, SLOTS, LSE = (Q.clone(), Q.clone()), torch.arange(16), HEADS[..., 0].clone()
STARTS = torch.tensor([0, 16], dtype=torch.int32)
SPARSE = bsr_cases.sparse_of(random_bsr("uniform", (2, 2), (16, 16), 1, seed=1))
FP8_SPARSE = SPARSE.with_values(SPARSE.values.to(FP8))


def _randn(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=BF16)


A, B, WIDE = _randn(16, 16), _randn(2, 16, 16), _randn(32, 16)
A8, Q8 = A.to(FP8), HEADS.to(FP8)
# Operation -> (name of the argument with the tangent, its value, the call with it).
CALLS: dict[str, list[tuple[str, torch.Tensor, Callable[[Any], Any]]]] = {
    "gemm": [
        ("a", A, lambda x: kernels_dsl.gemm(x, A)),
        ("bias", A[0], lambda x: kernels_dsl.gemm(A, A, bias=x)),
        ("out", A.clone(), lambda x: kernels_dsl.gemm(A, A, out=x)),
    ],
    "gemm_gated": [
        ("b", A, lambda x: kernels_dsl.gemm_gated(A, x)),
        ("preact_out", A.clone(), lambda x: kernels_dsl.gemm_gated(A, A, preact_out=x)),
    ],
    "gemm_reduce": [
        ("a", A, lambda x: kernels_dsl.gemm_reduce(x, A)),
        ("reduced_out", torch.ones(16), lambda x: kernels_dsl.gemm_reduce(A, A, reduced_out=x)),
    ],
    "grouped_gemm": [("b", B, lambda x: kernels_dsl.grouped_gemm(A, x, OFFS))],
    "scaled_gemm": [
        ("scale_a", ONE, lambda x: kernels_dsl.scaled_gemm(A8, A8.mT, x, ONE)),
        ("a", A8, lambda x: kernels_dsl.scaled_gemm(x, A8.mT, ONE, ONE)),
    ],
    "scaled_grouped_gemm": [
        ("scale_b", ONE, lambda x: kernels_dsl.scaled_grouped_gemm(A8, B.to(FP8).mT, ONE, x, OFFS))
    ],
    "quantize": [
        ("x", A, kernels_dsl.quantize),
        ("scale", ONE, lambda x: kernels_dsl.quantize(A, scale=x)),
    ],
    "quantize_qkv": [("q", Q, lambda x: kernels_dsl.quantize_qkv(x, x, x))],
    "attention": [("k", Q, lambda x: kernels_dsl.attention(Q, x, Q))],
    "scaled_dot_product_attention": [
        ("query", Q, lambda x: kernels_dsl.scaled_dot_product_attention(x, *[Q] * 2))
    ],
    "attention_varlen": [
        ("v", B.mT, lambda x: kernels_dsl.attention_varlen(*[B] * 2, x, *[STARTS] * 2, max_seqlen_q=16))
    ],
    "attention_fp8": [
        ("q", Q8, lambda x: kernels_dsl.attention_fp8(x, Q8, Q8)),
        ("v_descale", ONE, lambda x: kernels_dsl.attention_fp8(Q8, Q8, Q8, v_descale=x)),
        ("out", Q.clone(), lambda x: kernels_dsl.attention_fp8(Q8, Q8, Q8, out=x)),
    ],
    "attention_fp8_varlen": [
        (
            "k_descale",
            ONE,
            lambda x: kernels_dsl.attention_fp8_varlen(
                *[B.to(FP8)] * 3, *[STARTS] * 2, max_seqlen_q=16, k_descale=x
            ),
        )
    ],
    "attention_decode": [
        ("k_cache", Q, lambda x: kernels_dsl.attention_decode(Q[:, :1], x, Q)),
        ("out", Q[:, :1].clone(), lambda x: kernels_dsl.attention_decode(Q[:, :1], Q, Q, out=x)),
    ],
    "append_kv": [
        ("k", Q[0], lambda x: kernels_dsl.append_kv(x, Q[1], *CACHES, SLOTS)),
        ("v_cache", Q.clone(), lambda x: kernels_dsl.append_kv(Q[0], Q[1], CACHES[0], x, SLOTS)),
    ],
    "merge_states": [("lse", LSE, lambda x: kernels_dsl.merge_states(HEADS, x))],
    "bsr_gemm": [
        ("b", WIDE, lambda x: kernels_dsl.bsr_gemm(SPARSE, x)),
        ("a", WIDE.mT, lambda x: kernels_dsl.bsr_gemm(x, SPARSE)),
        ("the values", SPARSE.values, lambda x: kernels_dsl.bsr_gemm(SPARSE.with_values(x), WIDE)),
    ],
    "bsr_sddmm": [("a", WIDE, lambda x: kernels_dsl.bsr_sddmm(x, WIDE.mT, SPARSE))],
    "bsr_scaled_gemm": [
        (
            "scale_b",
            ONE,
            lambda x: kernels_dsl.bsr_scaled_gemm(FP8_SPARSE, WIDE.to(FP8), torch.ones(FP8_SPARSE.nnz), x),
        )
    ],
    "scaled_linear": [("x", A, lambda x: kernels_dsl.scaled_linear(x, A))],
    "ScaledLinear": [("x", A, lambda x: kernels_dsl.ScaledLinear(16, 16, dtype=BF16)(x))],
    "BsrLinear": [("a", WIDE.mT, lambda x: kernels_dsl.BsrLinear(SPARSE)(x))],
}
# Public names that take no tensors, or whose tensors no kernel of this library multiplies.
OTHERS = {
    "autotune_gemm", "register_torch_attention", "register_transformers_attention",
    "register_transformers_paged_attention", "kernel_function", "checked", "sm_margin", "BlockLists",
    "BsrTensor", "register_epilogue", "GemmConfig", "Schedule", "Sm80AttentionConfig", "Sm90AttentionConfig",
    "Sm80GemmConfig", "Sm90GemmConfig", "LinearEpilogue", "__version__", "advise",
}  # fmt: skip


def test_all_operations_are_here():
    names = {name for name in kernels_dsl.__all__ if not name.endswith("supports")}
    assert names == CALLS.keys() | OTHERS


@pytest.mark.parametrize(
    ("operation", "argument"), [(name, case[0]) for name, cases in CALLS.items() for case in cases]
)
def test_a_tangent_is_refused(operation, argument):
    """Nothing runs on these tensors, which are on the CPU: the refusal comes before anything else."""
    ((_, value, call),) = (case for case in CALLS[operation] if case[0] == argument)
    told = pytest.raises(NotImplementedError, match=f"^{argument} has a tangent, must have none: .* has no")
    with forward_ad.dual_level():
        with told:
            call(forward_ad.make_dual(value, torch.ones_like(value)))
    with told:
        torch.func.jvp(call, (value,), (torch.ones_like(value),))
