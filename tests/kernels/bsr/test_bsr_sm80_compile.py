"""The SM80-class block-sparse kernels as compiled, without a GPU: instructions, spills, memory, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue, ScaledEpilogue
from kernels_dsl.config.bsr import BsrLayout, BsrProblem
from kernels_dsl.config.bsr_sm80 import choose_sddmm_sm80, choose_sm80, sddmm_units, tile_for
from kernels_dsl.config.problem import L40S
from kernels_dsl.ops.bsr.plan import FUNCTIONS
from kernels_dsl.ops.bsr.sampled_plan import FUNCTIONS as SAMPLED

EVERYTHING = LinearEpilogue(alpha=True, beta=True, bias=True, residual=True, activation="gelu")
MODES = ("", "", "mn", "n", "mn")


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _compile(block: tuple[int, int], transposed: bool, left: bool, config=None):
    lists = _meta(4 + 4 * 4 + 2 * 9, dtype=torch.int32)
    mn, k = block[::-1] if transposed else block
    size = (256, 4 * mn) if left else (4 * mn, 256)
    problem = BsrProblem(*size, 8 * k, 9, mn, k, dense_left=left)
    config = config or choose_sm80(problem)
    whole, row = _meta(*size), _meta(size[1])
    dense = _meta(256, 8 * k) if left else _meta(8 * k, 256)
    return FUNCTIONS["sm80"].compile(
        _meta(9, *block), dense, whole, lists, None, None, (0.5, 2.0, whole, row, whole), 132, arch="sm_89",
        config=config, epilogue=EVERYTHING, layout=BsrLayout(block, transposed, left, MODES),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("block", "transposed", "left"),
    [
        ((16, 16), False, False),
        ((32, 16), True, True),
        ((64, 64), True, False),
        ((128, 128), False, False),
        ((512, 112), False, True),
    ],
    ids=str,
)
def test_no_spills_with_every_operand_of_the_epilogue(
    block: tuple[int, int], transposed: bool, left: bool
) -> None:
    (entry,) = _compile(block, transposed, left).resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, "registers are spilled"
    assert entry.count("HMMA") and entry.count("LDGSTS") and entry.count("LDSM")
    assert entry.entry == "bsr_sm80_0"


@pytest.mark.parametrize(
    ("block", "left"), [((128, 160), False), ((64, 64), True), ((32, 32), False)], ids=str
)
def test_fp8_blocks_with_scales(block: tuple[int, int], left: bool) -> None:
    """Two sets of accumulators, an epilogue with everything, no spills; e4m3 blocks, an e5m2 dense factor."""
    size, inner = (256, 4 * block[0]) if left else (4 * block[0], 256), 8 * block[1]
    config = choose_sm80(BsrProblem(*size, inner, 9, *block, dtype="fp8", dense_left=left))
    dense = _meta(256, inner, dtype=torch.float8_e5m2)
    scales, whole = _meta(9, 1, 1, dtype=torch.float32), _meta(*size)
    operands = (scales, _meta(1, dtype=torch.float32), _meta(size[1]), whole)
    compiled = FUNCTIONS["sm80"].compile(
        _meta(9, *block, dtype=torch.float8_e4m3fn), dense if left else dense.t(), whole,
        _meta(4 + 4 * 4 + 2 * 9, dtype=torch.int32), None, None, operands, 132, arch="sm_89", config=config,
        epilogue=ScaledEpilogue(LinearEpilogue(bias=True, residual=True, activation="gelu"), 1),
        layout=BsrLayout(block, False, left, ("1", "n", "mn"), scaled=True),
    )  # fmt: skip
    (entry,) = compiled.resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, "registers are spilled"
    assert entry.dynamic_smem <= L40S.smem_bytes
    kind = "E5M2.E4M3" if left else "E4M3.E5M2"
    products = config.tile_m * config.tile_n * config.tile_k // (16 * 8 * 32 * config.threads // 32)
    matrix = {name: count for name, count in entry.instructions.items() if "MMA" in name}
    assert matrix == {f"QMMA.16832.F32.{kind}": products}  # one K tile, and nothing else


@pytest.mark.parametrize("block", [(16, 16), (128, 128)], ids=str)
def test_the_sampled_product_does_not_spill(block: tuple[int, int]) -> None:
    index = _meta(9, dtype=torch.int32)
    compiled = SAMPLED["sm80"].compile(
        _meta(512, 256), _meta(512, 256).t(), _meta(9, *block), (index,) * 4, (0.5,), 132, arch="sm_89",
        config=choose_sddmm_sm80(block, (16, 16)), epilogue=LinearEpilogue(alpha=True), block=block,
        units=sddmm_units(block),
    )  # fmt: skip
    (entry,) = compiled.resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, "registers are spilled"
    assert entry.count("HMMA") and entry.count("LDGSTS")


def test_every_configuration_fits_the_smallest_shared_memory() -> None:
    blocks = range(16, 513, 16)
    for extent in blocks:
        tile = tile_for(extent)
        assert tile in (16, 32, 64, 128) and -(-extent // tile) * tile < extent + tile
        for left in (False, True):
            config = choose_sm80(BsrProblem(512, 512, 512, 9, extent, 64, dense_left=left))
            assert config.smem_bytes(2) <= L40S.smem_bytes
            assert (config.tile_n if left else config.tile_m) == tile
        for other in blocks:
            assert choose_sddmm_sm80((extent, other), (16, 16)).smem_bytes(2) <= L40S.smem_bytes


def test_a_configuration_that_does_not_fit_says_why() -> None:
    config = choose_sm80(BsrProblem(512, 512, 512, 9, 16, 16))
    with pytest.raises(Exception, match="stages is 2; it must be 3 at least"):
        _compile((16, 16), False, False, replace(config, stages=2))
