"""Keys in pages by PyTorch's own calls: `varlen_attn` with `block_table`, in the emulator."""

from __future__ import annotations

import inspect

import pytest
import torch

from kernels_dsl.integrations import torch_attention
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.paged_cases import paged

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
pytestmark = pytest.mark.skipif(
    "block_table" not in inspect.signature(varlen.varlen_attn).parameters,
    reason="varlen_attn of this torch has no block_table",
)


@pytest.fixture
def on_the_cpu():
    """The kernels are those of PyTorch's operators for CPU tensors, for which PyTorch has none."""
    handle = torch_attention._activated("CPU")
    yield
    handle.remove()


def _arguments(case):
    options = {"seqused_k": case.used, "block_table": case.table, "enable_gqa": True}
    longest = int(case.starts.diff().max())
    return (case.q, case.k, case.v, case.starts, None, longest, int(case.used.max())), options


def test_prompts_and_chunks(on_the_cpu, kernels, seed):
    """9 queries of eight heads on one: too many for the kernel of decoding, unless bits are to be kept."""
    case = paged(((9, 20), (1, 30), (0, 9)), 16, seed, heads=(8, 1))
    arguments, options = _arguments(case)
    aux = varlen.AuxRequest(lse=True)
    with emulator.run(arch="sm_80"), torch.no_grad():
        for splits in (None, 1):
            out, lse = varlen.varlen_attn(
                *arguments, window_size=(-1, 0), return_aux=aux, num_splits=splits, **options
            )
            case.compare(out, lse, Masking(right=0))
    assert kernels == ["attention_varlen", "attention_decode"]


def test_decoding_into_a_tensor(on_the_cpu, kernels, seed):
    case = paged(((1, 20), (2, 40)), 16, seed, heads=(8, 1))
    arguments, options = _arguments(case)
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    out = torch.full_like(case.q, float("nan"))
    aux = varlen.AuxRequest(lse=True)
    with emulator.run(arch="sm_80"), torch.no_grad():
        same, lse = varlen.varlen_attn_out(out, *arguments, window_size=(30, 0), return_aux=aux, **options)
    assert same is out and kernels == ["attention_decode"]
    case.compare(out, lse, Masking(left=30, right=0))


def test_what_torch_runs_itself(monkeypatch):
    """Pages without starts of queries, and dropout."""
    x, table = torch.zeros(1, 8, 1, 64), torch.zeros(1, 1, dtype=torch.int32)
    for dropout, pages in ((0.0, table), (0.5, None)):
        with pytest.raises(torch_attention.Declined):
            torch_attention.flash_forward(
                x, x, x, None, None, *(8, 8, dropout, False, False), block_table=pages
            )
