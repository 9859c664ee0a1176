"""The block-sparse kernels that are worth compiling ahead of time, see `aot`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue, ScaledEpilogue
from kernels_dsl.config.bsr import PAIR_COLUMNS, Sm90BsrConfig, choose, unpaired
from kernels_dsl.config.bsr_layout import BsrLayout, BsrProblem
from kernels_dsl.config.bsr_sampled import choose_sampled
from kernels_dsl.config.bsr_sm80 import choose_sddmm_sm80, choose_sm80, sddmm_units
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.bsr.arguments import BsrConfig
from kernels_dsl.ops.bsr.pattern import Pattern
from kernels_dsl.ops.bsr.plan import FUNCTIONS
from lowering import recording

Kernel = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
SCALED_BLOCKS = ((64, 64), (128, 128))
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (512, 112))
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LARGE = 128
"""Blocks along D's blocked mode of a large product."""
_EXTENT, _KEPT, _SMS = 4096, 9, 132  # only strides, alignment and how large is "large" count


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bsr_kernel(
    family: str,
    block: tuple[int, int],
    dtype: str,
    by_column: bool,
    dense_left: bool,
    bias: bool = False,
    blocks: int = 8,
    split: bool = False,
) -> Kernel:
    """(name, jit function, arguments on the meta device, configuration) of one product.

    `by_column`: lists of block columns, for Aᵀ B and B A. A bias has a value for each column of D. `blocks`
    along D's blocked mode. `split`: lists may come in pieces, on Hopper.
    """
    mn, k = block[::-1] if by_column else block
    blocked, inner = blocks * mn, 8 * k
    size = (_EXTENT, blocked) if dense_left else (blocked, _EXTENT)
    problem = BsrProblem(
        *size, inner, _KEPT, mn, k, dtype=dtype, d_dtype=dtype, sparse_k_major=not by_column,
        dense_k_major=dense_left, dense_left=dense_left,
    )  # fmt: skip
    hopper = choose(problem) if family == "sm90" else None
    config: BsrConfig = hopper or choose_sm80(problem)
    kind = _DTYPES[dtype]
    lists: tuple[Any, ...]
    lists = (_meta(4 + blocks * 4 + 2 * _KEPT), _meta(1) if config.traits.is_persistent else None, None)
    if split and isinstance(config, Sm90BsrConfig):
        config = replace(unpaired(config), split=True)
        lists = (_meta(4 + blocks * 4 + 3 * _KEPT), _meta(_SMS), _meta(_EXTENT, dtype=torch.float32))
    dense = _meta(_EXTENT, inner, dtype=kind) if dense_left else _meta(inner, _EXTENT, dtype=kind)
    operands = (_meta(size[1], dtype=kind),) if bias else None
    args = (_meta(_KEPT, *block, dtype=kind), dense, _meta(*size, dtype=kind), *lists, operands, _SMS)
    layout = BsrLayout(block, by_column, dense_left, ("n",) if bias else ())
    form = "dense @ bsr" if dense_left else "bsr @ dense"
    words = [
        f"bsr {config.family} {block[0]}x{block[1]} {form}",
        "by column" * by_column,
        dtype,
        "bias" * bias,
        "large" * (blocks > 8),
        "split" * split,
    ]
    constexprs = {"config": config, "epilogue": LinearEpilogue(bias=bias), "layout": layout}
    return " ".join(filter(None, words)), FUNCTIONS[config.family], args, constexprs


def sampled_kernel(family: str, block: tuple[int, int], dtype: str, columns: bool, kept: int = 1) -> Kernel:
    """The sampled product; `columns`: b is a transpose, as in the gradient of the values of A @ B.
    `kept`: blocks of a block row.

    The SM80-class kernel where `family` has none for the block.
    """
    kind = _DTYPES[dtype]
    rows = _meta(_KEPT)
    b = _meta(8 * block[1], _EXTENT, dtype=kind).t() if columns else _meta(_EXTENT, 8 * block[1], dtype=kind)
    hopper = choose_sampled(block, columns, True, kept) if family == "sm90" else None
    together = 1 if hopper is None else hopper.rows_together
    args = (
        _meta(8 * block[0], _EXTENT, dtype=kind),
        b,
        _meta(_KEPT, *block, dtype=kind),
        (rows, rows, rows, _meta(9), *([_meta(together, _KEPT)] if together > 1 else [])),
        None,
        _SMS,
    )
    constexprs: dict[str, Any] = {"epilogue": LinearEpilogue(), "block": block}
    if hopper is None:
        constexprs |= {"config": choose_sddmm_sm80(block, (16, 16)), "units": sddmm_units(block)}
    else:
        constexprs |= {"config": hopper}
    kind_of = "sm80" if hopper is None else "sm90"
    name = f"bsr sddmm {kind_of} {block[0]}x{block[1]} {dtype} {'nt' if columns else 'nn'}"
    name += " in twos" if hopper is not None and hopper.cluster > 1 else ""
    return name, FUNCTIONS[f"sddmm_{kind_of}"], args, constexprs


