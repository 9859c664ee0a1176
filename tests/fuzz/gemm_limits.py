"""Gates whose derivative jumps: rounding a product turns the gradient of an element near the limit on or off.

Any two computations in 16 bits round differently, so that neither's error says what the other's may be. Where
all rows of an operand are the same, several such elements add up.
"""

from __future__ import annotations

import torch

from kernels_dsl.blocks.epilogue.gates import GATES

LIMITS = {"swiglu_oai": 7.0}
"""Gate -> the size of gate and up from which on their derivative is 0."""
_ROUNDING = 2.0**-7
"""Part of a limit that bfloat16 products near it may be off by, an ulp."""


def at_limits(name: str, z: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """The error that the gradient of each element of z (float64) near the limit may have; 0 elsewhere.

    received: the gradient of the gate's result, float64.
    """
    limit, gate = LIMITS[name], GATES[name]
    exact, slack = gate.backward(received, z), torch.zeros_like(z)
    for factor in (1.0 - _ROUNDING, 1.0 + _ROUNDING):
        near = (z.abs() > limit) != ((z * factor).abs() > limit)
        slack += (gate.backward(received, z * factor) - exact).abs().where(near, 0.0)
    return slack
