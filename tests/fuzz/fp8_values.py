"""Contents of fp8 operands and of their scales, and comparisons that know NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from reference import inputs, tolerance
from reference import quantize as quantization
from reference.buffers import bits
from tests.fuzz.memory import Layout

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS, NORMAL, PATTERNS = "integers", "normal", "patterns"
"""Kinds of contents. Small integers, with scales that are powers of two; N(0, 1) with outliers, quantised;
one of the 256 bit patterns in each row of one operand, with scales that may be 0, subnormal or NaN. Results
of the first and last kind are exact."""
Fill = Callable[[int], torch.Tensor]
_OUTLIER = 256.0
"""About the largest of N(0, 1) with outliers."""


def operand(
    shape: Sequence[int], dtype: torch.dtype, seed: int, device: str, contents: str, odd: bool = False
) -> Fill:
    """fp8 values (…, rows, K). odd: the operand that has the bit patterns; the other holds powers of two."""

    def fill(generation: int) -> torch.Tensor:
        own = seed + generation
        if contents == INTEGERS:
            return inputs.integers(shape, dtype, seed=own, device=device)
        if contents == NORMAL:
            limit = quantization.largest(dtype)
            x = inputs.outliers(shape, torch.float32, seed=own, device=device) * (limit / _OUTLIER)
            return x.clamp(-limit, limit).to(dtype)
        generator = torch.Generator().manual_seed(own)
        if not odd:
            powers = torch.randint(-1, 2, tuple(shape), generator=generator).float().exp2()
            return powers.to(dtype).to(device)
        places = torch.zeros(tuple(shape), dtype=torch.uint8)
        if places.numel():
            rows = (*shape[:-1], 1)
            column = torch.randint(0, shape[-1], rows, generator=generator)
            found = torch.randint(0, 256, rows, generator=generator, dtype=torch.uint8)
            places.scatter_(-1, column, found)
        return places.view(dtype).to(device)

    return fill


def scales(shape: Sequence[int], seed: int, device: str, contents: str, odd: bool = False) -> Fill:
    """float32 scales. odd: those that may be 0, subnormal or NaN beside bit patterns."""

    def fill(generation: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + generation)
        if contents == NORMAL:
            made = torch.exp2(-9.0 + 4.0 * torch.rand(tuple(shape), generator=generator))
            return made.to(device)
        made = torch.randint(-2, 3, tuple(shape), generator=generator).float().exp2()
        chance = torch.rand(tuple(shape), generator=generator)
        made = torch.where(chance < 0.1, -made, made)
        if contents == INTEGERS:
            return torch.where(chance > 0.97, 0.0, made).to(device)
        if odd:
            for n, value in enumerate((0.0, 2.0**-130, math.nan)):
                made = torch.where((chance > 0.7 + n / 10) & (chance < 0.75 + n / 10), value, made)
        return made.to(device)

    return fill


def with_exact_sums(layout: Layout, contents: str) -> Layout:
    """`layout` of an operand (…, rows, K) without stride 0 along K, where sums must be exact: of so many
    equal products the tensor cores drop digits."""
    if contents == NORMAL or not layout.expanded:
        return layout
    last = len(layout.order) - 1
    return replace(layout, expanded=tuple(mode for mode in layout.expanded if mode != last))


def check_same(found: torch.Tensor, expected: torch.Tensor, what: str, signed: bool = True) -> None:
    """Equal shapes, dtypes and bits; any NaN equals any other, and without `signed` 0 equals -0."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)} not {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} not {expected.dtype}"
    x, y = found.contiguous(), expected.contiguous()
    wrong = (bits(x) != bits(y)) & ~(x.float().isnan() & y.float().isnan())
    if not signed:
        wrong &= x.float() != y.float()
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise tolerance.ToleranceError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ; the first is at {place}: "
            f"{float(x[place])!r}, must be {float(y[place])!r}"
        )


def check_values(found: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """The exact result, rounded once; any NaN equals any other, and 0 equals -0."""
    expected = exact.to(found.dtype)
    nan = found.isnan() & expected.isnan()
    tolerance.check_exact(found.masked_fill(nan, 0.0), expected.masked_fill(nan, 0.0), case=what)
