"""What the tests of fp8 attention share: quantised inputs, two references, the tolerance."""

from __future__ import annotations

import torch

import kernels_dsl
from reference import quantize as ref
from reference.attention import Masking, attention, attention_fp8_weights
from reference.inputs import normal
from reference.tolerance import check

LSE_TOLERANCE = 5e-3
"""Absolute: QGMMA keeps 13 bits below the leading one of its largest product."""


def quantised(shape: tuple[int, int, int, int], seed: int, device: str = "cpu"):
    """(fp8 values (B, S, H, D), scales (B, H), float64 values) of N(0, 1), a scale a head."""
    x = normal(shape, torch.bfloat16, seed=seed, device=device).transpose(1, 2)
    values, scale = ref.quantize(x, scaling="matrix")
    exact = ref.dequantize(values, scale, "matrix").transpose(1, 2)
    return values.transpose(1, 2), scale[..., 0, 0], exact


def run(shapes: tuple, seed: int, masking: Masking, device: str = "cpu", **options) -> torch.Tensor:
    """Call `kernels_dsl.attention_fp8` with `options`, which must mean `masking`, and compare; the output.

    shapes: of q, k, v, (B, S, H, D). The error against float64 on the very fp8 values is at most twice that
    of weights rounded to e4m3 once.
    """
    parts = [quantised(shape, seed + i, device) for i, shape in enumerate(shapes)]
    names = ("q_descale", "k_descale", "v_descale")
    out, lse = kernels_dsl.attention_fp8(
        *(part[0] for part in parts),
        **dict(zip(names, (part[1] for part in parts))),
        return_lse=True,
        **options,
    )
    exact = [part[2] for part in parts]
    scale = options.get("scale")
    expected, expected_lse = attention(*exact, masking, scale=scale)
    peer = attention_fp8_weights(*exact, masking, scale=scale).bfloat16()
    assert out.dtype == torch.bfloat16
    check(*(x.transpose(1, 2) for x in (out, expected, peer)), ulps=4.0)
    same = lse.double() == expected_lse  # -inf among them
    assert bool((same | ((lse - expected_lse).abs() < LSE_TOLERANCE)).all())
    return out
