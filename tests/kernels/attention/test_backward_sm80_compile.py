"""The SM80-class attention backward as compiled, without a GPU: instructions, registers, memory, errors.

A choice of the shipped kernels; TEST_ALL_KERNELS=1 takes all of them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_backward import Sm80BackwardConfig, sm80_backward_config
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.attention.backward import FUNCTIONS
from lowering.errors import CompileError

VARIANTS = {
    "dense": AttentionVariant(),
    "causal": AttentionVariant(right=True),
    "window": AttentionVariant(right=True, left=True),
}
# (arch, head dimensions, mask, deterministic, packed): the last two and a window take the most registers.
FEW = [
    ("sm_89", (64, 64), "window", True, True),
    ("sm_89", (96, 96), "causal", True, False),
    ("sm_89", (128, 128), "dense", False, False),
    ("sm_86", (128, 128), "window", True, True),
    ("sm_80", (128, 128), "window", True, True),
    ("sm_80", (96, 96), "window", True, True),
    ("sm_89", (256, 256), "window", True, True),
    ("sm_86", (192, 128), "window", True, True),
    ("sm_80", (256, 256), "causal", False, False),
    ("sm_90a", (64, 64), "window", True, False),
    ("sm_90a", (256, 128), "window", True, False),
]
CASES = (
    [
        (arch, dims, name, fixed, packed)
        for arch in ("sm_80", "sm_86", "sm_89", "sm_90a")
        for dims in (
            (32, 32),
            (64, 64),
            (96, 96),
            (128, 128),
            (128, 64),
            (40, 72),
            (192, 128),
            (256, 256),
            (256, 128),
        )
        for name in VARIANTS
        for fixed in (True, False)
        for packed in (True, False)
    ]
    if os.environ.get("TEST_ALL_KERNELS") == "1"
    else FEW
)


def _compile(
    arch: str,
    variant: AttentionVariant,
    config: Sm80BackwardConfig,
    packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
):
    def tensor(heads: int, dim: int) -> torch.Tensor:
        return torch.empty((512, heads, dim) if packed else (2, 256, heads, dim), dtype=dtype, device="meta")

    def flat(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device="meta")

    sizes = ((4, config.dim), (2, config.dim), (2, config.dim_v), (4, config.dim_v))
    tensors = [tensor(heads, dim) for heads, dim in (*sizes, *sizes[1:3])]
    sums = [flat(4096, torch.float32) for _ in range(3)]
    turns = flat(64, torch.int32) if config.deterministic else None
    seqlens = (flat(3, torch.int32), flat(3, torch.int32), None) if packed else None
    numbers, rest = (1.0, 0.0, 0, 0), (seqlens, 256, None, None, None, None)
    return FUNCTIONS["sm80"].compile(
        *tensors, *sums, turns, *numbers, *rest, arch=arch, layout="thd" if packed else "bshd",
        config=config, variant=variant,
    )  # fmt: skip


def _check(kernel, arch: str) -> None:
    """Products by mma.sync from ldmatrix, copies by cp.async, no spills, within shared memory."""
    (found,) = kernel.resources()
    assert found.entry == "attention_backward_sm80_0"
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0
    assert found.registers <= 255
    assert found.count("HMMA") and found.count("LDSM") and found.count("LDGSTS") and not found.count("HGMMA")
    assert found.dynamic_smem is None or found.dynamic_smem <= DEVICES_BY_ARCH[arch].smem_bytes


@pytest.mark.parametrize(("arch", "dims", "name", "deterministic", "packed"), CASES)
def test_chosen_tiles(arch, dims, name, deterministic, packed):
    config = sm80_backward_config(*dims, deterministic, DEVICES_BY_ARCH[arch].smem_bytes, packed=packed)
    config = replace(config, sums_vector=4 if arch == "sm_90a" else 1)
    _check(_compile(arch, VARIANTS[name], config, packed), arch)


# (arch, head dimensions, products of the matrix unit, reads of their operands)
TALL_WARPS = [
    ("sm_90a", (64, 64), 320, 128),
    ("sm_89", (64, 64), 160, 72),
    ("sm_90a", (256, 256), 448, 200),
    ("sm_80", (256, 256), 448, 200),
    ("sm_90a", (128, 128), 768, 288),
    ("sm_80", (96, 96), 576, 248),
]


@pytest.mark.parametrize(("arch", "dims", "products", "reads"), TALL_WARPS)
def test_32_keys_a_warp(arch, dims, products, reads):
    """Fewer reads for a product. By columns a warp runs one of two branches for P and for dP."""
    config = sm80_backward_config(*dims, False, DEVICES_BY_ARCH[arch].smem_bytes)
    assert config.warp_keys == 32
    kernel = _compile(arch, VARIANTS["causal"], replace(config, sums_vector=4 if arch == "sm_90a" else 1))
    _check(kernel, arch)
    (found,) = kernel.resources()
    assert (found.count("HMMA"), found.count("LDSM")) == (products, reads)


def test_what_takes_registers_has_warps_of_16_keys():
    for options in ({"by_elements": True}, {"packed": True}, {"d_mask": True}, {"block_k": 64}):
        assert sm80_backward_config(64, 64, True, **options).warp_keys == 16
    smem_bytes = DEVICES_BY_ARCH["sm_80"].smem_bytes
    assert sm80_backward_config(128, 128, True, smem_bytes).by_gradients
    for options in ({"by_elements": True}, {"packed": True}):
        assert not sm80_backward_config(128, 128, True, smem_bytes, **options).by_gradients
    assert not sm80_backward_config(128, 96, True, smem_bytes).by_gradients
    assert (
        sm80_backward_config(192, 128, True).warp_keys == sm80_backward_config(32, 32, True).warp_keys == 16
    )


def test_sums_are_added_as_vectors_from_sm90_on():
    """Four times as few instructions; on GPUs before there are none for vectors."""
    config = sm80_backward_config(96, 96, False)
    single, vectors = (
        _compile("sm_90a", VARIANTS["dense"], replace(config, sums_vector=count)).resources()[0]
        for count in (1, 4)
    )
    assert single.count("RED") == 4 * vectors.count("RED") > 0


def test_chosen_tiles_fit():
    for dim in range(8, 264, 8):
        for dim_v in range(8, 264, 8):
            config = sm80_backward_config(dim, dim_v, True)
            assert config.smem_bytes <= DEVICES_BY_ARCH["sm_89"].smem_bytes
            assert config.dim >= dim and config.dim_v >= dim_v
    with pytest.raises(ValueError, match="head dimensions are 264 and 64, must be at most 256"):
        sm80_backward_config(264, 64, True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Sm80BackwardConfig(96, 64, 64), "tile_k is 96 for 8 warps with 16 keys each"),
        (Sm80BackwardConfig(128, 64, 64, q_stages=1), "q_stages and do_stages are 1 and 2"),
        (Sm80BackwardConfig(128, 256, 256, tile_q=32, by_columns=True), "half or a quarter by columns"),
        (Sm80BackwardConfig(128, 128, 96, warp_keys=32, by_gradients=True), "dim and dim_v are 128 and 96"),
    ],
)
def test_impossible_tiles_are_named(config, message):
    with pytest.raises(CompileError, match=message):
        _compile("sm_89", VARIANTS["dense"], config)
