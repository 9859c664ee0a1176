"""The quantisation kernels as compiled: fp8 conversions, 16-byte loads, no spills, on sm_89 and sm_90a."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.problem import H200
from kernels_dsl.config.quantize import (
    RESERVED,
    TileQuantization,
    line_quantization,
    matrix_quantization,
    one_launch,
    row_quantization,
)
from kernels_dsl.ops.quantize.kernels import FUNCTIONS

N = 1024


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _instructions(compiled, prefix: str, registers: int = 64) -> int:
    """The number that begin with `prefix`; 64 registers are what four CTAs of 256 threads on an SM have."""
    (found,) = compiled.resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0, found
    assert found.registers <= registers, found
    return sum(count for name, count in found.instructions.items() if name.startswith(prefix))


@pytest.mark.parametrize(
    ("kind", "format", "arch"),
    [
        ("group", "e4m3", "sm_89"),
        ("block", "e5m2", "sm_89"),
        ("group", "e5m2", "sm_90a"),
        ("block", "e4m3", "sm_90a"),
    ],
)
def test_both_outputs_of_a_tile(kind, format, arch):
    dtype = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
    x, values, scales = _meta(N, N, dtype=torch.bfloat16), _meta(N, N, dtype=dtype), _meta(N // 128, N).mT
    spec = TileQuantization(format, kind, kind, early=arch == "sm_90a")
    args = (x, values, scales, values, scales, 0)
    compiled = FUNCTIONS["tile"].compile(*args, arch=arch, spec=spec)
    # 64 elements by pairs: once for both outputs, or for rows of whole tiles, rows of others and columns.
    conversions = _instructions(compiled, "F2FP.SATFINITE." + format.upper())
    assert conversions == (32 if kind == "block" else 96)
    assert _instructions(compiled, "LDG.E.128") >= 8
    if arch == "sm_90a":
        assert _instructions(compiled, "HMNMX2") > 0  # maxima of pairs


def _with_maxima(name: str, kinds: tuple, dtype: torch.dtype, *rest, **constants):
    """Resources of kernels that make scales of maxima; `rest`: what follows the workspace."""
    x, values = _meta(N, N, dtype=dtype), _meta(N, N, dtype=torch.float8_e4m3fn)
    scales, scale = (None, 1 << 42) if "whole" in kinds else (_meta(N, 1), 0)
    outputs = [t for kind in kinds for t in ((values, scales) if kind else (None, None))]
    compiled = FUNCTIONS[name].compile(x, *outputs, 1 << 40, *rest, scale, arch="sm_90a", **constants)
    found = compiled.resources()
    for kernel in found:
        assert kernel.stack_bytes == kernel.spill_loads == kernel.spill_stores == 0, kernel
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kinds", [("whole", "whole"), (None, "lines")])
def test_scales_of_maxima(dtype, kinds):
    spec = TileQuantization("e4m3", *kinds, early=True)
    found = _with_maxima("maxima", kinds, dtype, 4, spec=spec, many=False)
    assert sorted(k.entry.rpartition("_")[0] for k in found) == ["quantize_amax", "quantize_tile"]
    assert all(kernel.registers <= (128 if dtype == torch.float32 else 64) for kernel in found)


@pytest.mark.parametrize(
    ("dtype", "kinds", "tiles"),
    [
        (torch.float16, ("lines", "lines"), (64, 64)),
        (torch.float32, ("lines", "lines"), (64, 64)),
        (torch.float16, ("whole", "whole"), (32, 32)),
        (torch.float16, (None, "lines"), (25, 32)),
    ],
)
def test_one_launch(dtype, kinds, tiles):
    """As many CTAs as are asked for fit an SM, with the tiles that they keep."""
    form, division = one_launch(kinds, 1, tiles, (H200.sm_count, H200.smem_bytes, True), dtype.itemsize)
    spec = TileQuantization("e4m3", *kinds, early=True, grid=form)
    (found,) = _with_maxima("grid", kinds, dtype, 1 << 41, *division, spec=spec)
    assert found.registers * 256 * form.per_sm <= 65536
    assert form.kept >= 1
    taken = found.dynamic_smem + found.static_smem + RESERVED
    assert (
        taken * form.per_sm <= H200.smem_bytes + RESERVED < (taken + (1 << 14) * dtype.itemsize) * form.per_sm
    )


def test_rows_then_columns():
    """As many CTAs fit an SM as are asked for; a row's vectors and their maxima stay in registers."""
    x, values, scales = _meta(N, N, dtype=torch.bfloat16), _meta(N, N, dtype=torch.float8_e4m3fn), _meta(N, 1)
    spec, rows_each = line_quantization("e4m3", (1, 16384, 7168), (H200.sm_count, True), 2)
    args = (x, values, scales, values, scales, 1 << 40, rows_each)
    found = FUNCTIONS["lines"].compile(*args, arch="sm_90a", spec=spec).resources()
    names = [kernel.entry.rpartition("_")[0] for kernel in found]
    assert sorted(names) == ["quantize_clear", "quantize_lines", "quantize_tile"]
    for kernel in found:
        assert kernel.stack_bytes == kernel.spill_loads == 0, kernel
        assert kernel.registers * 256 * spec.per_sm <= 65536
    lines = found[names.index("quantize_lines")]
    loads = sum(count for name, count in lines.instructions.items() if name.startswith("LDG.E.128"))
    assert spec.ahead and loads == 2 * spec.vectors  # the first row, and in the loop


