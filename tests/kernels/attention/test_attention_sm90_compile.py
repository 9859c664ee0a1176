"""The SM90 attention as compiled, without a GPU: instructions, registers, shared memory, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant, Sm90AttentionConfig, sm90_config, sm90_list_config
from kernels_dsl.ops.attention.plan import FUNCTIONS
from lowering.errors import CompileError

CAUSAL = AttentionVariant(right=True)
VARIANTS = {
    "dense": AttentionVariant(),
    "causal": CAUSAL,
    "window": AttentionVariant(right=True, left=True),
    "softcap": AttentionVariant(right=True, softcap=True),
    "sinks": AttentionVariant(right=True, sinks=True),
}


def _compile(
    dims: tuple[int, int],
    variant: AttentionVariant = CAUSAL,
    config: Sm90AttentionConfig | None = None,
    packed: bool = False,
    lists: bool = False,
):
    def tensor(heads: int, dim: int) -> torch.Tensor:
        shape = (512, heads, dim) if packed else (2, 256, heads, dim)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    dim, dim_v = dims
    lse = torch.empty((4, 512) if packed else (2, 4, 256), device="meta")
    listed = (ints(2, 4, 2), ints(2, 4, 2, 2)) * 2 if lists else None
    sinks = torch.empty(4, device="meta") if variant.sinks else None
    counter = ints(1) if variant.uneven or packed else None
    tensors = (tensor(4, dim), tensor(2, dim), tensor(2, dim_v), tensor(4, dim_v), lse)
    seqlens = (ints(3), ints(3), None) if packed else None
    rest = (seqlens, 256, listed, sinks, None, None, counter, 132)
    return FUNCTIONS["sm90"].compile(
        *tensors, 1.0, 1.0, 0, 0, *rest,
        arch="sm_90a", layout="thd" if packed else "bshd", config=config or sm90_config(dim, dim_v, variant),
        variant=variant,
    )  # fmt: skip


def _check(kernel) -> None:
    """Both products by WGMMA, loads and stores by TMA, no spills, and WGMMAs not run one after another."""
    (found,) = kernel.resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0
    products = {name: n for name, n in found.instructions.items() if name.startswith("HGMMA")}
    assert products
    assert any(name.startswith("UTMALDG") for name in found.instructions)
    assert any(name.startswith("UTMASTG") for name in found.instructions)
    # A compiler that cannot keep products in flight puts an arrive and a wait around each of them.
    assert found.instructions["WARPGROUP.ARRIVE"] < sum(products.values()) / 2


@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (40, 72), (128, 64)]
)
@pytest.mark.parametrize("name", ["dense", "causal"])
def test_head_dimensions(dims, name):
    _check(_compile(dims, VARIANTS[name]))


@pytest.mark.parametrize("name", ["window", "softcap", "sinks"])
def test_variants(name):
    _check(_compile((128, 128), VARIANTS[name]))


@pytest.mark.parametrize("name", ["dense", "window", "sinks"])
def test_two_on_an_sm(name):
    config = Sm90AttentionConfig(64, 128, 64, 64, lazy_rescale=True, ctas_per_sm=2)
    _check(_compile((64, 64), VARIANTS[name], config))


def test_heads_that_share_a_tile():
    config = Sm90AttentionConfig(128, 128, 128, 128, lazy_rescale=True, pack=2)
    _check(_compile((128, 128), VARIANTS["window"], config))


def test_packed():
    _check(_compile((128, 128), packed=True))


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (64, 128)])
def test_lists(block):
    config, split = sm90_list_config(128, 128, block)
    _check(_compile((128, 128), replace(CAUSAL, lists=split), config, lists=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Sm90AttentionConfig(96, 128, 64, 64), "tile_m must be 64, 128 or 192; it is 96"),
        (Sm90AttentionConfig(128, 72, 64, 64), "tile_n must be a multiple of 16 from 16 to 256; it is 72"),
        (Sm90AttentionConfig(128, 256, 128, 128), "bytes of shared memory more than there are"),
    ],
)
def test_impossible_tiles_are_named(config, message):
    with pytest.raises(CompileError, match=message):
        _compile((config.dim, config.dim_v), config=config)
