"""`merge_states` in the emulator, compared with float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops.serving import merge_operation
from lowering import emulator
from tests.ops.serving.merge_cases import States, check, random_states

ARCHES = ("sm_80", "sm_90a")


@pytest.mark.parametrize("arch", ARCHES)
def test_shapes_strides_and_dtypes(arch, seed):
    with emulator.run(arch=arch):
        check(random_states((3, 2, 5, 4, 64), torch.bfloat16, seed))
        check(random_states((2, 9, 3, 20), torch.float16, seed), torch.float32)
        check(random_states((5, 3, 7), torch.float32, seed), torch.bfloat16)
        out, lse = random_states((2, 5, 3, 32), torch.bfloat16, seed)
        check(States(out.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), lse.mT.contiguous().mT))


def test_more_elements_than_a_launch_makes(seed, monkeypatch):
    """As a rank of two has at a million queries: in parts along the largest mode."""
    parts = []
    monkeypatch.setattr(merge_operation, "_MOST", 1000)
    inner = merge_operation.Launch.__call__
    monkeypatch.setattr(
        merge_operation.Launch, "__call__", lambda self, *args: parts.append(1) or inner(self, *args)
    )
    with emulator.run(arch="sm_90a"):
        check(random_states((3, 2, 51, 4, 16), torch.bfloat16, seed))
        assert len(parts) == 8  # of 7 rows each
        check(random_states((2, 130, 2, 8), torch.bfloat16, seed), torch.float32)
        with pytest.raises(ValueError, match=r"out has shape .* beside its largest mode"):
            kernels_dsl.merge_states(torch.ones(2, 9, 9, 100, 16), torch.ones(2, 9, 9, 100))


def test_a_rows_bits_depend_on_its_states_alone(seed):
    out, lse = random_states((4, 33, 2, 64), torch.bfloat16, seed)
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
    out, lse = random_states((3, 4, 2, 8), torch.float32, seed)
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
