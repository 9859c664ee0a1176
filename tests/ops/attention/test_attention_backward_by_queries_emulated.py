"""dQ by tiles of queries, in a kernel of its own, in the emulator: against float64, and bit by bit.

TEST_ALL_KERNELS=1 takes more shapes.
"""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention_dq import Sm90DqConfig
from kernels_dsl.ops.attention import backward
from lowering import emulator
from reference.attention import Masking, allowed_by_lists, attention
from tests.ops.attention.gradient_cases import check_gradients, check_packed, leaves
from tests.ops.attention.test_attention_backward_blocks_emulated import _lists
from tests.samples import ALL


@pytest.fixture(autouse=True)
def launched(monkeypatch) -> list[Sm90DqConfig]:
    """The rule takes all that the kernel can; what it was launched with."""
    found: list[Sm90DqConfig] = []
    choose = backward.choose_dq

    def recorded(*arguments):
        found.append(choose(*arguments))
        return found[-1]

    monkeypatch.setattr(backward, "is_by_queries", lambda call, config: True)
    monkeypatch.setattr(backward, "choose_dq", recorded)
    return found


def test_many_steps_of_grouped_heads(launched, seed):
    """More steps than stages, several tiles of queries, causal and through the log-sum-exp."""
    with emulator.run(arch="sm_90a", seed=seed):
        tensors = leaves((2, 1), (260, 700), (64, 64), seed)
        check_gradients(tensors, Masking(right=0), through_lse=True, causal=True)
    assert launched[0].tile_m == 128


@pytest.mark.parametrize("block", [(64, 64), (128, 128)] + [(64, 128), (128, 64)] * ALL)
def test_lists(launched, block, seed):
    """Masked and whole blocks, more than stages; a query block without keys; ends inside of blocks."""
    lengths = (block[0] + 10, 5 * block[1] - 30)
    lists = _lists([[[2, 0, 4, 1], []], [[4], [3, 0, 2]]], 5, block, full=1)
    shape = (1, 2, 2 * block[0], 5 * block[1])
    allowed = allowed_by_lists(lists.tensors, block, shape)[..., : lengths[0], : lengths[1]]
    with emulator.run(arch="sm_90a", seed=seed):
        tensors = leaves((2, 1), lengths, (64, 64), seed)
        found = check_gradients(tensors, Masking(allowed=allowed), True, blocks=lists)
    assert not found[0][:, block[0] :, 0].any()
    assert launched[0].tile_m == min(block[0], 128)


@pytest.mark.parametrize("dims", [(256, 256), (192, 128)] if ALL else [(192, 128)])
def test_packed_sequences_and_what_lies_after_their_ends(launched, dims, seed):
    with emulator.run(arch="sm_90a", seed=seed):
        check_packed((70, 0, 33), (150, 20, 0), (140, 20, 0), dims, seed)
    assert launched[0] is not None


def test_two_schedules_give_the_same_bits(seed):
    """And so do calls that ask for dQ alone."""
    q, k, v = (x.detach() for x in leaves((2, 1), (140, 300), (64, 64), seed))
    out, lse = attention(q, k, v, Masking(right=0))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(q.dtype)
    tensors = (do, None, q, k, v, out.to(q.dtype), lse.float())
    found = []
    for n in range(2):
        with emulator.run(arch="sm_90a", seed=seed + n, sms=1 + n):
            run = torch.ops.kernels_dsl.attention_backward
            found.append(run(*tensors, causal=True, needs_kv=n == 0)[0])
    assert torch.equal(*found)


def test_integers_are_exact():
    """Scores of 0 over 64 keys whose values cancel: P is 1 / 64, row sums are 0, dP and 64 dS integers."""
    generator = torch.Generator().manual_seed(0)
    k, half, do = (torch.randint(-1, 2, (1, n, 1, 64), generator=generator).double() for n in (64, 32, 70))
    q, v = torch.zeros(1, 70, 1, 64).double().requires_grad_(), torch.cat((half, -half), dim=1)
    (expected,) = torch.autograd.grad(attention(q, k, v, Masking())[0], q, do)
    tensors = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    with emulator.run(arch="sm_90a"):
        (found,) = torch.autograd.grad(kernels_dsl.attention(*tensors), tensors[:1], do.bfloat16())
    expected = (512 * expected).round() / 512  # which its own exponentials leave a little beside that
    assert expected.any() and torch.equal(found, expected.bfloat16())
