"""The kernels that are worth compiling ahead of time: one for each configuration and common kind of operands.

`iter_common` has those of common calls of every operation. A call may need others (split-K of another depth,
unaligned operands, rarer epilogues); those are compiled at their first call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kernels_dsl.aot.attention import iter_attention
from kernels_dsl.aot.bsr import iter_bsr
from kernels_dsl.aot.common import OPS as COMMON_OPS
from kernels_dsl.aot.common import common_kernels, core_kernels, once
from kernels_dsl.aot.fp8 import iter_fp8
from kernels_dsl.aot.recorded import Kernel, kernel_of, recorded
from kernels_dsl.config.budget import why_not
from kernels_dsl.config.gemm import GemmConfig, Sm80GemmConfig
from kernels_dsl.config.gemm_table import TABLES, adapted
from kernels_dsl.config.problem import DEVICES_BY_ARCH, Device, GemmProblem
from kernels_dsl.ops.gemm.gemm import gemm
from lowering.recording import RecordedCall
from lowering.records import frozen

_EXTENT = 512  # of M, N and K; only strides and alignment count
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SPLIT = 4


@frozen
class OperandKind:
    """The operands of a call. `b_columns`: b is a transposed weight, contiguous along K. `align`: bytes to
    which the rows of a and b are aligned, `d_align` those of D."""

    dtype: str = "bf16"
    b_columns: bool = False
    bias: bool = False
    activation: str | None = None
    align: int = 16
    d_align: int = 16

    @property
    def label(self) -> str:
        """ "bf16 nt bias gelu"."""
        words = [self.dtype, "nt" if self.b_columns else "nn", "bias" * self.bias, self.activation or ""]
        return " ".join(filter(None, words))

    @property
    def has_epilogue(self) -> bool:
        """D is more than the product."""
        return self.bias or self.activation is not None

    @property
    def problem(self) -> GemmProblem:
        """The problem of such a call."""
        return GemmProblem(
            _EXTENT, _EXTENT, _EXTENT, 1, self.dtype, self.dtype, b_k_major=self.b_columns,
            a_align=self.align, b_align=self.align, d_align=self.d_align,
        )  # fmt: skip


KINDS = (
    OperandKind("bf16"),
    OperandKind("bf16", b_columns=True),
    OperandKind("fp16"),
    OperandKind("fp16", b_columns=True),
    OperandKind("fp32", b_columns=True),
    OperandKind("bf16", b_columns=True, bias=True),
    OperandKind("bf16", b_columns=True, bias=True, activation="gelu"),
)


def _configs(family: str, kind: OperandKind, device: Device) -> Iterator[GemmConfig]:
    """The table's configurations; for a plain product in both directions of raster and with a split of K."""
    problem = kind.problem
    for candidate in TABLES[family]:
        for split in (1,) if kind.has_epilogue else (1, _SPLIT):
            if split > 1 and candidate.config.turned:
                continue
            if split > 1 and candidate.config.tile_m * candidate.config.tile_n > 128 * 128:
                continue  # a split is for few tiles, which are small ones
            config = adapted(replace(candidate.config, split_k=split), problem)
            if why_not(config, problem, device) is not None:
                continue
            yield config
            if not kind.has_epilogue:
                yield from config.in_orders(config.raster_group)[1:]


