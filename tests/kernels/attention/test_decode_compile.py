"""Decoding attention as compiled, without a GPU: instructions, registers, shared memory.

TEST_ALL_KERNELS=1 takes all head dimensions, rows and variants.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.decode import (
    LEAST_MERGED_DIM,
    MOST_AT_ONCE,
    DecodeConfig,
    decode_config,
    tma_config,
)
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.serving.decode_operation import FUNCTION

VARIANTS = {
    "causal": AttentionVariant(right=True),
    "all": AttentionVariant(right=True, left=True, softcap=True, sinks=True),
}
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FEW = [
    ("sm_90a", 128, 4, "causal", BF16, False),
    ("sm_80", 128, 16, "all", BF16, False),
    ("sm_86", 256, 64, "all", BF16, False),
    ("sm_89", 64, 32, "causal", BF16, False),
    ("sm_90a", 128, 4, "causal", E4M3, False),
    ("sm_89", 256, 64, "all", E4M3, False),
    ("sm_90a", 128, 4, "all", BF16, True),
    ("sm_89", 256, 4, "all", E4M3, True),
]
CASES = [
    (arch, dim, rows, name, cache, packed)
    for cache in (BF16, E4M3)
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a")[2 if cache is E4M3 else 0 :]
    for dim in (64, 72, 96, 128, 192, 256)
    for rows in (4, 32, 64)
    for name in VARIANTS
    for packed in (False, True)
]


@pytest.mark.parametrize(
    ("arch", "dim", "rows", "name", "kept", "packed"), CASES if os.environ.get("TEST_ALL_KERNELS") else FEW
)
def test_compiled(arch, dim, rows, name, kept, packed):
    """No kernel spills; of packed queries, rows are those of one query's heads."""
    device, dim = DEVICES_BY_ARCH[arch], -(-dim // 16) * 16
    config = decode_config(dim, rows, 4, device, kept.itemsize)
    of_item = compiled(arch, dim, rows, name, kept, packed, config)
    assert of_item.count("LDGSTS") and config.outputs_bytes <= config.stats_offset
    assert bool(of_item.count("F2FP.F16.E4M3")) == (kept is E4M3)


LOADED = [(dim, rows, name, page, BF16) for dim in (32, 64, 96, 128) for rows in (4, 32) for name in VARIANTS
          for page in (16, 128)]  # fmt: skip
LOADED += [(dim, 4, name, page, E4M3) for dim in (64, 128) for name in VARIANTS for page in (16, 128)]
FEW_LOADED = [(128, 4, "causal", 16, BF16), (128, 32, "all", 128, BF16), (128, 4, "all", 16, E4M3)]


@pytest.mark.parametrize(
    ("dim", "rows", "name", "page", "kept"), LOADED if os.environ.get("TEST_ALL_KERNELS") else FEW_LOADED
)
def test_loaded_by_tma(dim, rows, name, page, kept):
    """One instruction a box of K or V in a step."""
    device = DEVICES_BY_ARCH["sm_90a"]
    config = tma_config(decode_config(dim, rows, 4, device, kept.itemsize), device, page)
    of_item = compiled("sm_90a", dim, rows, name, kept, rows == 4 and name == "all", config)
    assert of_item.entry.startswith("attention_decode_sm90")
    # The first blocks of K come before the loop.
    assert of_item.count("UTMALDG") == 3 * config.tile_n // min(page, 64)


def compiled(
    arch: str, dim: int, rows: int, name: str, kept: torch.dtype, packed: bool, config: DecodeConfig
) -> Any:
    """The compiled kernel of items; its checks, and those of the one that merges, if there is one."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    variant, fp8 = VARIANTS[name], kept is E4M3
    q, cache, ints = tensor(2, rows // 4, 8, dim), tensor(64, 16, 2, dim, dtype=kept), torch.int32
    starts = tensor(3, dtype=ints) if packed else None
    if packed:
        q, config = q.flatten(0, 1), replace(config, tiled=True)
    else:
        merges = rows <= 16 and dim >= LEAST_MERGED_DIM
        whole = not merges and dim >= LEAST_MERGED_DIM and name == "causal"
        config = replace(config, merges=merges, whole_rows=whole, at_once=MOST_AT_ONCE)
    scale = tensor(2, 2, dtype=torch.float32) if fp8 else None
    arguments = (
        q, cache, cache, q, None, 1 << 20, 1 << 19, tensor(2, dtype=ints),
        tensor(2, 32, dtype=ints), tensor(8, dtype=torch.float32) if variant.sinks else None,
        scale, scale, starts, 1.0, 1.0, 0, 0, rows // 4, 1, 7 * rows, 64,
    )  # fmt: skip
    kernel = FUNCTION.compile(*arguments, arch=arch, config=config, variant=variant, early=arch == "sm_90a")
    of_item, *merge = sorted(kernel.resources(), key=lambda part: "merge" in part.entry)
    assert bool(merge) != config.merges
    for part in (*merge, of_item):
        assert part.stack_bytes == part.spill_loads == part.spill_stores == 0
    assert of_item.count("HMMA") and of_item.count("LDSM")
    assert config.smem_bytes <= DEVICES_BY_ARCH[arch].smem_bytes
    return of_item
