"""Gradients of attention where two CTAs share a tile of keys, in the emulator, against float64 autograd.

Head dimensions 192 and 128: 128 keys a tile, 64 a CTA. TEST_ALL_KERNELS=1 takes more shapes.
"""

from __future__ import annotations

import os

import pytest
import torch

from kernels_dsl.config.attention_backward import sm90_backward_config
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.gradient_cases import check_gradients, check_packed, leaves

ALL = os.environ.get("TEST_ALL_KERNELS") == "1"
DIMS = (192, 128)


def test_which_heads_take_pairs():
    found = [sm90_backward_config(*dims, True).ctas for dims in (DIMS, (256, 128), (256, 256), (128, 128))]
    assert found == [2, 2, 1, 1]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("lengths", [(66, 70), (200, 260)] + [(130, 64), (1, 129), (200, 129)] * ALL)
def test_causal(lengths, deterministic, seed):
    """The second CTA of a pair has all of its keys, some and none of them."""
    with emulator.run(arch="sm_90a"):
        tensors = leaves((2, 1), lengths, DIMS, seed)
        check_gradients(tensors, Masking(right=0), causal=True, deterministic=deterministic)


def test_packed(seed):
    """NaN after a sequence's last key, also in the keys of the other CTA. Last blocks are not full: a role of
    dQ may be at its end while the others clear rows of a block that is not its CTA's."""
    with emulator.run(arch="sm_90a"):
        check_packed((40, 0, 100), (70, 10, 150), (66, 10, 140), DIMS, seed)


@pytest.mark.parametrize("dims", [DIMS, (128, 128)])
def test_garbage_in_new_memory(dims, seed, monkeypatch):
    """Between query tiles of packed sequences lie numbers that no tile has: turns are counted where they were
    set to zero. Of -1 a tile that waits for its turn would never see the end."""
    empty = torch.empty

    def negative(*args, **options):
        made = empty(*args, **options)
        if made.dtype == torch.float32:
            made.view(torch.int32).fill_(-1)
        return made

    with emulator.run(arch="sm_90a", max_steps=600_000):
        monkeypatch.setattr(torch, "empty", negative)
        check_packed((64, 20), (129, 20), (129, 20), dims, seed)


@pytest.mark.parametrize("dims", [(256, 128), (192, 192), (128, 256)] if ALL else [(256, 128)])
def test_other_heads(dims, seed):
    """Sums out of registers, or in one buffer."""
    with emulator.run(arch="sm_90a"):
        check_gradients(leaves((1, 1), (70, 140), dims, seed), Masking())
