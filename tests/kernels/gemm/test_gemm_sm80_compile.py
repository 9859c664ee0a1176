"""The SM80-class GEMM as compiled, without a GPU: instructions, registers, shared memory, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue, identity
from kernels_dsl.config.budget import why_not
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.config.gemm_table import SM80_CANDIDATES, adapted
from kernels_dsl.config.problem import DEVICES_BY_ARCH, GemmProblem
from reference import buffers
from tests.kernels.gemm import gemm_sm80_cases as cases

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
EVERYTHING = LinearEpilogue(alpha=True, beta=True, bias=True, residual=True, activation="gelu")


def _matrix(rows: int, columns: int, dtype: torch.dtype, row_major: bool, align: int) -> torch.Tensor:
    """A (rows, columns, 1) specification whose rows are aligned to `align` bytes and no more."""
    element = torch.empty((), dtype=dtype).element_size()
    pad = align // element if align < 16 else 0
    strides = buffers.strides_of((rows, columns), -1 if row_major else -2, pad)
    return torch.empty_strided((rows, columns, 1), (*strides, 0), dtype=dtype, device="meta")


def _operands(shape: tuple[int, int], dtype: torch.dtype, align: int) -> tuple:
    matrix = _matrix(*shape, dtype, True, align)
    bias = torch.empty(shape[1], dtype=dtype, device="meta").as_strided((*shape, 1), (0, 1, 0))
    return (0.5, 2.0, matrix, bias, matrix)


def _compile(
    config: Sm80GemmConfig,
    arch: str,
    dtype: torch.dtype = torch.bfloat16,
    k_major: tuple[bool, bool] = (True, True),
    align: int = 16,
    fused: bool = False,
):
    """Compile `config` for 512 x 512 x 512, all tensors of one alignment, plain or with a full epilogue."""
    a, b = (_matrix(512, 512, dtype, major, align) for major in k_major)
    d = _matrix(512, 512, dtype, True, align)
    operands = _operands((512, 512), dtype, align) if fused else ()
    epilogue = EVERYTHING if fused else identity
    return cases.GEMM.compile(a, b, d, operands, arch=arch, config=config, epilogue=epilogue)


def _adapted(config: Sm80GemmConfig, arch: str, dtype: torch.dtype, k_major, align: int):
    """`config` as the table would adapt it; None where the budget refuses it."""
    name = NAMES[dtype]
    majors = {"a_k_major": k_major[0], "b_k_major": k_major[1]}
    aligns = {"a_align": align, "b_align": align, "d_align": align}
    problem = GemmProblem(512, 512, 512, ab_type=name, d_type=name, **majors, **aligns)
    fitted = adapted(config, problem)
    return None if why_not(fitted, problem, DEVICES_BY_ARCH[arch]) else fitted


def _count(instructions: dict[str, int], prefix: str) -> int:
    return sum(count for name, count in instructions.items() if name.startswith(prefix))


def _check(compiled, config: Sm80GemmConfig, dtype: torch.dtype, k_major, align: int) -> None:
    (found,) = compiled.resources()
    assert found.stack_bytes == 0 and found.spill_loads == 0 and found.spill_stores == 0, found
    assert found.registers <= 255 and found.max_threads == config.threads
    element = 4 if dtype is torch.float32 else 2
    assert found.dynamic_smem == config.smem_bytes(element)
    k = 8 if dtype is torch.float32 else 16
    products = config.tile_m * config.tile_n * config.tile_k // (16 * 8 * k * config.warps_m * config.warps_n)
    assert _count(found.instructions, "HMMA") == products  # the K tile of the main loop, and nothing else
    assert (_count(found.instructions, "LDGSTS") > 0) == (align >= 4)
    # ldmatrix cannot transpose 32-bit elements.
    assert (_count(found.instructions, "LDSM") > 0) == (dtype is not torch.float32 or any(k_major))


@pytest.mark.parametrize(
    "candidate", SM80_CANDIDATES, ids=lambda c: f"{c.config.tile_m}x{c.config.tile_n}x{c.config.tile_k}"
)
def test_shipped_configurations_do_not_spill(candidate) -> None:
    """The hardest cases of each: everything fused, K-major and MN-major, 16 bits and tf32."""
    for dtype, k_major in ((torch.bfloat16, (True, True)), (torch.float32, (False, False))):
        config = _adapted(candidate.config, "sm_89", dtype, k_major, 16)
        assert config is not None, "every shipped configuration must fit sm_89"
        _check(_compile(config, "sm_89", dtype, k_major, fused=True), config, dtype, k_major, 16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_largest_tiles_do_not_spill_elsewhere(arch: str) -> None:
    for candidate in SM80_CANDIDATES[:3]:
        config = _adapted(candidate.config, arch, torch.bfloat16, (True, False), 16)
        _check(
            _compile(config, arch, k_major=(True, False), fused=True),
            config,
            torch.bfloat16,
            (True, False),
            16,
        )


@pytest.mark.parametrize("align", [2, 4, 8])
def test_narrow_loads_do_not_spill(align: int) -> None:
    """The largest and the smallest tile that the budget allows with them."""
    fitting = [_adapted(c.config, "sm_89", torch.bfloat16, (True, False), align) for c in SM80_CANDIDATES]
    fitting = [config for config in fitting if config is not None]
    for config in (fitting[0], fitting[-1]):
        _check(
            _compile(config, "sm_89", k_major=(True, False), align=align),
            config,
            torch.bfloat16,
            (True, False),
            align,
        )


@pytest.mark.parametrize("dtype", list(NAMES))
def test_matrix_and_copy_instructions(dtype: torch.dtype) -> None:
    config = Sm80GemmConfig(64, 64, 64 // torch.empty((), dtype=dtype).element_size(), 4, 2, 2)
    (found,) = _compile(config, "sm_86", dtype).resources()
    kind = {
        torch.bfloat16: "HMMA.16816.F32.BF16",
        torch.float16: "HMMA.16816.F32",
        torch.float32: "HMMA.1688.F32.TF32",
    }
    assert kind[dtype] in found.instructions
    assert any(name.startswith("LDGSTS.E.BYPASS") and ".128" in name for name in found.instructions)
    assert "LDS.128" in found.instructions and "STS.64" in found.instructions  # the staged epilogue
    assert "STG.E.128" in found.instructions


@pytest.mark.parametrize("k_major", [(True, True), (False, False)])
def test_float32_operands_are_rounded_to_tf32(k_major: tuple[bool, bool]) -> None:
    """One conversion for each register of each operand's fragments: mma.sync itself drops the low bits."""
    config = Sm80GemmConfig(64, 64, 16, 4, 2, 2)
    ptx = _compile(config, "sm_80", torch.float32, k_major).ptx()
    per_warp = 32 * 16 + 32 * 16  # elements of the A and B parts of a K tile that one warp multiplies
    assert ptx.count("cvt.rna.tf32.f32") == per_warp // 32


def test_sizes_do_not_recompile() -> None:
    config = cases.SMALL
    first = _compile(config, "sm_80")
    a, b, d = (_matrix(*shape, torch.bfloat16, True, 16) for shape in ((96, 48), (200, 48), (96, 200)))
    again = cases.GEMM.compile(a, b, d, (), arch="sm_80", config=config, epilogue=identity)
    assert again.key == first.key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 2}, "stages is 2"),
        ({"tile_k": 16}, "tile_k is 16"),
        ({"tile_n": 48}, "tile_n is 48"),
        ({"tile_m": 16}, "tile_m is 16"),
        ({"copy_bytes_a": 3}, "copy_bytes is 3"),
    ],
)
def test_configurations_that_cannot_be_are_named(change: dict, message: str) -> None:
    with pytest.raises(Exception, match=message):
        _compile(replace(cases.SMALL, **change), "sm_80")


def test_wider_copies_than_the_alignment_are_refused() -> None:
    with pytest.raises(Exception, match="copy_bytes is 16 for A, aligned to 4 bytes only"):
        _compile(cases.SMALL, "sm_80", align=4)
