"""The small kernels of a server's step as compiled: 16-byte accesses, fp8 conversions, no spills."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.ops.serving import append_operation, merge_operation

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _instructions(compiled, *prefixes: str) -> list[int]:
    (found,) = compiled.resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0, found
    assert found.registers <= 64, found
    return [
        sum(count for name, count in found.instructions.items() if name.startswith(prefix))
        for prefix in prefixes
    ]


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_instructions(arch):
    early = arch == "sm_90a"
    lses, lse = _meta(4, 1, 64, 8, dtype=torch.float32), _meta(1, 64, 8, dtype=torch.float32)
    args = (_meta(4, 1, 64, 8, 128), lses, _meta(1, 64, 8, 128), lse)
    compiled = merge_operation.FUNCTION.compile(*args, arch=arch, vector=8, early=early)
    assert all(_instructions(compiled, "LDG.E.128", "STG.E.128"))
    new, cache, scale = _meta(1, 64, 8, 128), _meta(32, 16, 8, 128, dtype=E4M3), _meta(8, dtype=torch.float32)
    slots = _meta(1, 64, dtype=torch.int64)
    args = (new, new, cache, cache, slots, None, None, scale, scale)
    compiled = append_operation.FUNCTION.compile(*args, arch=arch, vector=8, early=early)
    loads, stores, conversions = _instructions(compiled, "LDG.E.128", "STG.E.64", "F2FP.SATFINITE.E4M3")
    assert loads == stores == 2 and conversions == 8
