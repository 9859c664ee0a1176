"""The quantisation kernels as compiled: fp8 conversions, 16-byte loads, no spills, on sm_89 and sm_90a."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.quantize import TileQuantization, row_quantization
from kernels_dsl.ops.quantize_plan import FUNCTIONS

N = 1024


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _instructions(compiled, prefix: str) -> int:
    (found,) = compiled.resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0, found
    assert found.registers <= 128, found
    return sum(count for name, count in found.instructions.items() if name.startswith(prefix))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_both_outputs_of_a_tile(arch, format):
    dtype = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
    x, values, scales = _meta(N, N, dtype=torch.bfloat16), _meta(N, N, dtype=dtype), _meta(N // 128, N).mT
    args = (x, values, scales, values, scales)
    compiled = FUNCTIONS["tile"].compile(*args, arch=arch, spec=TileQuantization(format, "group", "group"))
    assert _instructions(compiled, "F2FP.SATFINITE." + format.upper()) == 64  # 64 elements by pairs, twice
    assert _instructions(compiled, "LDG.E.128") >= 8


@pytest.mark.parametrize("columns", [1024, 8192, 16384])
def test_rows(columns):
    x, values = _meta(N, N, dtype=torch.bfloat16), _meta(N, N, dtype=torch.float8_e4m3fn)
    spec = row_quantization("e4m3", columns)
    compiled = FUNCTIONS["rows"].compile(x, values, _meta(N, 1), arch="sm_90a", spec=spec)
    assert _instructions(compiled, "LDG.E.128") == spec.vectors
    assert _instructions(compiled, "F2FP.SATFINITE.E4M3") == 4 * spec.vectors
