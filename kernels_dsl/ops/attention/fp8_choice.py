"""The choice of tiles for a call of fp8 attention, in either family of kernels."""

from __future__ import annotations

from dataclasses import replace

from kernels_dsl.config.attention import (
    DESCALE_KEYS,
    LATER_SHARES,
    AttentionVariant,
    Extent,
    sm90_fp8_config,
    sm90_list_config,
    split_of,
    turning_v,
)
from kernels_dsl.config.attention_sm80 import sm80_config, sm80_list_config
from kernels_dsl.config.attention_table import AttentionConfig, why_not
from kernels_dsl.config.problem import Device
from kernels_dsl.ops.attention.arguments import AttentionCall
from kernels_dsl.ops.target import Target


def check_choice(call: AttentionCall, target: Target, by_block: bool, config: AttentionConfig | None) -> None:
    """ValueError where no kernel serves a call, or not with a caller's `config`, with the reason. `by_block`:
    blocks of keys have factors."""
    device = target.device
    if not device.has_wgmma and (device.widens_fp8 or not device.has_fp8):
        major, minor = device.capability
        raise ValueError(
            f"q is on {device.name} of compute capability {major}.{minor}, must be 8.9, 9.0 or 12.0: earlier "
            "ones have no matrix instructions of fp8, 10.0 makes `mma.sync` of it from fp16 ones, and spills"
        )
    if config is None:
        return
    target.families(config.family, "q")
    reason = why_not(config, call.dim, call.dim_v, device, element_bytes=1)
    reason = reason or _why_not_fp8(config, call, by_block)
    if by_block and DESCALE_KEYS % config.tile_n:
        reason = f"tile_n must divide {DESCALE_KEYS} where blocks of keys have descales"
    if reason is not None:
        raise ValueError(f"config is {config}, must be one that fits: {reason}")


def choose(
    call: AttentionCall, device: Device, by_block: bool, config: AttentionConfig | None
) -> tuple[AttentionConfig, AttentionVariant]:
    """The configuration of a call that has queries and keys, `config` if that is one, and its variant."""
    if config is None:
        extent = Extent(call.longest_q, call.k_len, call.batch * call.heads, device.sm_count)
        return _of_table(call, device, extent, by_block)
    split = None if call.block is None else split_of(config, call.block)
    return config, replace(call.variant, lists=split)


def _of_table(
    call: AttentionCall, device: Device, extent: Extent, by_block: bool
) -> tuple[AttentionConfig, AttentionVariant]:
    dims, variant, split = (call.dim, call.dim_v), call.variant, None
    chosen: AttentionConfig
    if not device.has_wgmma:
        if call.block is None:
            chosen = sm80_config(*dims, variant, device.smem_bytes, extent, element_bytes=1)
        else:
            chosen, split = sm80_list_config(*dims, variant, call.block, device.smem_bytes, element_bytes=1)
    elif call.block is None:
        hopper = sm90_fp8_config(*dims, variant, extent, by_block)
        chosen = hopper if call.packed else turning_v(hopper, variant, extent)
    else:
        chosen, split = sm90_list_config(*dims, call.block, element_bytes=1)
    return chosen, replace(variant, lists=split)


def _why_not_fp8(config: AttentionConfig, call: AttentionCall, by_block: bool) -> str | None:
    """The reason why a caller's configuration does not fit fp8 operands or the call; None where it does."""
    if config.tile_n % 32:
        return "tile_n must be a multiple of 32"
    group = call.heads // call.kv_heads
    if config.pack > 1 and (group % config.pack or not call.variant.packable or call.block is not None):
        return f"pack must be a divisor of the {group} query heads of a KV head, and 1 with sinks or blocks"
    if config.turns_v and (call.packed or config.tile_m > 128 or config.ctas_per_sm > 1):
        return "turns_v must be False with packed sequences, tile_m above 128, and several CTAs an SM"
    if config.later_v and (call.packed or call.block is not None or config.tile_m != 192):
        return "later_v must be 0 with packed sequences, block lists, and tile_m below 192"
    if config.later_v not in range(LATER_SHARES) or config.later_keys not in (32, 64):
        return f"later_v must be from 0 to {LATER_SHARES - 1}, and later_keys 32 or 64"
    if config.watch_sums and (by_block or call.variant.sinks):
        return "watch_sums must be False with sinks, and where blocks of keys have descales"
    return None
