"""Seeded inputs. Everything follows from the seed, so that a printed seed is a reproduction.

Small tensors are made on the CPU and copied, so that a case has the same values on every device; above
`_cpu_elements` the device's own generator is used, since filling gigabytes through the host takes minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

_cpu_elements = 1 << 24
_FLOAT32_EXACT = 1 << 24  # integers up to here are exact in float32, the accumulator of every kernel


def case_seed(*parts: object) -> int:
    """A seed (63 bits) from the description of a case: the same parts give the same seed in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def make_on_device(least: int = 0) -> None:
    """From now on tensors of more than `least` elements are made on their device, with other values there."""
    global _cpu_elements
    _cpu_elements = least


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _generator(shape: Sequence[int], device: torch.device | str, seed: int) -> torch.Generator:
    place = "cpu" if _numel(shape) <= _cpu_elements else device
    return torch.Generator(place).manual_seed(seed)


def normal(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    scale: float = 1.0,
) -> torch.Tensor:
    """N(0, scale²), rounded to `dtype`. Contiguous."""
    generator = _generator(shape, device, seed)
    values = torch.randn(tuple(shape), generator=generator, device=generator.device, dtype=torch.float32)
    return (values * scale).to(dtype).to(device)


def outliers(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    fraction: float = 1e-3,
    scale: float = 64.0,
) -> torch.Tensor:
    """N(0, 1), about `fraction` of the elements `scale` times as large: activations of large models."""
    generator = _generator(shape, device, seed)
    values = torch.randn(tuple(shape), generator=generator, device=generator.device, dtype=torch.float32)
    chosen = torch.rand(tuple(shape), generator=generator, device=generator.device) < fraction
    return torch.where(chosen, values * scale, values).to(dtype).to(device)


def integers(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    limit: int = 3,
    zeros: float = 0.75,
) -> torch.Tensor:
    """Integers in [-limit, limit], about `zeros` of them 0, exact in every dtype that the kernels take.

    Sums of products of such operands are exact in float32, in any order, while K · limit² < 2²⁴; then a
    correct kernel matches the reference bit for bit, whatever its tiling, split or pipeline. Mostly zeros,
    so that a wrong term changes the sum instead of drowning in it. `assert_exact_sums` checks the bound.
    """
    if not 1 <= limit <= 16:
        raise ValueError(f"limit is {limit}, must be from 1 to 16 (exact in every dtype down to fp8)")
    generator = _generator(shape, device, seed)
    place = generator.device
    values = torch.randint(1, limit + 1, tuple(shape), generator=generator, device=place, dtype=torch.int8)
    negative = torch.rand(tuple(shape), generator=generator, device=place) < 0.5
    empty = torch.rand(tuple(shape), generator=generator, device=place) < zeros
    values = torch.where(negative, -values, values).masked_fill(empty, 0)
    return values.to(dtype).to(device)


def assert_exact_sums(a: torch.Tensor, b: torch.Tensor) -> None:
    """ValueError unless every partial sum of a (…, M, K) @ b (…, K, N) is an integer exact in float32."""
    if a.numel() == 0 or b.numel() == 0:
        return
    for name, operand in (("a", a), ("b", b)):
        if not torch.equal(operand, operand.round()):
            raise ValueError(f"{name} holds values that are not integers")
    bound = a.shape[-1] * float(a.abs().max()) * float(b.abs().max())
    if bound >= _FLOAT32_EXACT:
        raise ValueError(f"K·max|a|·max|b| is {bound:.0f}, must be below 2²⁴ for float32 sums to be exact")
