"""The quantisation kernels as compiled: fp8 conversions, 16-byte loads, no spills, on sm_89 and sm_90a."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.quantize import TileQuantization, row_quantization
from kernels_dsl.ops.quantize_plan import FUNCTIONS

N = 1024


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _instructions(compiled, prefix: str, registers: int = 64) -> int:
    """How many begin with `prefix`; 64 registers are what four CTAs of 256 threads on an SM have."""
    (found,) = compiled.resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0, found
    assert found.registers <= registers, found
    return sum(count for name, count in found.instructions.items() if name.startswith(prefix))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_both_outputs_of_a_tile(arch, format):
    dtype = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
    x, values, scales = _meta(N, N, dtype=torch.bfloat16), _meta(N, N, dtype=dtype), _meta(N // 128, N).mT
    spec = TileQuantization(format, "group", "group", early=arch == "sm_90a")
    args = (x, values, scales, values, scales, None, None)
    compiled = FUNCTIONS["tile"].compile(*args, arch=arch, spec=spec)
    assert _instructions(compiled, "F2FP.SATFINITE." + format.upper()) == 64  # 64 elements by pairs, twice
    assert _instructions(compiled, "LDG.E.128") >= 8
    if arch == "sm_90a":
        assert _instructions(compiled, "HMNMX2") > 0  # maxima of pairs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kinds", [("whole", "whole"), (None, "lines"), ("lines", "lines")])
def test_scales_of_maxima(dtype, kinds):
    x, values = _meta(N, N, dtype=dtype), _meta(N, N, dtype=torch.float8_e4m3fn)
    whole = kinds[0] == "whole"
    scale = _meta(1) if whole else _meta(N, 1)
    plain = (values, scale) if kinds[0] else (None, None)
    spec = TileQuantization("e4m3", *kinds, early=True)
    args = (x, *plain, values, scale, _meta(1 << 20), 4)
    compiled = FUNCTIONS["maxima"].compile(*args, arch="sm_90a", spec=spec, many=False)
    found = [kernel.entry.rpartition("_")[0] for kernel in compiled.resources()]
    assert found.count("quantize_tile") == 1 and found.count("quantize_amax") == (
        2 if kinds[0] == "lines" else 1
    )
    for kernel in compiled.resources():
        assert kernel.stack_bytes == kernel.spill_loads == kernel.spill_stores == 0, kernel
        second = kernel.entry == "quantize_amax_1"  # of maxima, which are float32
        both = kinds[0] == "lines" and kernel.entry == "quantize_amax_0"
        assert kernel.registers <= (128 if dtype == torch.float32 or second else 80 if both else 64), kernel


@pytest.mark.parametrize("columns", [1024, 8192, 16384, 65536, 262144])
def test_rows(columns):
    x, values = _meta(N, N, dtype=torch.bfloat16), _meta(N, N, dtype=torch.float8_e4m3fn)
    spec = row_quantization("e4m3", columns, True, 2)
    compiled = FUNCTIONS["rows"].compile(x, values, _meta(N, 1), arch="sm_90a", spec=spec)
    registers = 128 if spec.vectors == 16 else 64
    assert _instructions(compiled, "LDG.E.128", registers) == spec.vectors
    assert _instructions(compiled, "F2FP.SATFINITE.E4M3", registers) == 4 * spec.vectors
    assert (_instructions(compiled, "UCGABAR_WAIT", registers) > 0) == (spec.cluster > 1) == (columns > 16384)
