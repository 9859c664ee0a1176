"""Gradients near a gate's limits: what rounding turns on or off is allowed for, and nothing else."""

from __future__ import annotations

import torch

from kernels_dsl.blocks.epilogue.gates import GATES
from reference import tolerance
from tests.fuzz.gemm_limits import at_limits

GATE = GATES["swiglu_oai"]
WHOLE = (128, 136)


def _gradients(seed: int) -> tuple[torch.Tensor, ...]:
    """d_b of rows of a that are all the same: rounded as a kernel does and as PyTorch does, exact, slack."""
    generator = torch.Generator().manual_seed(seed)
    a, b, c, received = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((1, 128), (128, 136), (63, 136), (63, 68))
    )
    a = a.expand(63, 128)
    z = a.double() @ b.double() + c.double()
    rounded = GATE.backward(received.float(), z.bfloat16().float()).bfloat16()
    twice = GATE.backward(received.float(), ((a.float() @ b.float()).bfloat16() + c).float()).bfloat16()
    across, wide = a.mT.double(), received.double()
    slack = across.abs() @ at_limits("swiglu_oai", z, wide)
    exact = across @ GATE.backward(wide, z)
    return (across @ rounded.double()).bfloat16(), (across @ twice.double()).bfloat16(), exact, slack


def test_rounding_alone_is_over_the_bound_and_within_it_with_slack() -> None:
    over = 0
    for seed in range(40):
        found, peer, exact, slack = _gradients(seed)
        over += not tolerance.measure(found, exact, peer, ulps=4.0, tile=WHOLE).ok
        allowed = exact + (peer.double() - exact).abs() + slack
        tolerance.check(found, exact, allowed, ulps=4.0, tile=WHOLE)
        assert not tolerance.measure(found + 100, exact, allowed, ulps=4.0, tile=WHOLE).ok
    assert over > 0


def test_there_is_none_away_from_the_limits() -> None:
    z = torch.tensor([[6.9, -6.9, 7.2, 0.0, 3.0, 7.0001]], dtype=torch.float64)
    slack = at_limits("swiglu_oai", z, torch.ones(1, 3, dtype=torch.float64))
    assert (slack > 0.01).tolist() == [[False, False, False, False, False, True]]
