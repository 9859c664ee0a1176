"""The kernels that make block lists as compiled: rows in registers, loads under way together, no spills."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.aot.bsr import list_kernels, pair_kernels
from kernels_dsl.config.lists import DocumentSpec, WindowSpec, topk_spec
from kernels_dsl.sparse.attention_lists import FUNCTIONS


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _found(name: str, *args, arch: str, spec):
    (found,) = FUNCTIONS[name].compile(*args, arch=arch, spec=spec).resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0, found
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("columns", "causal"), [(256, True), (1024, False), (4096, True), (32768, False)])
def test_topk(columns, causal, arch):
    spec = topk_spec(columns, causal, (128, 128))
    scores = _meta(1, 8, 64, columns, dtype=torch.float32)
    lists = _meta(1, 8, 64), _meta(1, 8, 64, 32)
    found = _found("topk", scores, *lists, 8192, 0, arch=arch, spec=spec)
    assert found.registers <= 96
    assert sum(n for name, n in found.instructions.items() if name.startswith("LDG")) == spec.per_lane


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_ranges(arch):
    spec = WindowSpec((128, 128), True, True)
    lists = (_meta(64), _meta(64, 4), _meta(64), _meta(64, 18))
    assert _found("window", *lists, 8192, 8192, 0, 2047, 0, arch=arch, spec=spec).registers <= 48
    spec = DocumentSpec((128, 128), True)
    args = _meta(1, 8192, dtype=torch.int64), _meta(1, 64), _meta(1, 64, 33)
    assert _found("documents", *args, arch=arch, spec=spec).registers <= 48


def test_pairs():
    """A CTA of 32 warps looks for them: 64 registers are all that its threads can have."""
    kernels = {name: rest for name, *rest in pair_kernels("sm_90a")}
    assert len(kernels) == 8
    function, args, constants = kernels["bsr sm90 pair_match 32 warps"]
    (found,) = function.compile(*args, arch="sm_90a", **constants).resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0 and found.registers <= 48, found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_lists_of_rows(arch):
    kernels = list(list_kernels(arch))
    assert [name for name, *_ in kernels] == [
        f"bsr {name} {dtype}" for dtype in ("int32", "int64") for name in ("row_lists", "row_chunks")
    ]
    for _, function, args, constants in kernels:
        (found,) = function.compile(*args, arch=arch, **constants).resources()
        assert found.stack_bytes == found.spill_loads == 0 and found.registers <= 64, found
