"""The tiles of an attention call, for either family of kernels."""

from __future__ import annotations

from kernels_dsl.config import attention_sm80
from kernels_dsl.config.attention import (
    AttentionVariant,
    Extent,
    Sm90AttentionConfig,
    sm90_config,
    sm90_list_config,
    sm90_why_not,
)
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig, sm80_config, sm80_list_config
from kernels_dsl.config.problem import Device

AttentionConfig = Sm90AttentionConfig | Sm80AttentionConfig


def choose(
    family: str,
    dim: int,
    dim_v: int,
    variant: AttentionVariant,
    device: Device,
    extent: Extent | None = None,
) -> AttentionConfig:
    """The tile of `family` for these head dimensions, where key blocks are not listed."""
    if family == "sm90":
        return sm90_config(dim, dim_v, variant, extent)
    return sm80_config(dim, dim_v, variant, device.smem_bytes, extent)


def choose_for_lists(
    family: str, dim: int, dim_v: int, variant: AttentionVariant, block: tuple[int, int], device: Device
) -> tuple[AttentionConfig, tuple[int, int]]:
    """The tile for listed blocks of (query, key) `block`, and how many of them such a block is.

    ValueError where no tile divides the block.
    """
    if family == "sm90":
        return sm90_list_config(dim, dim_v, block, with_mask=variant.mask is not None)
    return sm80_list_config(dim, dim_v, variant, block, device.smem_bytes)


def why_not(
    config: AttentionConfig, dim: int, dim_v: int, device: Device, element_bytes: int = 2
) -> str | None:
    """Says why a caller's configuration cannot serve these head dimensions on `device`; None if it can."""
    for name, size, padded in (("dim", dim, config.dim), ("dim_v", dim_v, config.dim_v)):
        if padded < size:
            return f"{name} is {padded}, the head dimension is {size}"
    if isinstance(config, Sm80AttentionConfig):
        return attention_sm80.why_not(config, device.smem_bytes, element_bytes)
    return sm90_why_not(config, device.smem_bytes, element_bytes)
