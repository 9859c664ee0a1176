"""The kernels that are worth compiling ahead of time: one for each configuration and common kind of operands.

A call may need others (split-K of another depth, unaligned operands, rarer epilogues); those are compiled at
their first call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.config.budget import why_not
from kernels_dsl.config.family import FAMILIES
from kernels_dsl.config.gemm import EntryLayout, GemmConfig, Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.gemm_table import TABLES, adapted
from kernels_dsl.config.problem import DEVICES_BY_ARCH, Device, GemmProblem
from kernels_dsl.ops.aot.attention import iter_attention
from kernels_dsl.ops.aot.bsr import iter_bsr
from kernels_dsl.ops.aot.fp8 import iter_fp8
from kernels_dsl.ops.gemm.kernels import FUNCTIONS
from lowering.records import frozen

_EXTENT = 512  # of M, N and K; only strides and alignment count
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SPLIT = 4
_PLAIN = LinearEpilogue()

Kernel = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


@frozen
class OperandKind:
    """What the tensors of a call are like. `b_columns`: b is a transposed weight, contiguous along K."""

    dtype: str = "bf16"
    b_columns: bool = False
    epilogue: LinearEpilogue = _PLAIN

    @property
    def label(self) -> str:
        """ "bf16 nt bias gelu"."""
        parts = [self.dtype, "nt" if self.b_columns else "nn"]
        parts += ["bias"] * self.epilogue.bias
        parts += [self.epilogue.activation] if self.epilogue.activation else []
        return " ".join(parts)


KINDS = (
    OperandKind("bf16"),
    OperandKind("bf16", b_columns=True),
    OperandKind("fp16"),
    OperandKind("fp16", b_columns=True),
    OperandKind("fp32", b_columns=True),
    OperandKind("bf16", b_columns=True, epilogue=LinearEpilogue(bias=True)),
    OperandKind("bf16", b_columns=True, epilogue=LinearEpilogue(bias=True, activation="gelu")),
)


def config_label(config: GemmConfig) -> str:
    """ "128x256 cluster 2x1 pingpong split 4": the configuration in a kernel's name."""
    words = [f"{config.tile_m}x{config.tile_n}"]
    if isinstance(config, Sm90GemmConfig):
        if config.cluster_m * config.cluster_n > 1:
            words.append(f"cluster {config.cluster_m}x{config.cluster_n}")
        words += ["pingpong"] * (config.schedule is Schedule.PINGPONG)
        words += ["turned"] * config.turned
        words += ["along-n"] * (not config.raster_along_m)
        words += ["plain-store"] * (not config.epi_tma)
        words += ["stream-k"] * config.stream_k
    else:
        words.append(f"k{config.tile_k} stages {config.stages} warps {config.warps_m}x{config.warps_n}")
        if min(config.copy_bytes_a, config.copy_bytes_b) < 16:
            words.append(f"copy {config.copy_bytes_a}+{config.copy_bytes_b}")
    words += [f"split {config.split_k}"] * (config.split_k > 1)
    return " ".join(words)


def _configs(family: str, problem: GemmProblem, device: Device, plain: bool) -> Iterator[GemmConfig]:
    """The table's configurations; for a plain epilogue in both directions of raster and with a split of K."""
    for candidate in TABLES[family]:
        for split in (1, _SPLIT) if plain else (1,):
            if split > 1 and candidate.config.turned:
                continue
            if split > 1 and candidate.config.tile_m * candidate.config.tile_n > 128 * 128:
                continue  # a split is for few tiles, which are small ones
            config = adapted(replace(candidate.config, split_k=split), problem)
            if why_not(config, problem, device) is not None:
                continue
            yield config
            if isinstance(config, Sm90GemmConfig) and plain:
                yield replace(config, raster_along_m=False)


