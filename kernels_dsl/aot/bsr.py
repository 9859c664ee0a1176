"""The block-sparse kernels that are worth compiling ahead of time, see `aot`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels_dsl.aot.recorded import Kernel, kernel_of, recorded
from kernels_dsl.config.bsr import PAIR_COLUMNS
from kernels_dsl.config.family import FAMILIES
from kernels_dsl.config.problem import DEVICES_BY_ARCH, Device
from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.ops.bsr.scaled import bsr_scaled_gemm
from kernels_dsl.sparse.lists import row_chunks, row_lists
from kernels_dsl.sparse.pattern import Pattern, pattern_of
from kernels_dsl.sparse.tensor import BsrTensor
from lowering.records import frozen

SCALED_BLOCKS = ((64, 64), (128, 128))
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (512, 112))
_FP8 = "e4m3"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LARGE = 128
"""Blocks along D's blocked mode of a large product."""
_EXTENT, _KEPT = 4096, 9  # only strides, alignment and how large is "large" count
_MANY = 8192
"""Elements along D's blocked mode of products whose block rows share tiles."""
_LONG = 8192
"""Elements along K of a list that comes in pieces."""


def _dtype(name: str) -> torch.dtype:
    return torch.float8_e4m3fn if name == _FP8 else _DTYPES[name]


