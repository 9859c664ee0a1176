"""fp8 attention as compiled: QGMMA for both products, kept in flight, no spills."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant, Extent, sm90_fp8_config
from kernels_dsl.ops.attention_fp8 import ATTENTION

LARGE = Extent(rows=1 << 16, keys=1 << 16, heads=64, sms=132)


def _meta(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["dense", "causal", "softcap"])
def test_products(dim, name):
    variant = AttentionVariant(right=name != "dense", softcap=name == "softcap")
    config = sm90_fp8_config(dim, dim, variant, LARGE)
    descales = [_meta(2, 4, dtype=torch.float32)] * 3
    counter = _meta(1, dtype=torch.int32) if variant.uneven else None
    out = _meta(2, 512, 4, dim, dtype=torch.bfloat16)
    tensors = (*[_meta(2, 512, 4, dim)] * 3, _meta(2, 4, dim, 512), out, None, *descales)
    rest = (1.0, 1.0, 0, 0, None, 0, None, None, counter, 132)
    constexprs = {"layout": "bshd", "config": config, "variant": variant, "descale_modes": (2, 2, 2)}
    kernel = ATTENTION.compile(*tensors, *rest, arch="sm_90a", **constexprs)
    transpose, found = sorted(kernel.resources(), key=lambda x: "attention" in x.entry)
    assert "quantize_tile" in transpose.entry
    for each in (transpose, found):
        assert each.stack_bytes == each.spill_loads == each.spill_stores == 0
    products = [n for name, n in found.instructions.items() if name.startswith("QGMMA")]
    assert products and not any(name.startswith("HGMMA") for name in found.instructions)
    # A compiler that cannot keep products in flight puts an arrive and a wait around each of them.
    assert found.instructions["WARPGROUP.ARRIVE"] < sum(products) / 2