def test_matrices_in_one_read():
    """As many CTAs fit an SM as are asked for, with the items that they keep."""
    x, values = _meta(4, N, 8, 64, dtype=torch.float16), _meta(4, N, 8, 64, dtype=torch.float8_e5m2)
    device = H200.sm_count, H200.smem_bytes, True
    spec, ctas = matrix_quantization("e5m2", (128, 4096, 64), device, 2)
    args = (x.transpose(1, 2), values.transpose(1, 2), _meta(4, 8, 1, 1), 1 << 40, 1 << 41, ctas)
    compiled = FUNCTIONS["matrices"].compile(*args, arch="sm_90a", spec=spec)
    (found,) = compiled.resources()
    assert found.stack_bytes == found.spill_loads == 0 and found.registers * 256 * spec.per_sm <= 65536
    taken = found.dynamic_smem + found.static_smem
    assert taken * spec.per_sm <= H200.smem_bytes + RESERVED
    assert ctas == 256 and spec.items(4096, 64) == 16  # whole matrices; all CTAs are 264
    assert matrix_quantization("e5m2", (128, 4096, 72), device, 2)[1] == 252  # 14 of 18 items
    assert matrix_quantization("e5m2", (4096, 128, 64), device, 2)[0].elements == 128 * 64
    assert matrix_quantization("e5m2", (9, 9000, 256), device, 2)[1] == 264  # one of 141 would be too few
    assert matrix_quantization("e5m2", (2, 1 << 16, 256), device, 2) is None  # more than all CTAs keep


@pytest.mark.parametrize("columns", [1024, 8192, 16384, 262144])
def test_rows(columns):
    x, values = _meta(N, N, dtype=torch.bfloat16), _meta(N, N, dtype=torch.float8_e4m3fn)
    spec = row_quantization("e4m3", columns, True, 2)
    compiled = FUNCTIONS["rows"].compile(x, values, _meta(N, 1), 0, arch="sm_90a", spec=spec)
    registers = 128 if spec.vectors == 16 else 64
    assert _instructions(compiled, "LDG.E.128", registers) == spec.vectors
    assert _instructions(compiled, "F2FP.SATFINITE.E4M3", registers) == 4 * spec.vectors
    assert (_instructions(compiled, "UCGABAR_WAIT", registers) > 0) == (spec.cluster > 1) == (columns > 16384)
