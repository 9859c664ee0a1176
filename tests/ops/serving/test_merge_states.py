"""`merge_states` in the emulator, compared with float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

import kernels_dsl
from lowering import emulator

ARCHES = ("sm_80", "sm_90a")


class States(NamedTuple):
    """States to merge."""

    out: torch.Tensor
    lse: torch.Tensor


def _states(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> States:
    """States of which some have seen no key, and hold NaN there."""
    generator = torch.Generator().manual_seed(seed)
    out, lse = torch.randn(shape, generator=generator), 4 * torch.randn(shape[:-1], generator=generator)
    lse[0, ..., 0] = -math.inf
    lse[:, ..., -1] = -math.inf
    out[lse == -math.inf] = math.nan
    return States(out.to(dtype), lse)


def _expected(states: States) -> States:
    lse = states.lse.double()
    merged = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(merged == -math.inf, 0.0, merged))
    out = states.out.double().masked_fill(lse[..., None] == -math.inf, 0.0)
    return States((weights[..., None] * out).sum(0), merged)


def _check(states: States, out_dtype: torch.dtype | None = None) -> None:
    merged, expected = kernels_dsl.merge_states(*states, out_dtype=out_dtype), _expected(states)
    assert merged.out.dtype == (out_dtype or states.out.dtype) and merged.lse.dtype == torch.float32
    ulp = torch.finfo(merged.out.dtype).eps
    torch.testing.assert_close(merged.out.double(), expected.out, rtol=ulp, atol=4e-6)
    torch.testing.assert_close(merged.lse.double(), expected.lse, rtol=1e-6, atol=1e-6)
    for h in (0, -1):  # no NaN of a state that nobody wrote
        assert not merged.out[..., h, :].isnan().any()
    assert not merged.out[..., -1, :].any() and (merged.lse[..., -1] == -math.inf).all()


@pytest.mark.parametrize("arch", ARCHES)
def test_shapes_strides_and_dtypes(arch, seed):
    with emulator.run(arch=arch):
        _check(_states((3, 2, 5, 4, 64), torch.bfloat16, seed))
        _check(_states((2, 9, 3, 20), torch.float16, seed), torch.float32)
        _check(_states((5, 3, 7), torch.float32, seed), torch.bfloat16)
        out, lse = _states((2, 5, 3, 32), torch.bfloat16, seed)
        _check(States(out.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), lse.mT.contiguous().mT))


def test_a_rows_bits_depend_on_its_states_alone(seed):
    out, lse = _states((4, 33, 2, 64), torch.bfloat16, seed)
    with emulator.run(arch="sm_90a"):
        merged = kernels_dsl.merge_states(out, lse)
        few = kernels_dsl.merge_states(out[:, 7:9].contiguous(), lse[:, 7:9])
        (same, _) = kernels_dsl.merge_states(out[1:2], lse[1:2])
    assert torch.equal(few.out, merged.out[7:9]) and torch.equal(few.lse, merged.lse[7:9])
    assert torch.equal(same[:, 0], out[1, :, 0])  # of a single state, exactly itself


def test_no_rows():
    with emulator.run(arch="sm_90a"):
        assert kernels_dsl.merge_states(torch.ones(2, 0, 3, 8), torch.ones(2, 0, 3)).out.shape == (0, 3, 8)
        lse = torch.zeros(2, 3)
        torch.testing.assert_close(kernels_dsl.merge_states(torch.ones(2, 3, 0), lse).lse, lse.logsumexp(0))


def test_gradients(seed):
    out, lse = _states((3, 4, 2, 8), torch.float32, seed)
    d_out, d_lse = torch.randn(4, 2, 8), torch.randn(4, 2)
    d_out[..., 1, :], d_lse[..., 1] = 0.0, 0.0

    def grads(merge, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (out, lse)]
        merged = merge(*leaves)
        return torch.autograd.grad(merged, leaves, (d_out.to(dtype), d_lse.to(dtype)))

    def formula(out, lse):
        keys = lse != -math.inf
        weights = torch.where(keys, lse, -100.0).softmax(0)
        merged = (weights[..., None] * torch.where(keys[..., None], out, 0.0)).sum(0)
        return merged, torch.where(keys, lse, -100.0).logsumexp(0)

    with emulator.run(arch="sm_90a"):
        found = grads(kernels_dsl.merge_states, torch.float32)
    for x, wanted in zip(found, grads(formula, torch.float64)):
        torch.testing.assert_close(x.double(), wanted, rtol=1e-5, atol=1e-5)


def test_errors_name_the_argument():
    out, lse = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4)
    wrong = [
        ((out.int(), lse), {}, TypeError, "out is torch.int32"),
        ((out, lse.half()), {}, TypeError, "lse is torch.float16"),
        ((out, lse.mT), {}, ValueError, r"lse has shape \(2, 4, 3\), must be \(2, 3, 4\)"),
        ((out[0, 0], lse[0, 0]), {}, ValueError, r"out has shape \(4, 8\)"),
        ((out[:0], lse[:0]), {}, ValueError, "at least one state"),
        ((out, lse), {"out_dtype": torch.int8}, TypeError, "out_dtype is torch.int8"),
    ]
    with emulator.run(arch="sm_90a"):
        for arguments, options, error, words in wrong:
            with pytest.raises(error, match=f"^{words}" if words[0] in "ol" else words):
                kernels_dsl.merge_states(*arguments, **options)
