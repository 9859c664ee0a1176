"""A maximum that falls behind where scores move it often: large scales, keys that grow along the walk."""

from __future__ import annotations

import pytest
from attention_cases import inputs, run

from kernels_dsl.config.attention import Sm90AttentionConfig
from lowering import emulator
from reference.attention import Masking


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_90a"):
        yield


def test_large_scale_under_a_causal_mask(seed):
    """Scores are N(0, 64), so that most blocks bring some row of a warp a new maximum."""
    config = Sm90AttentionConfig(64, 64, 64, 64, lazy_rescale=True)
    tensors = inputs((1, 100, 2, 64), (1, 230, 1, 64), 64, seed)
    run(tensors, Masking(right=0), causal=True, scale=1.0, config=config)


def test_a_jump_beyond_the_range_of_an_exponential(seed):
    """The walk ends at the first keys, whose scores are hundreds larger: older outputs vanish."""
    config = Sm90AttentionConfig(128, 64, 64, 64, lazy_rescale=True)
    q, k, v = inputs((1, 128, 1, 64), (1, 200, 1, 64), 64, seed)
    k[:, :64] *= 100
    run((q, k, v), Masking(), config=config)


def test_rows_that_see_their_first_key_late(seed):
    """In the first blocks of a visit some rows of a warp see no key at all yet."""
    config = Sm90AttentionConfig(64, 32, 64, 64, lazy_rescale=True)
    tensors = inputs((1, 64, 1, 64), (1, 200, 1, 64), 64, seed)
    run(tensors, Masking(left=10, right=40), window=(10, 40), scale=0.7, config=config)
