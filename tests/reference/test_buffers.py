"""Guarded memory notices what is written outside of a view and what is not written inside of it."""

from __future__ import annotations

import pytest
import torch

from reference.buffers import (
    GuardError,
    check_guards,
    check_output,
    check_written,
    embed,
    poisoned,
    strides_of,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fresh_output_is_nan_everywhere_and_not_written(dtype):
    output = poisoned((5, 7), dtype)
    assert torch.isnan(output.tensor).all()
    assert torch.isnan(output.buffer).all()
    with pytest.raises(GuardError, match=r"35 of 35 elements.*first is at \(0, 0\)"):
        check_written(output)


@pytest.mark.parametrize("contiguous", [0, 1, 2])
@pytest.mark.parametrize("pad", [0, 3])
def test_a_full_write_passes_in_every_layout(contiguous, pad):
    output = poisoned((4, 5, 6), torch.float32, contiguous=contiguous, pad=pad, offset=1)
    assert output.tensor.stride(contiguous) == 1
    output.tensor.fill_(1.0)
    check_output(output)


def test_one_missing_element_is_named():
    output = poisoned((5, 7), torch.bfloat16, pad=2)
    output.tensor.copy_(torch.ones(5, 7))
    output.tensor[4, 6] = torch.nan  # a NaN that was computed is not the poison
    check_output(output)
    fresh = poisoned((5, 7), torch.bfloat16, pad=2)
    fresh.tensor[:4].fill_(1.0)
    fresh.tensor[4, :6].fill_(1.0)
    with pytest.raises(GuardError, match=r"1 of 35 .*\(4, 6\)"):
        check_output(fresh)


@pytest.mark.parametrize("place", [-1, 7, 9 * 5])
def test_a_write_outside_is_seen(place):
    output = poisoned((5, 7), torch.float16, pad=2)
    output.tensor.fill_(0.0)
    output.buffer[output.tensor.storage_offset() + place] = 0.0
    with pytest.raises(GuardError, match=f"1 elements outside.*first is {place} elements from its start"):
        check_guards(output)


def test_alignment_is_what_was_asked_for():
    for offset in (0, 1, 2, 8):
        tensor = poisoned((3, 3), torch.float16, offset=offset).tensor
        assert (tensor.storage_offset() * 2) % 256 == 2 * offset


def test_embed_keeps_values_and_lies_between_nans(seed):
    values = torch.randn(6, 5)
    view = embed(values, contiguous=0, pad=3, offset=1)
    assert torch.equal(view, values)
    assert view.stride() == (1, 9)
    base = view._base
    assert base is not None
    assert int(torch.isfinite(base).sum()) == 30


def test_empty_views():
    output = poisoned((0, 7), torch.float32)
    check_output(output)


def test_strides():
    assert strides_of((2, 3, 4)) == (12, 4, 1)
    assert strides_of((2, 3, 4), contiguous=1) == (12, 1, 3)
    assert strides_of((2, 3, 4), contiguous=1, pad=5) == (32, 1, 8)
    assert strides_of((2, 3, 4), contiguous=0) == (1, 8, 2)
    assert strides_of(()) == ()
