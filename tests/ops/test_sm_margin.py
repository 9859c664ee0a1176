"""`sm_margin`: persistent kernels launch fewer CTAs, plans are kept for each margin, too much is refused."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.sm_margin import margin, with_margin
from kernels_dsl.ops.target import target_of
from lowering import emulator

SMS = 16
CONFIG = kernels_dsl.Sm90GemmConfig(tile_m=64, tile_n=64)  # a tile for each SM


def _gemm() -> torch.Tensor:
    a, b = torch.randint(-2, 3, (2, 256, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    found = kernels_dsl.gemm(a, b.mT, config=CONFIG)
    assert torch.equal(found, a @ b.mT)
    return found


def test_a_persistent_product_leaves_sms():
    with emulator.run(arch="sm_90a", sms=SMS) as session:
        whole = _gemm()
        with kernels_dsl.sm_margin(8):
            assert torch.equal(_gemm(), whole)
    whole_ctas, ctas = (launch.grid[0] * launch.grid[1] * launch.grid[2] for launch in session.launches)
    assert whole_ctas == SMS and ctas == SMS - 8


def test_the_block_entered_last_holds():
    assert margin() == 0
    with kernels_dsl.sm_margin(4):
        with kernels_dsl.sm_margin(0):
            assert margin() == 0 and with_margin("key") == "key"
        assert margin() == 4 and with_margin("key") == (4, "key")
    assert margin() == 0


def test_the_target_has_fewer_sms():
    x = torch.empty(1)
    with emulator.run(arch="sm_90a"):
        whole = target_of(x)
        with kernels_dsl.sm_margin(12):
            assert target_of(x).device.sm_count == whole.device.sm_count - 12
        assert target_of(x) == whole


def test_calls_are_kept_by_margin():
    kept: dict = {}
    x = (torch.empty(4, 4),)
    call_cache.keep(kept, "key", x, "whole")
    with kernels_dsl.sm_margin(4):
        assert call_cache.find(kept, "key", x) is None
        call_cache.keep(kept, "key", x, "less")
        assert call_cache.find(kept, "key", x) == "less"
    assert call_cache.find(kept, "key", x) == "whole"


def test_wrong_margins_are_refused():
    for wrong, error in (("8", TypeError), (True, TypeError), (2.0, TypeError), (-1, ValueError)):
        with pytest.raises(error, match="sms is "), kernels_dsl.sm_margin(wrong):
            pass
    a = torch.zeros(16, 16, dtype=torch.bfloat16)
    with emulator.run(arch="sm_90a"), kernels_dsl.sm_margin(125):
        with pytest.raises(ValueError, match="sm_margin is 125, must leave at least 8 of the 132 SMs"):
            kernels_dsl.gemm(a, a)
        assert "sm_margin is 125" in (kernels_dsl.supports(a, a) or "")