def scaled_kernel(family: str, block: tuple[int, int], dense_left: bool) -> Kernel:
    """The product of e4m3 factors with a scale a kept block and one for the dense factor; K contiguous."""
    blocked, inner = 8 * block[0], 8 * block[1]
    size = (_EXTENT, blocked) if dense_left else (blocked, _EXTENT)
    problem = BsrProblem(*size, inner, _KEPT, *block, dtype="fp8", dense_k_major=True, dense_left=dense_left)
    hopper = choose(problem) if family == "sm90" else None
    config: BsrConfig = hopper or choose_sm80(problem)
    kind = torch.float8_e4m3fn
    dense = _meta(_EXTENT, inner, dtype=kind)
    args = (
        _meta(_KEPT, *block, dtype=kind), dense if dense_left else dense.t(),
        _meta(*size, dtype=torch.bfloat16),
        _meta(4 + 8 * 4 + 2 * _KEPT), _meta(1) if config.traits.is_persistent else None, None,
        (_meta(_KEPT, 1, 1, dtype=torch.float32), _meta(1, dtype=torch.float32)), _SMS,
    )  # fmt: skip
    layout = BsrLayout(block, False, dense_left, ("1",), scaled=True)
    form = "dense @ bsr" if dense_left else "bsr @ dense"
    constexprs = {"config": config, "epilogue": ScaledEpilogue(LinearEpilogue(), 1), "layout": layout}
    return (
        f"bsr {config.family} {block[0]}x{block[1]} {form} e4m3",
        FUNCTIONS[config.family],
        args,
        constexprs,
    )


def pair_kernels(arch: str) -> Iterator[Kernel]:
    """The kernels that make lists in pairs: few and many lists, of few and many blocks."""
    for lists, extent in ((8, 8), (LARGE, PAIR_COLUMNS)):
        first = torch.zeros(lists + 1, dtype=torch.int32)
        with recording.record(arch) as calls:
            _ = Pattern(first, torch.zeros(_KEPT, dtype=torch.int32), lists, extent).by_row.in_pairs
        for call in calls:
            size = call.constants.get("most") or f"{call.constants['warps']} warps"
            yield f"bsr sm90 {call.function.name} {size}", call.function, call.args, call.constants


def iter_bsr(arch: str) -> Iterator[Kernel]:
    """The block-sparse kernels of an architecture, a key of `DEVICES_BY_ARCH`."""
    device = DEVICES_BY_ARCH[arch]
    family = device.families()[0]
    for block in SCALED_BLOCKS if device.has_fp8 else ():
        for dense_left in (False, True):
            yield scaled_kernel(family, block, dense_left)
    for dtype in _DTYPES:
        for block in BLOCKS:
            for by_column, dense_left in ((False, False), (True, False), (False, True), (True, True)):
                yield bsr_kernel(family, block, dtype, by_column, dense_left)
                if family == "sm90":
                    yield bsr_kernel(family, block, dtype, by_column, dense_left, split=True)
            yield bsr_kernel(family, block, dtype, False, True, bias=True)
            yield sampled_kernel(family, block, dtype, columns=True)
        if family == "sm90":  # other tiles
            for block in BLOCKS[:3]:
                yield sampled_kernel(family, block, dtype, columns=True, kept=LARGE)
            for by_column in (False, True):
                yield bsr_kernel(family, (64, 64), dtype, by_column, False, blocks=LARGE)
                yield bsr_kernel(family, (32, 32), dtype, by_column, True, blocks=LARGE)
    if family == "sm90":
        yield from pair_kernels(arch)