@frozen
class BsrKind:
    """A kind of products.

    `by_column`: lists of block columns, for Aᵀ B and B A. A bias has a value for each column of D. `blocks`
    along D's blocked mode. `split`: there is a list that may come in pieces, on Hopper.
    `ragged`: rows of the dense factor end within 128 bytes.
    """

    block: tuple[int, int]
    dtype: str
    by_column: bool = False
    dense_left: bool = False
    bias: bool = False
    blocks: int = 8
    split: bool = False
    ragged: bool = False

    @property
    def label(self) -> str:
        """ "64x64 dense @ bsr by column bf16 bias large"."""
        words = (
            f"{self.block[0]}x{self.block[1]} {'dense @ bsr' if self.dense_left else 'bsr @ dense'}",
            "by column" * self.by_column,
            self.dtype,
            "bias" * self.bias,
            "large" * (self.blocks > 8),
            "split" * self.split,
            "ragged" * self.ragged,
        )
        return " ".join(filter(None, words))

    @property
    def other(self) -> int:
        """The extent of D that is not blocked: where it is small, one list may be more than a CTA's share."""
        return (_EXTENT // 4 if self.split else _EXTENT) - 8 * self.ragged

    @property
    def matrix(self) -> BsrTensor:
        """The sparse factor: its first list has more blocks than the others, all of them where that is to
        come in pieces."""
        along_k = -(-_LONG // self.block[0 if self.by_column else 1]) if self.split else 8
        mask = torch.zeros(self.blocks, along_k, dtype=torch.bool)
        mask[: _KEPT // 2, :2] = True
        mask[0, : along_k if self.split else 3] = True
        longest = int(mask.sum(1).max()), int(mask.sum(0).max())
        if self.by_column:
            mask, longest = mask.T, longest[::-1]
        rows, columns = mask.shape
        first = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        across = mask.nonzero()[:, 1].int()
        values = torch.empty(across.shape[0], *self.block, dtype=_dtype(self.dtype))
        found = BsrTensor(first, across, values, (rows * self.block[0], columns * self.block[1]))
        pattern_of(first, across, rows, columns).longest = longest
        return found.t() if self.by_column != self.dense_left else found


def bsr_kernel(kind: BsrKind, arch: str) -> Kernel:
    """The kernel of a product, with a scale a kept block and one for the dense factor where dtype is fp8."""
    sparse, is_fp8 = kind.matrix, kind.dtype == _FP8
    rows, columns = (kind.other, sparse.size[0]) if kind.dense_left else (sparse.size[1], kind.other)
    dense = _matrix(rows, columns, _dtype(kind.dtype), is_fp8 and not kind.dense_left)
    columns_of_d = sparse.size[1] if kind.dense_left else kind.other
    bias = torch.empty(columns_of_d, dtype=dense.dtype) if kind.bias else None
    scale = torch.empty(1)
    factors: tuple[Any, Any] = (dense, sparse) if kind.dense_left else (sparse, dense)
    if is_fp8:
        of_blocks = torch.empty(sparse.nnz, 1, 1)
        scales = (scale, of_blocks) if kind.dense_left else (of_blocks, scale)
        *_, call = recorded(arch, lambda: bsr_scaled_gemm(*factors, *scales))
    else:
        *_, call = recorded(arch, lambda: bsr_gemm(*factors, bias=bias))
    return kernel_of(f"bsr {call.constants['config'].family} {kind.label}", call)


def _matrix(rows: int, columns: int, dtype: torch.dtype, by_column: bool) -> torch.Tensor:
    return (
        torch.empty(columns, rows, dtype=dtype).t() if by_column else torch.empty(rows, columns, dtype=dtype)
    )


def sampled_kernel(block: tuple[int, int], dtype: str, columns: bool, arch: str, kept: int = 1) -> Kernel:
    """The kernel of a sampled product; `columns`: b is a transpose, as in the gradient of the values of
    A @ B. `kept`: blocks of each of 8 block rows; the last has one more, as no alignment counts."""
    size, kind = (8 * block[0], max(8, kept) * block[1]), _DTYPES[dtype]
    a, b = _matrix(size[0], _EXTENT, kind, False), _matrix(_EXTENT, size[1], kind, columns)
    crow = torch.arange(9, dtype=torch.int32) * kept
    crow[-1] += 1
    col = torch.zeros(8 * kept + 1, dtype=torch.int32)
    pattern = BsrTensor(crow, col, torch.empty(len(col), *block, dtype=kind), size)
    *_, call = recorded(arch, lambda: bsr_sddmm(a, b, pattern))
    words = call.function.name.removeprefix("bsr_").replace("_", " ")
    name = f"bsr {words} {block[0]}x{block[1]} {dtype} {'nt' if columns else 'nn'}"
    return kernel_of(name + " in twos" * (kept > 1), call)


def pair_kernels(arch: str) -> Iterator[Kernel]:
    """The kernels that make lists in pairs: few and many lists, of few and many blocks."""
    for lists, extent in ((8, 8), (LARGE, PAIR_COLUMNS)):
        first = torch.zeros(lists + 1, dtype=torch.int32)
        by_row = Pattern(first, torch.zeros(_KEPT, dtype=torch.int32), lists, extent).by_row
        for call in recorded(arch, partial(getattr, by_row, "in_pairs")):
            size = call.constants.get("most") or f"{call.constants['warps']} warps"
            yield kernel_of(f"bsr sm90 {call.function.name} {size}", call)


def list_kernels(arch: str) -> Iterator[Kernel]:
    """The kernels that make lists and chunks of block rows, of index tensors of either dtype."""
    for dtype in (torch.int32, torch.int64):
        first, columns = torch.zeros(9, dtype=dtype), torch.zeros(_KEPT, dtype=dtype)
        makers = partial(row_lists, first, columns, 8), partial(row_chunks, first, _KEPT, 4, 32)
        for make in makers:
            (call,) = recorded(arch, make)
            yield kernel_of(f"bsr {call.function.name} {str(dtype).removeprefix('torch.')}", call)


def together_kernels(arch: str) -> Iterator[Kernel]:
    """The kernels of large products whose block rows share tiles: the packing and the two products."""
    for (name, dtype), extent, by_column in itertools.product(_DTYPES.items(), (16, 32), (False, True)):
        mask = torch.arange(_MANY // extent * 8).view(-1, 8) % 3 > 0
        mask = mask.T if by_column else mask
        size = mask.shape[0] * extent, mask.shape[1] * extent
        kept = BsrTensor.from_dense(torch.zeros(size, dtype=dtype), mask, (extent, extent))
        # On the left a dense matrix contiguous along K is read in the other order only for blocks of 16.
        for dense_left in (False, True) if extent == 16 else (False,):
            sparse = kept.t() if by_column != dense_left else kept
            inner = sparse.size[0 if dense_left else 1]
            dense = torch.empty((_EXTENT, inner) if dense_left else (inner, _EXTENT), dtype=dtype)
            factors: tuple[Any, Any] = (dense, sparse) if dense_left else (sparse, dense)
            *_, packing, together, alone = recorded(arch, partial(bsr_gemm, *factors))
            label = BsrKind((extent, extent), name, by_column, dense_left).label
            if not dense_left:
                yield kernel_of(f"bsr sm90 packing {label}", packing)
            yield kernel_of(f"bsr sm90 {label} together", together)
            yield kernel_of(f"bsr sm90 {label} again", alone)


def kinds(device: Device) -> Iterator[BsrKind]:
    """Products of a GPU, those that call for other tiles last."""
    hopper = FAMILIES[device.families()[0]].uses_tma
    for block in SCALED_BLOCKS if device.has_fp8 else ():
        for dense_left in (False, True):
            yield BsrKind(block, _FP8, False, dense_left)
    for dtype, block in itertools.product(_DTYPES, BLOCKS):
        for dense_left, by_column in itertools.product((False, True), (False, True)):
            for split in (False, True) if hopper else (False,):
                yield BsrKind(block, dtype, by_column, dense_left, split=split)
        yield BsrKind(block, dtype, False, True, bias=True)
    for dtype, *forms in itertools.product(_DTYPES if hopper else (), (False, True), (False, True)):
        yield BsrKind((16, 16), dtype, forms[0], split=forms[1], ragged=True)
    for dtype, by_column in itertools.product(_DTYPES if hopper else (), (False, True)):
        yield BsrKind((64, 64), dtype, by_column, False, blocks=LARGE)
        yield BsrKind((32, 32), dtype, by_column, True, blocks=LARGE)


def iter_bsr(arch: str) -> Iterator[Kernel]:
    """The block-sparse kernels of an architecture, a key of `DEVICES_BY_ARCH`."""
    device = DEVICES_BY_ARCH[arch]
    for kind in kinds(device):
        yield bsr_kernel(kind, arch)
    hopper = FAMILIES[device.families()[0]].uses_tma
    for dtype in _DTYPES:
        for block in BLOCKS:
            yield sampled_kernel(block, dtype, True, arch)
        for block in BLOCKS[:3] if hopper else ():  # pairs of CTAs
            yield sampled_kernel(block, dtype, True, arch, kept=LARGE)
    yield from list_kernels(arch)
    if hopper:
        yield from together_kernels(arch)
        yield from pair_kernels(arch)
