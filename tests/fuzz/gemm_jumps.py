"""Functions whose derivative jumps: rounding a product turns the gradient of an element near it on or off.

Any two computations in 16 bits round differently, so that neither's error says what the other's may be. Where
all rows of an operand are the same, several such elements add up.
"""

from __future__ import annotations

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.blocks.epilogue.gates import GATES

JUMPS = {"swiglu_oai": (-7.0, 7.0), "relu": (0.0,), "reglu": (0.0,)}
"""Activation or gate -> where its derivative jumps."""
_ROUNDED = 2.0**-7
"""Part of a product that rounding it to bfloat16 may take, an ulp."""
_SUMMED = {torch.float32: 2.0**-10}
"""Part of the sum of all sizes that a sum may be off by, of operands that become tf32."""
_SUMMED_IN_FLOAT32 = 2.0**-18
"""The same of others."""


def at_jumps(
    name: str, z: torch.Tensor, sizes: torch.Tensor, received: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The error that the gradient of each element of z near a jump may have; 0 elsewhere. float64.

    z: what the function is given. sizes: the same sums, of the sizes of their elements. received: the
    gradient of the function's result. dtype: the operands'.
    """
    backward = GATES[name].backward if name in GATES else ACTIVATIONS[name].backward
    assert backward is not None
    exact, slack = backward(received, z), torch.zeros_like(z)
    for jump in JUMPS[name]:
        room = (_SUMMED.get(dtype, _SUMMED_IN_FLOAT32) * sizes).clamp(min=_ROUNDED * abs(jump))
        for other in (z - room, z + room):
            near = (z > jump) != (other > jump)
            slack += (backward(received, torch.where(near, other, z)) - exact).abs()
    return slack
