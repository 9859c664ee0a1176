"""Attention reads and writes what is its own alone: empty calls, lengths that are wrong, rows of `out` that
belong to no sequence. Both families, 16-bit and fp8 operands, in the emulator, which reports all else.

Each case runs with one of the four kinds; TEST_ALL_KERNELS=1 takes all of them.
"""

from __future__ import annotations

import re

import pytest
import torch

import kernels_dsl
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from lowering.emulator.reports import Kind
from reference.buffers import check_output, poisoned
from tests.samples import pairs

FP8 = torch.float8_e4m3fn
KINDS = ("sm90", "sm80", "fp8 sm90", "fp8 sm80")


@pytest.fixture(params=KINDS)
def kind(request):
    """Family and operands; the arch is that of the family's own GPUs with fp8."""
    with emulator.run(arch=_arch(request.param)) as session:
        yield request.param
    assert not session.reports


def _arch(kind):
    return "sm_89" if kind == "fp8 sm80" else "sm_90a"


def _inputs(kind, q_shape, k_shape, seed=0):
    """(q, k, v) of normal numbers, of the operands' dtype."""
    generator = torch.Generator().manual_seed(seed)
    dtype = FP8 if kind.startswith("fp8") else torch.bfloat16
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (q_shape, k_shape, k_shape)]


def _dense(kind, *tensors, **options):
    if kind.startswith("fp8"):
        return kernels_dsl.attention_fp8(*tensors, **options)
    return kernels_dsl.attention(*tensors, family=kind, **options)


def _varlen(kind, *arguments, **options):
    if kind.startswith("fp8"):
        return kernels_dsl.attention_fp8_varlen(*arguments, **options)
    return kernels_dsl.attention_varlen(*arguments, family=kind, **options)


def _sums(*values):
    return torch.tensor(values, dtype=torch.int32)


def _bytes(*tensors):
    return [x.clone().view(torch.uint8) for x in tensors]


DENSE = (
    ((0, 5, 7, 2, 1), True),
    ((1, 0, 7, 2, 1), True),
    ((1, 0, 300, 2, 1), True),
    ((1, 5, 0, 2, 1), True),
    ((1, 0, 0, 2, 1), False),
    ((1, 5, 7, 0, 1), False),
    ((1, 5, 7, 0, 0), False),
)


@pytest.mark.parametrize(("kind", "case"), pairs("dense calls of nothing", KINDS, DENSE), indirect=["kind"])
def test_dense_calls_of_nothing(kind, case):
    (batch, q_len, k_len, heads, kv_heads), causal = case
    tensors = _inputs(kind, (batch, q_len, heads, 64), (batch, k_len, kv_heads, 64))
    out, lse = _dense(kind, *tensors, causal=causal, return_lse=True)
    assert out.shape == (batch, q_len, heads, 64) and lse.shape == (batch, heads, q_len)
    assert not out.any() and bool((lse == -torch.inf).all())


PACKED = (
    ((0, 0, 0), (0, 3, 9), (7, 9), 0),  # rows of no sequence
    ((0, 0, 0), (0, 3, 9), (0, 9), 0),
    ((0,), (0,), (7, 9), 0),
    ((0,), (0,), (7, 9), 5),
    ((0, 3, 5), (0, 0, 0), (7, 0), 3),
)
LAUNCHED = ((0, 0, 0), (0, 3, 9), (7, 9), 5)
"""A launch of which no CTA has rows."""


@pytest.mark.parametrize(
    ("kind", "case"),
    [*pairs("packed calls of nothing", KINDS, PACKED), *((kind, LAUNCHED) for kind in KINDS)],
    indirect=["kind"],
)
def test_packed_calls_of_nothing(kind, case):
    """Of `out` rows of sequences are 0, others and the memory around them stay, copied or not."""
    cu_q, cu_k, rows, longest = case
    tensors = _inputs(kind, (rows[0], 2, 64), (rows[1], 1, 64))
    arguments = (*tensors, _sums(*cu_q), _sums(*cu_k), longest)
    out, lse = _varlen(kind, *arguments, causal=True, return_lse=True)
    assert out.shape == (rows[0], 2, 64) and lse.shape == (2, rows[0])
    launches = longest > 0 and min(len(cu_q) - 1, *rows) > 0
    for pad in (3,) if launches else (0, 8, 3):
        written = poisoned((rows[0], 2, 64), torch.bfloat16, pad=pad)
        (before,) = _bytes(written.buffer)
        assert _varlen(kind, *arguments, causal=True, out=written.tensor) is written.tensor
        real = cu_q[-1] if longest else 0
        assert not written.tensor[:real].any()
        written.tensor[:real] = poisoned((real, 2, 64), torch.bfloat16).tensor
        assert torch.equal(written.buffer.view(torch.uint8), before)


def test_lists_without_entries(kind):
    lists = BlockLists(torch.zeros(1, 1, 1).int(), torch.zeros(1, 1, 1, 0).int(), block=(128, 64))
    tensors = _inputs(kind, (1, 40, 1, 64), (1, 70, 1, 64))
    out, lse = _dense(kind, *tensors, blocks=lists, return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())


WRONG = (
    ((0, 70, 60, 90), (0, 80, 20, 100), (-5, 2**31 - 1, 7)),
    ((-9, 30, 150, 40), (-20, 40, 130, 50), None),
)


