"""The Hopper block-sparse kernel as compiled, without a GPU: instructions, registers, spills."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from kernels_dsl.aot.bsr import LARGE, BsrKind, bsr_kernel, iter_bsr, sampled_kernel
from kernels_dsl.blocks.epilogue.functions import LinearEpilogue, ScaledEpilogue
from kernels_dsl.config.bsr import TOGETHER, BsrLayout, BsrProblem, NanRule, choose
from kernels_dsl.config.bsr_together import tiles_together
from kernels_dsl.ops.bsr.plan import FUNCTIONS
from kernels_dsl.sparse.together import PACK


@pytest.mark.parametrize(
    ("block", "by_column", "left"),
    [
        ((16, 16), False, False),
        ((32, 32), True, True),
        ((64, 64), False, True),
        ((128, 128), False, False),
        ((512, 112), True, False),
        ((48, 80), False, False),
        ((96, 96), True, False),
        ((96, 128), False, False),
        ((112, 112), False, False),
        ((128, 80), False, False),
    ],
    ids=str,
)
def test_instructions_and_spills(block: tuple[int, int], by_column: bool, left: bool) -> None:
    name, function, args, constexprs = bsr_kernel(
        BsrKind(block, "bf16", by_column, left, bias=True), "sm_90a"
    )
    (entry,) = function.compile(*args, arch="sm_90a", **constexprs).resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, f"{name}: registers are spilled"
    assert entry.entry == "bsr_sm90_0"
    assert entry.count("HGMMA") and entry.count("UTMALDG") and not entry.count("HMMA")
    assert entry.count("UTMASTG") and constexprs["config"].epi_tma
    # D's columns, its contiguous mode, may lie on the tile's M: matrices are turned on the way.
    assert bool(entry.count("STSM.16.MT88")) == (constexprs["config"].sparse_on_m == left)
    # memcheck reports remote stores in a cluster of one CTA
    assert bool(entry.count("STAS")) == (constexprs["config"].cluster != (1, 1))


def test_a_slot_of_the_queue_is_given_back_after_it_was_read() -> None:
    """A remote arrive does not wait for loads before it: it must depend on what they bring.

    `test_many_short_lists_with_plain_stores` showed on a GPU what happens else.
    """
    _, function, args, constexprs = bsr_kernel(BsrKind((128, 128), "bf16", False, False), "sm_90a")
    assert constexprs["config"].cluster != (1, 1)
    lines = function.compile(*args, arch="sm_90a", **constexprs).sass().splitlines()
    loads = [(i, found[1]) for i, line in enumerate(lines) if (found := re.search(r"LDS\.128 (R\d+),", line))]
    assert len(loads) >= 3  # the peer's producer; consumers, the first item and later ones
    for start, register in loads:
        between = takewhile(lambda line: "SYNCS.ARRIVE" not in line, lines[start + 1 :])
        assert any(re.search(rf"\b{register}\b", line) for line in between), lines[start]


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("block", "left", "dtypes"),
    [
        ((128, 128), False, (E4M3, E4M3)),  # 64 x 192 a warpgroup, twice
        ((64, 64), True, (E5M2, E4M3)),  # on WGMMA's N, two blocks a stage
        ((48, 80), False, (E4M3, E5M2)),
        ((32, 32), False, (E4M3, E4M3)),  # four blocks a stage, each with accumulators of its own
    ],
    ids=str,
)
def test_fp8_blocks_with_scales(block: tuple[int, int], left: bool, dtypes: tuple) -> None:
    """Two sets of accumulators, an epilogue with everything, and no spills."""
    size, inner = (4096, 8 * block[0]) if left else (8 * block[0], 4096), 8 * block[1]
    problem = BsrProblem(*size, inner, 9, *block, dtype="fp8", dense_k_major=True, dense_left=left)
    config = choose(problem)
    epilogue = ScaledEpilogue(LinearEpilogue(bias=True, residual=True, activation="gelu"), 1)
    layout = BsrLayout(block, False, left, ("1", "n", "mn"), scaled=True)

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dense = meta(4096, inner, dtype=dtypes[1])
    f32, bf16 = torch.float32, torch.bfloat16
    operands = (
        meta(9, 1, 1, dtype=f32),
        meta(1, dtype=f32),
        meta(size[1], dtype=bf16),
        meta(*size, dtype=bf16),
    )
    args = (
        meta(9, *block, dtype=dtypes[0]), dense if left else dense.t(), meta(*size, dtype=bf16),
        meta(54, dtype=torch.int32), meta(1, dtype=torch.int32), None, operands, 132,
    )  # fmt: skip
    compiled = FUNCTIONS["sm90"].compile(
        *args, arch="sm_90a", config=config, epilogue=epilogue, layout=layout
    )
    (entry,) = compiled.resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0
    assert entry.count("UTMASTG") and config.epi_tma
    # Blocks lie where D's columns are the kernel's N, but for those that are too small for WGMMA's M.
    assert bool(entry.count("STSM.16.MT88")) != (left or block[0] % 64 == 0)
    names = {E4M3: "E4M3", E5M2: "E5M2"}
    kinds = [names[dtype] for dtype in (dtypes if config.sparse_on_m else dtypes[::-1])]
    (product,) = [name for name in entry.instructions if "GMMA" in name]
    assert product.startswith("QGMMA") and product.endswith(".".join(kinds))
    steps = -(-block[1] // 32)
    waves = config.tile[0] // 128 if config.tile[0] > 64 else 1  # of 64 rows of a warpgroup
    assert entry.instructions[product] == steps * config.units * waves  # one group, no peeled copy of it


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (32, 32), (16, 16), (96, 96)], ids=str)
def test_few_columns(block: tuple[int, int]) -> None:
    rows, inner = 8 * block[0], 8 * block[1]
    for columns in (8, 24, 40, 136):
        config = choose(BsrProblem(rows, columns, inner, 9, *block))

        def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        args = (
            meta(9, *block), meta(inner, columns), meta(rows, columns), meta(54, dtype=torch.int32),
            meta(1, dtype=torch.int32), None, (), 132,
        )  # fmt: skip
        compiled = FUNCTIONS["sm90"].compile(
            *args, arch="sm_90a", config=config, epilogue=LinearEpilogue(), layout=BsrLayout(block)
        )
        (entry,) = compiled.resources()
        assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, config


@pytest.mark.parametrize(("extent", "left"), [(64, False), (32, True)])
def test_lists_in_pairs(extent: int, left: bool) -> None:
    """Blocks of 64 have wide tiles, two loads each of the dense matrix for one CTA and for two."""
    for by_column in (False, True):
        name, function, args, constexprs = bsr_kernel(
            BsrKind((extent, extent), "bf16", by_column, left, bias=True, blocks=LARGE), "sm_90a"
        )
        assert constexprs["config"].pairs
        assert constexprs["config"].tile == ((256, 32) if left else (64, 512))
        (entry,) = function.compile(*args, arch="sm_90a", **constexprs).resources()
        assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, f"{name}: spills"
        assert entry.count("HGMMA") and entry.count("UTMASTG")


@pytest.mark.parametrize("rows", [4, 2])
def test_block_rows_that_share_tiles(rows: int) -> None:
    """A stage has 32 of K, of one or two joined blocks; the packing kernel turns them."""
    extent, size, nnz = 64 // rows, 8192, 4096
    problem = BsrProblem(size, size, size, nnz, extent, extent)
    config = tiles_together(problem)
    assert config.pairs and config.deep_boxes and config.rows_together == rows

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    int32, matrix = torch.int32, meta(size, size)
    words = meta(2, dtype=int32)
    args = (meta(nnz, extent, 64), matrix, matrix, meta(64, dtype=int32), words, None, (meta(size),), 132)
    epilogue, layout = LinearEpilogue(bias=True), BsrLayout((extent, 64), True, operand_modes=("n",))
    choices = {"config": config, "epilogue": epilogue, "layout": replace(layout, nans=NanRule.TELL)}
    (entry,) = FUNCTIONS["sm90"].compile(*args, arch="sm_90a", **choices).resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0
    assert entry.count("HGMMA") == 4  # two of K, for the first group and the others
    # Of each block of a stage the kept one, and the dense one of two warpgroups, for one CTA or for both.
    assert entry.count("UTMALDG") == 5 * config.units and entry.count("UTMASTG")
    places = meta(129, dtype=int32), meta(rows, nnz, dtype=int32), meta(nnz, extent, 64), words
    for transposed in (False, True):
        packing = PACK.compile(meta(nnz, extent, extent), *places, arch="sm_90a", transposed=transposed)
        (entry,) = packing.resources()
        assert entry.spill_loads == entry.stack_bytes == 0
        assert entry.count("LDG.E.128") == entry.count("STG.E.128") == 8


def test_lists_in_pieces() -> None:
    """Two warpgroups with 128 x 192 each, the most accumulators: the sum of pieces needs no spills."""
    made = bsr_kernel(BsrKind((128, 128), "bf16", bias=True, split=True), "sm_90a")
    _, function, args, constexprs = made
    assert constexprs["config"].tile == (128, 192) and constexprs["config"].split
    (entry,) = function.compile(*args, arch="sm_90a", **constexprs).resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0
    loads = sum(count for name, count in entry.instructions.items() if name.startswith("LDG.E.128"))
    assert TOGETHER * 16 // 4 <= loads < 192 // 4  # a loop over subtiles of 16 elements a thread


@pytest.mark.parametrize(
    ("block", "columns"),
    [((64, 64), True), ((128, 128), False), ((512, 112), True), ((16, 16), True), ((32, 32), True)],
    ids=str,
)
def test_sampled_product(block: tuple[int, int], columns: bool) -> None:
    name, function, args, constexprs = sampled_kernel(block, "bf16", columns, "sm_90a", kept=LARGE)
    (entry,) = function.compile(*args, arch="sm_90a", **constexprs).resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, f"{name}: registers are spilled"
    assert entry.entry == "bsr_sddmm_sm90_0"
    assert entry.count("HGMMA") and entry.count("UTMALDG") and entry.count("UTMASTG")


def test_kernels_ahead_of_time_have_names_of_their_own() -> None:
    for arch, family in (("sm_90a", "sm90"), ("sm_89", "sm80")):
        names = [name for name, *_ in iter_bsr(arch)]
        assert len(names) == len(set(names)) == (170 if family == "sm90" else 68)
        lists = {f"bsr {kind} int{bits}" for kind in ("row_lists", "row_chunks") for bits in (32, 64)}
        assert lists < set(names)
        assert all(f" {family} " in name or " sddmm " in name for name in set(names) - lists)
        assert sum("e4m3" in name for name in names) == 4
    assert len(list(iter_bsr("sm_86"))) == 64


@pytest.mark.parametrize(("family", "arch"), [("sm90", "sm_90a"), ("sm80", "sm_89")])
def test_fp8_kernels_ahead_of_time_compile(family: str, arch: str) -> None:
    name, function, args, constexprs = bsr_kernel(BsrKind((64, 64), "e4m3", dense_left=True), arch)
    (entry,) = function.compile(*args, arch=arch, **constexprs).resources()
    assert entry.spill_loads == entry.spill_stores == entry.stack_bytes == 0, f"{name}: registers are spilled"
    assert entry.count("QGMMA" if family == "sm90" else "QMMA")
