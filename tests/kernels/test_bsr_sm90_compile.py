"""The Hopper block-sparse kernel as compiled, without a GPU: instructions, registers, spills."""

from __future__ import annotations

import pytest

from kernels_dsl.ops.aot_bsr import bsr_kernel, iter_bsr, sampled_kernel


@pytest.mark.parametrize(
    ("block", "by_column", "left"),
    [
        ((16, 16), False, False),
        ((32, 32), True, True),
        ((64, 64), False, True),
        ((128, 128), False, False),
        ((512, 112), True, False),
    ],
    ids=str,
)
def test_instructions_and_spills(block: tuple[int, int], by_column: bool, left: bool) -> None:
    name, function, args, constexprs = bsr_kernel("sm90", block, "bf16", by_column, left, bias=True)
    (entry,) = function.compile(*args, arch="sm_90a", **constexprs).resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, f"{name}: registers are spilled"
    assert entry.entry == "bsr_sm90_0"
    assert entry.count("HGMMA") and entry.count("UTMALDG") and not entry.count("HMMA")
    assert bool(entry.count("UTMASTG")) == constexprs["config"].epi_tma


@pytest.mark.parametrize(
    ("block", "columns"), [((64, 64), True), ((128, 128), False), ((512, 112), True)], ids=str
)
def test_sampled_product(block: tuple[int, int], columns: bool) -> None:
    name, function, args, constexprs = sampled_kernel("sm90", block, "bf16", columns)
    (entry,) = function.compile(*args, arch="sm_90a", **constexprs).resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, f"{name}: registers are spilled"
    assert entry.entry == "bsr_sddmm_sm90_0"
    assert entry.count("HGMMA") and entry.count("UTMALDG") and entry.count("UTMASTG")


def test_kernels_ahead_of_time_have_names_of_their_own() -> None:
    for arch, family in (("sm_90a", "sm90"), ("sm_89", "sm80")):
        names = [name for name, *_ in iter_bsr(arch)]
        assert len(names) == len(set(names)) == 60
        assert all(f" {family} " in name or " sddmm " in name for name in names)