def _calls(arch: str, config: GemmConfig, kind: OperandKind) -> list[RecordedCall]:
    """The launches of a product: its kernel, and for a split of K the one that sums."""
    dtype = _DTYPES[kind.dtype]

    def matrix(align: int) -> torch.Tensor:
        pitch = _EXTENT + (align // dtype.itemsize if align < 16 else 0)
        return torch.empty(_EXTENT, pitch, dtype=dtype)[:, :_EXTENT]

    a, b, d = (matrix(align) for align in (kind.align, kind.align, kind.d_align))
    bias = torch.empty(_EXTENT, dtype=dtype) if kind.bias else None
    b = b.t() if kind.b_columns else b
    return recorded(arch, lambda: gemm(a, b, bias=bias, activation=kind.activation, config=config, out=d))


def gemm_kernel(arch: str, config: GemmConfig, kind: OperandKind) -> Kernel:
    """The kernel of products of `kind` with this configuration."""
    return kernel_of(f"gemm {config.family} {config.label} {kind.label}", _calls(arch, config, kind)[0])


def reduce_kernel(arch: str, kind: OperandKind) -> Kernel:
    """The second kernel of split-K."""
    small = _smallest(DEVICES_BY_ARCH[arch].families()[0])
    calls = _calls(arch, adapted(replace(small, split_k=_SPLIT), kind.problem), kind)
    return kernel_of(f"gemm splitk_reduce {_SPLIT} {kind.label}", calls[1])


def _smallest(family: str) -> GemmConfig:
    return next(c.config for c in TABLES[family] if (c.config.tile_m, c.config.tile_n) == (64, 64))


def _gemm_kernels(arch: str) -> Iterator[Kernel]:
    device = DEVICES_BY_ARCH[arch]
    for kind in KINDS:
        for config in _configs(device.families()[0], kind, device):
            yield gemm_kernel(arch, config, kind)
    for kind in KINDS:
        if kind.b_columns or kind.dtype == "fp32":
            yield reduce_kernel(arch, kind)


def iter_kernels(arch: str, ops: Sequence[str] = ("gemm",)) -> Iterator[Kernel]:
    """Every kernel worth compiling, with arguments whose contents do not count.

    ValueError for an unknown op or an architecture without kernels.
    """
    _check(arch, ops)
    for op in dict.fromkeys(ops):
        yield from _MAKERS[op](arch)


def iter_common(arch: str, ops: Sequence[str] = COMMON_OPS) -> Iterator[Kernel]:
    """The kernels that most programs need, see `common`.

    ValueError for an unknown op or an architecture without kernels.
    """
    _check(arch, ops)
    yield from common_kernels(arch, tuple(dict.fromkeys(ops)))


def iter_core(arch: str, ops: Sequence[str] = COMMON_OPS) -> Iterator[Kernel]:
    """Those of them that a released wheel carries, see `calls.core`.

    ValueError for an unknown op or an architecture without kernels.
    """
    _check(arch, ops)
    yield from core_kernels(arch, tuple(dict.fromkeys(ops)))


def iter_all(arch: str, ops: Sequence[str] = COMMON_OPS) -> Iterator[Kernel]:
    """Those of `iter_kernels` and of `iter_common`, each once.

    ValueError for an unknown op or an architecture without kernels.
    """
    _check(arch, ops)
    yield from once(itertools.chain(iter_kernels(arch, ops), iter_common(arch, ops)), arch)


_MAKERS = {"gemm": _gemm_kernels, "attention": iter_attention, "bsr": iter_bsr, "fp8": iter_fp8}


def _check(arch: str, ops: Sequence[str]) -> None:
    for op in ops:
        if op not in _MAKERS:
            raise ValueError(f"ops has {op!r}, must be of: {', '.join(_MAKERS)}")
    if arch not in DEVICES_BY_ARCH:
        raise ValueError(f"arch is {arch!r}, must be one of {', '.join(DEVICES_BY_ARCH)}")


_SM80_NARROW = Sm80GemmConfig(64, 64, 32, 4, 2, 2)


def _fitting(arch: str, kind: OperandKind) -> Iterator[Kernel]:
    """The kernels of the table's configurations that fit."""
    device = DEVICES_BY_ARCH[arch]
    for candidate in TABLES[device.families()[0]]:
        config = adapted(candidate.config, kind.problem)
        if why_not(config, kind.problem, device) is None:
            yield gemm_kernel(arch, config, kind)


def representative(arch: str) -> Iterator[Kernel]:
    """A set that covers each configuration of the tables and each kind of operands once, for tests."""
    family = DEVICES_BY_ARCH[arch].families()[0]
    plain, *others = KINDS
    yield from _fitting(arch, plain)
    first = TABLES[family][0].config
    for kind in others:
        yield gemm_kernel(arch, adapted(first, kind.problem), kind)
    yield gemm_kernel(arch, adapted(replace(_smallest(family), split_k=_SPLIT), plain.problem), plain)
    yield reduce_kernel(arch, KINDS[-1])
    if first.traits.uses_tma:
        yield gemm_kernel(arch, first.in_orders(first.raster_group)[1], plain)
        yield from _fitting(arch, replace(plain, d_align=2))
    else:
        for align in (8, 4, 2):
            kind = replace(plain, align=align)
            yield gemm_kernel(arch, adapted(_SM80_NARROW, kind.problem), kind)
