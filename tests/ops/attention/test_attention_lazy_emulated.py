"""A maximum that falls behind where scores move it often: large scales, keys that grow along the walk.

With fp8 operands it is watched sums that take a new reference (`blocks.attention.softmax_no_max`).
"""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention import attention_fp8_cases as fp8
from tests.ops.attention.attention_cases import inputs, run


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


def test_watched_sums(seed):
    """Sums that pass the limit, rows without a key in their first blocks, and hardly any scale."""
    config = Sm90AttentionConfig(64, 32, 64, 32, watch_sums=True)
    shapes = ((1, 64, 1, 64), (1, 140, 1, 64), (1, 140, 1, 32))
    for scale in (0.5, 1e-30):
        fp8.run(shapes, seed, Masking(left=10, right=40), window=(10, 40), scale=scale, config=config)


def test_warpgroups_with_nothing_to_do(seed):
    """Blocks hidden from the first warpgroups of a tile, and a tile with rows of the first one alone."""
    config = Sm90AttentionConfig(192, 64, 64, 64, watch_sums=True, linear_exps=3)
    shapes = ((1, 200, 1, 64), (1, 230, 1, 64), (1, 230, 1, 64))
    fp8.run(shapes, seed, Masking(right=0), causal=True, config=config, lse=False)


def test_linear_exponentials(seed):
    """With NaN for a key too, which a row whose weight of it is linear must show."""
    config = Sm90AttentionConfig(64, 64, 64, 64, watch_sums=True, linear_exps=3)
    shapes = ((1, 64, 1, 64), (1, 140, 1, 64), (1, 140, 1, 64))
    fp8.run(shapes, seed, Masking(), scale=0.3, config=config, lse=False)
    q, k, v = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in shapes)
    for key in (2, 3, 12):
        k.view(torch.uint8)[:, key] = 0x7F
        assert bool(kernels_dsl.attention_fp8(q, k, v, scale=0.3, config=config).isnan().all())
        k.view(torch.uint8)[:, key] = 0x38


def test_watched_sums_of_one_weight():
    """The key that a row is all of comes last: older weights vanish, and its own is not rounded."""
    q, k, v = ((torch.ones(1, 64 * n, 1, 64) / 8).to(torch.float8_e4m3fn) for n in (1, 2, 2))
    k.view(torch.uint8)[:, 3] = torch.full((64,), 256.0).to(torch.float8_e4m3fn).view(torch.uint8)
    v.view(torch.uint8)[:, 3] = torch.arange(64).float().to(torch.float8_e4m3fn).view(torch.uint8)
    config = Sm90AttentionConfig(64, 64, 64, 64, watch_sums=True, linear_exps=3)
    out = kernels_dsl.attention_fp8(q, k, v, scale=1.0, config=config)
    assert torch.equal(out, v[:, 3:4].bfloat16().expand_as(out))