@pytest.mark.parametrize(("kind", "case"), pairs("wrong lengths", KINDS, WRONG), indirect=["kind"])
def test_wrong_lengths_reach_no_memory_of_others(kind, case):
    """The result is wrong, but inputs and all memory around them and the output are as they were.

    Where sums fall, two sequences claim the same rows and race to write them: nothing else may be reported.
    """
    cu_q, cu_k, used = case
    tensors = _inputs(kind, (90, 2, 64), (100, 1, 64))
    before = _bytes(*tensors)
    written = poisoned((90, 2, 64), torch.bfloat16, pad=8)
    written.tensor.zero_()
    used = None if used is None else _sums(*used)
    with emulator.run(arch=_arch(kind), raise_on_report=False) as session:
        _, lse = _varlen(
            kind, *tensors, _sums(*cu_q), _sums(*cu_k), 90, seqused_k=used, causal=True, out=written.tensor,
            return_lse=True,
        )  # fmt: skip
    for report in session.reports:
        writes = re.match(
            r"(asynchronous )?write of .* does not wait for the (asynchronous )?write", report.message
        )
        assert report.kind is Kind.RACE and writes, str(report)
    check_output(written)
    assert all(map(torch.equal, _bytes(*tensors), before)) and lse.shape == (2, 90)


def test_max_seqlen_q_too_small_and_too_large(kind):
    """Rows beyond it keep what they were, as those do that belong to no sequence, copied or not."""
    tensors = _inputs(kind, (280, 1, 64), (90, 1, 64))
    sums = _sums(0, 260, 270), _sums(0, 50, 90)
    expected = _varlen(kind, *tensors, *sums, 2**31 - 1)[:270]
    for pad in (0,) if kind.endswith("sm80") else (3,):
        written = poisoned((280, 1, 64), torch.bfloat16, pad=pad)
        out = _varlen(kind, *tensors, *sums, 64, out=written.tensor)
        kept = poisoned((280, 1, 64), torch.bfloat16, pad=pad).tensor.view(torch.int16)
        done = torch.tensor([*range(64), *range(260, 270)])
        assert torch.equal(out[done], expected[done])
        same = (out.view(torch.int16) == kept).flatten(1).all(dim=1)
        assert bool(same[192:260].all() and same[270:].all())


@pytest.mark.parametrize(("kind", "heads"), pairs("rows of no sequence", KINDS, (1, 2)), indirect=["kind"])
def test_rows_of_no_sequence_keep_what_out_held(kind, heads):
    """Also where strides or the address are odd, so that `out` is copied."""
    tensors = _inputs(kind, (60, heads, 64), (70, 1, 64))
    arguments = (*tensors, _sums(0, 20, 45), _sums(0, 30, 70), 25)
    expected = _varlen(kind, *arguments)[:45]
    for pad in (8, 3):
        written = poisoned((60, heads, 64), torch.bfloat16, pad=pad)
        kept = written.tensor.normal_(generator=torch.Generator().manual_seed(pad)).clone()
        (before,) = _bytes(written.buffer)
        out = _varlen(kind, *arguments, out=written.tensor)
        assert out is written.tensor and torch.equal(out[:45], expected)
        out[:45] = kept[:45]
        assert torch.equal(written.buffer.view(torch.uint8), before)


def _document(b, h, i, j, documents):
    return documents[b, i] == documents[b, j]


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_functions_read_nothing_before_a_sequence_without_keys(family):
    """There j is 0, not -1."""
    documents = torch.zeros(2, 40, dtype=torch.int32)
    tensors = _inputs(family, (60, 1, 64), (20, 1, 64))
    with emulator.run(arch="sm_90a") as session:
        out = kernels_dsl.attention_varlen(
            *tensors,
            _sums(0, 30, 60),
            _sums(0, 0, 20),
            30,
            mask_mod=_document,
            aux=(documents,),
            family=family,
        )
    assert not session.reports
    assert not out[:30].any() and out[30:].any()


@pytest.mark.parametrize("kind", ["sm90", "fp8 sm90"])
def test_an_operator_call_keeps_rows_of_no_sequence(kind):
    """The operator makes an output, of which `out` gets the rows of sequences."""
    tensors = _inputs(kind, (7, 2, 64), (0, 1, 64))
    written = poisoned((7, 2, 64), torch.bfloat16, pad=3)
    (before,) = _bytes(written.buffer)
    torch.compiler.reset()
    call = torch.compile(_varlen, fullgraph=True, backend="eager")
    with emulator.run(arch="sm_90a"):
        call(kind, *tensors, _sums(0, 3, 5), _sums(0, 0, 0), 3, out=written.tensor)
    assert not written.tensor[:5].any()
    written.tensor[:5] = poisoned((5, 2, 64), torch.bfloat16).tensor
    assert torch.equal(written.buffer.view(torch.uint8), before)


def test_checked_calls_of_fp8():
    """In the mode that looks at values, fp8 calls are looked at as the others are."""
    tensors = _inputs("fp8", (7, 2, 64), (0, 1, 64))
    with emulator.run(arch="sm_90a"), kernels_dsl.checked():
        with pytest.raises(ValueError, match=r"cu_seqlens_q.2. is 2, must be at least 3, the one before"):
            kernels_dsl.attention_fp8_varlen(*tensors, _sums(0, 3, 2), _sums(0, 0, 0), 3)
        with pytest.raises(ValueError, match=r"cu_seqlens_q\[-1\] is 5, must be 7, the rows of q, or out be"):
            kernels_dsl.attention_fp8_varlen(*tensors, _sums(0, 3, 5), _sums(0, 0, 0), 3)
