"""Scales of fp8 caches, and what a GPU needs for such caches."""

from __future__ import annotations

import torch

from kernels_dsl.ops.target import Target

FP8 = torch.float8_e4m3fn


def check_cache_scale(
    name: str, scale: torch.Tensor | None, dtype: torch.dtype, heads: int, batch: int = 0
) -> None:
    """TypeError or ValueError where `scale` is not one of caches of `dtype`; with `batch`, one for each
    sequence and head is right too."""
    if scale is None:
        return
    if dtype != FP8:
        raise ValueError(f"{name} is given, must be None: the caches are {dtype}, not {FP8}")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} is {scale.dtype}, must be torch.float32")
    if scale.shape in ((), (1,), (heads,)) or (batch and scale.shape == (batch, heads)):
        return
    more = f", or ({batch}, {heads}), one a sequence and head" if batch else ""
    raise ValueError(f"{name} has shape {tuple(scale.shape)}, must be () or ({heads},), one a head{more}")


def check_converts(target: Target, name: str) -> None:
    """ValueError where the GPU has no conversion between fp8 and fp16, which came with 8.9."""
    if not target.device.has_fp8:
        major, minor = target.device.capability
        raise ValueError(
            f"{name} is {FP8} on {target.device.name} of compute capability {major}.{minor}, must be of 8.9 "
            "or later, which convert fp8"
        )
