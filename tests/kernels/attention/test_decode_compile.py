"""Decoding attention as compiled, without a GPU: instructions, registers, shared memory.

TEST_ALL_KERNELS=1 takes all head dimensions, rows and variants.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.decode import decode_config
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
    """Neither kernel spills; of packed queries, rows are those of one query's heads."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    device, variant = DEVICES_BY_ARCH[arch], VARIANTS[name]
    fp8 = kept is E4M3
    dim = -(-dim // 16) * 16
    config = decode_config(dim, rows, 4, device, kept.itemsize)
    q, cache, ints = tensor(2, rows // 4, 8, dim), tensor(64, 16, 2, dim, dtype=kept), torch.int32
    starts = tensor(3, dtype=ints) if packed else None
    if packed:
        q, config = q.flatten(0, 1), replace(config, tiled=True)
    scale = tensor(2, 2, dtype=torch.float32) if fp8 else None
    parts = tensor(2 * 2 * 8 * rows, config.dim, dtype=torch.float32)
    arguments = (
        q, cache, cache, q, None, parts, parts[:, 0].contiguous(), tensor(2, dtype=ints),
        tensor(2, 32, dtype=ints), tensor(8, dtype=torch.float32) if variant.sinks else None,
        scale, scale, starts, 1.0, 1.0, 0, 0, rows // 4, 1, 7 * rows, 64,
    )  # fmt: skip
    kernel = FUNCTION.compile(*arguments, arch=arch, config=config, variant=variant, early=arch == "sm_90a")
    found = {part.entry.removesuffix("_0").removesuffix("_1"): part for part in kernel.resources()}
    assert sorted(found) == ["attention_decode", "attention_decode_merge"]
    for part in found.values():
        assert part.stack_bytes == part.spill_loads == part.spill_stores == 0
    of_item = found["attention_decode"]
    assert of_item.count("HMMA") and of_item.count("LDSM") and of_item.count("LDGSTS")
    assert config.smem_bytes <= device.smem_bytes and config.outputs_bytes <= config.stats_offset
    assert bool(of_item.count("F2FP.F16.E4M3")) == fp8