def gemm_kernel(config: GemmConfig, kind: OperandKind, align: int = 16) -> Kernel:
    """One kernel: (name, jit function, arguments on the meta device, configuration).

    `align`: bytes to which the rows of a and b are aligned, 16 for the common case.
    """
    dtype = _DTYPES[kind.dtype]
    pitch = _EXTENT + (align // dtype.itemsize if align < 16 else 0)

    def matrix(*shape: int, dtype: torch.dtype = dtype, pitch: int = _EXTENT) -> torch.Tensor:
        return torch.empty((*shape[:-1], pitch), dtype=dtype, device="meta")[..., : shape[-1]]

    a, b, d = (matrix(_EXTENT, _EXTENT, pitch=p) for p in (pitch, pitch, _EXTENT))
    if isinstance(config, Sm90GemmConfig) and not config.epi_tma:
        d = matrix(_EXTENT, _EXTENT, pitch=_EXTENT + 1)
    operands: tuple[Any, ...] | None = (matrix(_EXTENT),) if kind.epilogue.bias else None
    epilogue, layout = kind.epilogue, EntryLayout(("n",) if kind.epilogue.bias else (), swap=config.turned)
    if config.split_k > 1:
        d = matrix(config.split_k, _EXTENT, _EXTENT, dtype=torch.float32)
        operands, epilogue, layout = None, _PLAIN, EntryLayout()
    args = (a, b.t() if kind.b_columns else b, d, operands, 132)
    constexprs = {"config": config, "epilogue": epilogue, "layout": layout}
    name = f"gemm {config.family} {config_label(config)} {kind.label}"
    return name, FUNCTIONS[config.family], args, constexprs


def reduce_kernel(split_k: int, kind: OperandKind, family: str) -> Kernel:
    """The second kernel of split-K after a GEMM of `family`, as `gemm_kernel`."""
    workspace = torch.empty((split_k, _EXTENT, _EXTENT), dtype=torch.float32, device="meta")
    d = torch.empty((_EXTENT, _EXTENT), dtype=_DTYPES[kind.dtype], device="meta")
    bias = torch.empty((_EXTENT,), dtype=_DTYPES[kind.dtype], device="meta")
    args = (workspace, d, (bias,) if kind.epilogue.bias else None)
    layout = EntryLayout(("n",) if kind.epilogue.bias else ())
    constexprs = {
        "split_k": split_k,
        "epilogue": kind.epilogue,
        "layout": layout,
        "early": FAMILIES[family].launches_early,
    }
    return f"gemm splitk_reduce {split_k} {kind.label}", FUNCTIONS["splitk_reduce"], args, constexprs


def _gemm_kernels(arch: str) -> Iterator[Kernel]:
    device = DEVICES_BY_ARCH[arch]
    for family in device.families()[:1]:
        for kind in KINDS:
            problem = GemmProblem(
                _EXTENT, _EXTENT, _EXTENT, 1, kind.dtype, kind.dtype, b_k_major=kind.b_columns
            )
            for config in _configs(family, problem, device, kind.epilogue == _PLAIN):
                yield gemm_kernel(config, kind)
    for kind in KINDS:
        if kind.b_columns or kind.dtype == "fp32":
            yield reduce_kernel(_SPLIT, kind, device.families()[0])


def iter_kernels(arch: str, ops: Sequence[str] = ("gemm",)) -> Iterator[Kernel]:
    """(name, jit function, arguments without contents, configuration) of every kernel worth compiling.

    `function.compile(*arguments, arch=arch, **configuration)` compiles one; no GPU is needed. ValueError for
    an unknown op or an architecture without kernels.
    """
    makers = {"gemm": _gemm_kernels, "attention": iter_attention, "bsr": iter_bsr, "fp8": iter_fp8}
    for op in ops:
        if op not in makers:
            raise ValueError(f"ops has {op!r}, must be of: {', '.join(makers)}")
    if arch not in DEVICES_BY_ARCH:
        raise ValueError(f"arch is {arch!r}, must be one of {', '.join(DEVICES_BY_ARCH)}")
    for op in dict.fromkeys(ops):
        yield from makers[op](arch)


_SM80_NARROW = Sm80GemmConfig(64, 64, 32, 4, 2, 2)


def representative(arch: str) -> Iterator[Kernel]:
    """A set that covers each configuration of the tables and each kind of operands once, for tests."""
    device = DEVICES_BY_ARCH[arch]
    family = device.families()[0]
    plain = KINDS[0]
    problem = GemmProblem(_EXTENT, _EXTENT, _EXTENT)
    for candidate in TABLES[family]:
        config = adapted(candidate.config, problem)
        if why_not(config, problem, device) is None:
            yield gemm_kernel(config, plain)
    first = TABLES[family][0].config
    for kind in KINDS[1:]:
        kind_problem = replace(problem, ab_type=kind.dtype, d_type=kind.dtype, b_k_major=kind.b_columns)
        yield gemm_kernel(adapted(first, kind_problem), kind)
    small = next(c.config for c in TABLES[family] if (c.config.tile_m, c.config.tile_n) == (64, 64))
    yield gemm_kernel(adapted(replace(small, split_k=_SPLIT), problem), plain)
    yield reduce_kernel(_SPLIT, KINDS[-1], family)
    if isinstance(first, Sm90GemmConfig):
        yield gemm_kernel(replace(first, raster_along_m=False), plain)
        unaligned = replace(problem, d_align=2)
        for candidate in TABLES[family]:
            config = adapted(candidate.config, unaligned)
            if why_not(config, unaligned, device) is None:
                yield gemm_kernel(config, plain)
    else:
        for align in (8, 4, 2):
            narrow = replace(problem, a_align=align, b_align=align)
            yield gemm_kernel(adapted(_SM80_NARROW, narrow), plain, align)
