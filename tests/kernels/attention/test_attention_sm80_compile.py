"""The SM80-class attention as compiled, without a GPU: instructions, registers, shared memory, errors.

A choice of the shipped kernels for sm_89 and sm_80; TEST_ALL_KERNELS=1 takes all of them, and sm_90a as well.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig, sm80_config, sm80_list_config
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.attention.plan import FUNCTIONS
from lowering.errors import CompileError

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72), (128, 64)]
VARIANTS = {
    "dense": AttentionVariant(),
    "causal": AttentionVariant(right=True),
    "window": AttentionVariant(right=True, left=True),
    "softcap": AttentionVariant(right=True, softcap=True),
    "sinks": AttentionVariant(right=True, sinks=True),
    "additive": AttentionVariant(mask="additive"),
    "boolean": AttentionVariant(mask="boolean"),
}
ALL = os.environ.get("TEST_ALL_KERNELS") == "1"
FEW = [
    ("sm_89", (64, 64), "window"),
    ("sm_89", (96, 96), "softcap"),
    ("sm_89", (128, 128), "dense"),
    ("sm_89", (128, 128), "window"),
    ("sm_89", (128, 128), "boolean"),
    ("sm_89", (192, 192), "sinks"),
    ("sm_89", (256, 256), "boolean"),
    ("sm_89", (256, 256), "causal"),
    ("sm_80", (192, 128), "window"),
    ("sm_80", (256, 256), "softcap"),
]
CASES = (
    [(arch, dims, name) for arch in ("sm_89", "sm_80", "sm_90a") for dims in DIMS for name in VARIANTS]
    if ALL
    else FEW
)


def _compile(
    arch: str,
    dims: tuple[int, int],
    variant: AttentionVariant,
    config: Sm80AttentionConfig | None = None,
    packed: bool = False,
    paged: bool = False,
):
    def tensor(heads: int, dim: int) -> torch.Tensor:
        shape = (512, heads, dim) if packed else (2, 256, heads, dim)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    dim, dim_v = dims
    lse = torch.empty((4, 512) if packed else (2, 4, 256), device="meta")
    listed = (ints(2, 4, 2), ints(2, 4, 2, 2)) * 2 if variant.lists else None
    sinks = torch.empty(4, device="meta") if variant.sinks else None
    mask = None
    if variant.mask is not None:
        dtype = torch.uint8 if variant.mask == "boolean" else torch.bfloat16
        mask = torch.empty((2, 4, 256, 256), dtype=dtype, device="meta")
    tensors = (tensor(4, dim), tensor(2, dim), tensor(2, dim_v), tensor(4, dim_v), lse)
    seqlens = (ints(3), ints(3), None) if packed else None
    if paged:
        caches = (torch.empty((9, 16, 2, x), dtype=torch.bfloat16, device="meta") for x in dims)
        tensors, seqlens = (tensors[0], *caches, *tensors[3:]), (ints(3), None, ints(2), ints(2, 4))
    chosen = sm80_config(dim, dim_v, variant, DEVICES_BY_ARCH[arch].smem_bytes)
    scalars, rest = (1.0, 1.0, 0, 0), (seqlens, 256, listed, sinks, mask, None)
    layout = "thd" if packed else "bshd"
    return FUNCTIONS["sm80"].compile(
        *tensors, *scalars, *rest, arch=arch, layout=layout, config=config or chosen, variant=variant
    )


def _check(kernel, arch: str) -> None:
    """Both products by mma.sync from ldmatrix, copies by cp.async, no spills, within shared memory."""
    (found,) = kernel.resources()
    assert found.entry == "attention_sm80_0"
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0
    assert found.count("HMMA") and found.count("LDSM") and found.count("LDGSTS") and not found.count("HGMMA")
    assert any(name.startswith("LDSM") and ".MT88" in name for name in found.instructions)  # transposed: V
    assert found.dynamic_smem is None or found.dynamic_smem <= DEVICES_BY_ARCH[arch].smem_bytes


@pytest.mark.parametrize(("arch", "dims", "name"), CASES)
def test_chosen_tiles(arch, dims, name):
    _check(_compile(arch, dims, VARIANTS[name]), arch)


def test_packed():
    _check(_compile("sm_89", (128, 128), VARIANTS["causal"], packed=True), "sm_89")


PAGED = [("sm_89", (64, 64), "causal"), ("sm_80", (128, 128), "window"), ("sm_80", (256, 256), "causal")]


@pytest.mark.parametrize(
    ("arch", "dims", "name"),
    [(a, d, n) for a in ("sm_80", "sm_89", "sm_90a") for d in DIMS for n in VARIANTS] if ALL else PAGED,
)
def test_pages(arch, dims, name):
    _check(_compile(arch, dims, VARIANTS[name], packed=True, paged=True), arch)


@pytest.mark.parametrize("block", [(128, 128), (64, 64)] if ALL else [(128, 128)])
def test_lists(block):
    variant = VARIANTS["causal"]
    config, split = sm80_list_config(128, 128, variant, block, DEVICES_BY_ARCH["sm_89"].smem_bytes)
    _check(_compile("sm_89", (128, 128), replace(variant, lists=split), config), "sm_89")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Sm80AttentionConfig(96, 64, 64, 64), "tile_m must be 16 or 32 rows for each of 4 warps; it is 96"),
        (Sm80AttentionConfig(64, 72, 64, 64), "tile_n must be a multiple of 16; it is 72"),
        (Sm80AttentionConfig(64, 48, 96, 96), "128 threads copy 32 rows at a time"),
    ],
)
def test_impossible_tiles_are_named(config, message):
    with pytest.raises(CompileError, match=message):
        _compile("sm_89", (config.dim, config.dim_v), VARIANTS["dense"], config)
