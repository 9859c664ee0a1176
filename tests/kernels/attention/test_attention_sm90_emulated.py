"""The SM90 attention kernel itself in the emulator, where the op does not reach: schedules of few CTAs."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant, Sm90AttentionConfig
from kernels_dsl.ops.attention.plan import FUNCTIONS
from lowering import emulator
from reference.attention import Masking, attention
from reference.inputs import normal
from reference.tolerance import check


def _launch(tensors, out, variant, config, counter, ctas):
    scale = tensors[0].shape[-1] ** -0.5
    rest = (None, 0, None, None, None, None, counter, ctas)
    FUNCTIONS["sm90"](
        *tensors, out, None, scale, 1.0, 0, 0, *rest, layout="bshd", config=config, variant=variant
    )


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("ctas", [1, 3])
def test_every_tile_is_computed_once(queued, ctas, seed):
    """Ten tiles for few CTAs, in two launches: the queue is back at its start after each."""
    shapes = ((1, 130, 2, 64), (1, 150, 1, 64), (1, 150, 1, 64))
    tensors = tuple(normal(shape, torch.bfloat16, seed=seed + i) for i, shape in enumerate(shapes))
    counter = torch.zeros(1, dtype=torch.int32) if queued else None
    expected, _ = attention(*tensors, Masking(right=0))
    peer, _ = attention(*tensors, Masking(right=0), dtype=torch.bfloat16)
    config = Sm90AttentionConfig(64, 64, 64, 64)
    for _ in range(2):
        out = torch.full((1, 130, 2, 64), torch.nan).bfloat16()
        with emulator.run(arch="sm_90a"):
            _launch(tensors, out, AttentionVariant(right=True), config, counter, ctas)
        check(*(x.transpose(1, 2) for x in (out, expected, peer)), ulps=4.0)
        assert counter is None or int(counter) == 0


@pytest.mark.parametrize("tile", [(128, 64), (192, 80)])
def test_warpgroups_that_take_turns(tile, seed):
    """Two and three consumer warpgroups with ping-pong, more tiles than CTAs, ragged in both directions."""
    shapes = ((1, 450, 1, 64), (1, 330, 1, 64), (1, 330, 1, 64))
    tensors = tuple(normal(shape, torch.bfloat16, seed=seed + i) for i, shape in enumerate(shapes))
    expected, _ = attention(*tensors)
    peer, _ = attention(*tensors, dtype=torch.bfloat16)
    out = torch.full((1, 450, 1, 64), torch.nan).bfloat16()
    with emulator.run(arch="sm_90a"):
        _launch(tensors, out, AttentionVariant(), Sm90AttentionConfig(*tile, 64, 64), None, 2)
    check(*(x.transpose(1, 2) for x in (out, expected, peer)), ulps=4.0)


def test_a_maximum_that_lags(seed):
    """Scores that keep growing along the keys, in steps below and above what a lazy maximum tolerates."""
    shapes = ((1, 64, 1, 64), (1, 512, 1, 64), (1, 512, 1, 64))
    q, k, v = (normal(shape, torch.bfloat16, seed=seed + i) for i, shape in enumerate(shapes))
    k = k * torch.linspace(8.0, 0.1, 512).view(1, -1, 1, 1).bfloat16()  # visited from the right
    expected, _ = attention(q, k, v)
    peer, _ = attention(q, k, v, dtype=torch.bfloat16)
    out = torch.full((1, 64, 1, 64), torch.nan).bfloat16()
    config = Sm90AttentionConfig(64, 64, 64, 64, lazy_rescale=True)
    with emulator.run(arch="sm_90a"):
        _launch((q, k, v), out, AttentionVariant(), config, None, 1)
    check(*(x.transpose(1, 2) for x in (out, expected, peer)), ulps=4.0)
