"""Every shipped configuration compiles without a GPU, spills nothing and uses the instructions it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels_dsl.aot.shipped import iter_kernels, representative
from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.config.budget import accumulator_registers, why_not
from kernels_dsl.config.gemm import EntryLayout
from kernels_dsl.config.gemm_table import SM90_CANDIDATES
from kernels_dsl.config.problem import H200, GemmProblem
from kernels_dsl.ops.gemm.kernels import FUNCTIONS

ARCHES = ("sm_90a", "sm_89")
ALL = os.environ.get("TEST_ALL_KERNELS") == "1"  # every kernel for ahead-of-time use: some minutes


def _kernels() -> list:
    made = []
    for arch in ARCHES:
        chosen = iter_kernels(arch) if ALL else representative(arch)
        made += [pytest.param(arch, *kernel, id=f"{arch} {kernel[0]}") for kernel in chosen]
    return made


@pytest.mark.parametrize(("arch", "name", "function", "args", "constexprs"), _kernels())
def test_compiled_code(arch: str, name: str, function, args, constexprs) -> None:
    compiled = function.compile(*args, arch=arch, **constexprs)
    (entry,) = compiled.resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, "registers are spilled"
    assert entry.entry == f"{function.name}_0"
    if "splitk_reduce" in name:
        return
    if " sm90 " in name:
        assert entry.count("HGMMA") and entry.count("UTMALDG") and not entry.count("HMMA")
        assert bool(entry.count("UTMASTG")) == constexprs["config"].epi_tma
    else:
        assert entry.count("HMMA") and not entry.count("HGMMA")
        config = constexprs["config"]
        assert bool(entry.count("LDGSTS")) == (max(config.copy_bytes_a, config.copy_bytes_b) > 2)


_SECOND_PROCESS = """
import sys
from kernels_dsl.aot.shipped import representative
name, function, args, constexprs = next(representative("sm_89"))
compiled = function.compile(*args, arch="sm_89", **constexprs)
assert compiled.source == "disk", compiled.source
assert "cutlass" not in sys.modules, "the compiler was imported"
"""


def test_a_second_process_finds_the_kernel_without_the_compiler() -> None:
    _name, function, args, constexprs = next(iter(representative("sm_89")))
    function.compile(*args, arch="sm_89", **constexprs)
    subprocess.run([sys.executable, "-c", _SECOND_PROCESS], check=True, cwd=Path(__file__).parents[3])


def test_the_list_covers_both_families_and_names_are_unique() -> None:
    for arch, family in (("sm_90a", "sm90"), ("sm_89", "sm80"), ("sm_80", "sm80"), ("sm_120a", "sm80")):
        names = [name for name, *_ in iter_kernels(arch)]
        assert len(names) == len(set(names)) > 20
        assert all(f" {family} " in name or "splitk_reduce" in name for name in names)
    with pytest.raises(ValueError, match="arch is 'sm_70', must be one of"):
        list(iter_kernels("sm_70"))
    with pytest.raises(ValueError, match="ops has 'conv', must be of"):
        list(iter_kernels("sm_90a", ("conv",)))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_largest_tiles_do_not_spill_with_every_operand_of_the_epilogue(out_dtype: torch.dtype) -> None:
    """alpha, beta · C, bias, gelu and a residual, for each tile that the budget lets such a call have."""
    problem = GemmProblem(512, 512, 512, b_k_major=True, operand_bytes=4)
    fitting = [c.config for c in SM90_CANDIDATES if why_not(c.config, problem, H200) is None]
    largest = sorted(fitting, key=accumulator_registers)[-2:]
    epilogue = LinearEpilogue(alpha=True, beta=True, bias=True, residual=True, activation="gelu")
    for config in largest:

        def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        whole, row = matrix(512, 512), matrix(512)
        compiled = FUNCTIONS["sm90"].compile(
            whole, whole.t(), matrix(512, 512, dtype=out_dtype), (1.0, 1.0, whole, row, whole), 132,
            arch="sm_90a", config=config, epilogue=epilogue, layout=EntryLayout(("", "", "mn", "n", "mn")),
        )  # fmt: skip
        (entry,) = compiled.resources()
        assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, config
