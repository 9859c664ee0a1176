"""fp8 attention as compiled: QGMMA for both products, kept in flight, no spills."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.attention import (
    LATER_NUMBERS,
    AttentionVariant,
    Extent,
    sm90_fp8_config,
    turning_v,
)
from kernels_dsl.config.attention_sm80 import sm80_config
from kernels_dsl.config.problem import L40S
from kernels_dsl.ops.attention.fp8_plan import FUNCTIONS

LARGE = Extent(rows=1 << 16, keys=1 << 16, heads=64, sms=132)


def _meta(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("dim", "name", "later"),
    [(64, "dense", 0), (64, "causal", 2), (128, "dense", 2), (128, "causal", 0), (128, "causal", 2),
     (128, "softcap", 0), (256, "causal", 0), (256, "softcap", 0)],
)  # fmt: skip
def test_products(dim, name, later):
    """With `later`, transposing warps have 32 registers."""
    variant = AttentionVariant(right=name != "dense", softcap=name == "softcap")
    config = sm90_fp8_config(dim, dim, variant, LARGE)
    if later:
        config = turning_v(config, variant, LARGE)
    assert config.later_v == later
    found = _compiled(dim, config, variant)
    assert ["quantize_tile" in each.entry for each in found] == [False, True]
    _check(found)


@pytest.mark.parametrize(("dim", "rows", "keys"), [(64, 64, 1024), (128, 128, 1024), (256, 64, 512)])
def test_v_transposed_in_the_kernel(dim, rows, keys):
    """One kernel, and no spills in the transposing warps, which have few registers."""
    extent = Extent(rows=rows, keys=keys, heads=132, sms=132)
    variant = AttentionVariant(right=True)
    config = turning_v(sm90_fp8_config(dim, dim, variant, extent), variant, extent)
    assert config.turns_v and config.tile_m == rows and config.watch_sums == (keys > 512)
    found = _compiled(dim, config, variant)
    assert len(found) == 1
    _check(found)


def test_where_later_heads_are_transposed_beside_the_products():
    """A quarter of the heads are a tile an SM, sequences are long and no window makes them short."""
    dense, windowed = AttentionVariant(), AttentionVariant(right=True, left=True)
    found = {}
    for name, dim, variant, rows, keys, heads in (
        ("long", 128, dense, 4096, 4096, 64), ("short", 128, dense, 1024, 1024, 256),
        ("many", 128, AttentionVariant(right=True), 2048, 2048, 64),
        ("few", 128, dense, 4096, 4096, 16), ("window", 128, windowed, 4096, 4096, 64),
        ("narrow", 64, dense, 4096, 4096, 64),
    ):  # fmt: skip
        extent = Extent(rows, keys, heads, sms=132)
        found[name] = turning_v(sm90_fp8_config(dim, dim, variant, extent), variant, extent).later_v
    assert found == {"long": 2, "short": 0, "many": 2, "few": 0, "window": 0, "narrow": 2}


@pytest.mark.parametrize(
    ("dim", "name", "modes"), [(64, "softcap", 3), (128, "causal", 2), (256, "softcap", 3)]
)  # fmt: skip
def test_the_sm80_class_kernel(dim, name, modes):
    """As for Ada: QMMA alone, no spills; those that take the most registers."""
    variant = AttentionVariant(right=True, softcap=name == "softcap")
    config = sm80_config(dim, dim, variant, L40S.smem_bytes, element_bytes=1)
    found = _compiled(dim, config, variant, "sm_89", modes)
    for each in found:
        assert each.stack_bytes == each.spill_loads == each.spill_stores == 0
    products = {name for name in found[0].instructions if "MMA" in name}
    assert products == {"QMMA.16832.F32.E4M3.E4M3"} and found[0].count("LDSM") and found[0].count("LDGSTS")


def _compiled(dim, config, variant, arch="sm_90a", modes=2):
    """Resources of the kernels of a call, the attention's first."""
    of_keys = _meta(2, 4, 4, dtype=torch.float32) if modes == 3 else _meta(2, 4, dtype=torch.float32)
    descales = [_meta(2, 4, dtype=torch.float32), of_keys, of_keys]
    hopper = arch == "sm_90a"
    counter = _meta(1, dtype=torch.int32) if variant.uneven else None
    numbers = _meta(LATER_NUMBERS, dtype=torch.int32) if hopper and config.later_v else None
    out = _meta(2, 512, 4, dim, dtype=torch.bfloat16)
    turned = None if hopper and config.turns_v else _meta(2, 4, dim, 512)
    tensors = (*[_meta(2, 512, 4, dim)] * 3, turned, out, None, *descales)
    rest: tuple = (1.0, 1.0, 0, 0, None, 0, None, None)
    rest += (counter, numbers, 132) if hopper else ()
    constexprs = {"layout": "bshd", "config": config, "variant": variant}
    constexprs["descale_modes"] = (2, modes, modes)
    kernel = FUNCTIONS[config.family].compile(*tensors, *rest, arch=arch, **constexprs)
    return sorted(kernel.resources(), key=lambda x: "attention" not in x.entry)


def _check(kernels):
    for each in kernels:
        assert each.stack_bytes == each.spill_loads == each.spill_stores == 0
    found = kernels[0]
    products = [n for name, n in found.instructions.items() if name.startswith("QGMMA")]
    assert products and not any(name.startswith("HGMMA") for name in found.instructions)
    # A compiler that cannot keep products in flight puts an arrive and a wait around each of them.
    assert found.instructions["WARPGROUP.ARRIVE"] < sum(products) / 2
