"""The attention kernels that are worth compiling ahead of time, see `aot`.

Sizes choose between tiles, so that each kind of call is listed with every tile that some size gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels_dsl.aot.lists import iter_lists
from kernels_dsl.aot.recorded import Kernel, kernel_of, recorded
from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionArguments,
    AttentionOptions,
    Extras,
    MaxSeqlens,
    Seqlens,
)
from kernels_dsl.ops.attention.operation import ATTENTION
from kernels_dsl.sparse.attention_lists import unwritten
from kernels_dsl.sparse.block_lists import BlockLists
from lowering.records import frozen

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK = (128, 128)
_WINDOW_ENTRIES = (4, 20)  # of cut and whole blocks; that a row of entries is a multiple of 16 bytes counts
_SIZES = ((128, 8), (128, 64), (512, 64), (1024, 64), (16384, 8))
"""Length and heads: one for each tile that some size gets on some GPU."""
_LIST_SIZES = ((512, 2), (512, 64))
"""Of calls with lists, whose tile is that of their blocks."""
_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_PLAIN, _CAUSAL = AttentionOptions(), AttentionOptions(causal=True)
_WINDOW = AttentionOptions(causal=True, window=(100, 0))


@frozen
class AttentionKind:
    """A kind of calls of attention.

    lists: None, "full" (unmasked blocks, as of `topk_blocks`), "partial" (masked ones, as of causal
    `topk_blocks`) or "both" (as of `window_blocks`, one list for all heads of a single sequence), of
    128 × 128 blocks.
    layout: "bshd", "bhsd" or "thd" (packed).
    """

    dim: int
    dim_v: int
    dtype: str = "bf16"
    layout: str = "bshd"
    options: AttentionOptions = _PLAIN
    lists: str | None = None
    lse: bool = False

    @property
    def label(self) -> str:
        """ "bf16 d128 causal lse"."""
        dims = f"d{self.dim}" + (f"/{self.dim_v}" if self.dim != self.dim_v else "")
        words = [self.dtype, dims] + [self.layout] * (self.layout != "bshd")
        if self.options.window is not None:
            words.append("window")
        elif self.options.causal:
            words.append("causal" + " top-left" * (self.options.alignment == "top_left"))
        words += [f"lists {self.lists}"] if self.lists else []
        return " ".join(words + ["lse"] * self.lse)


def kinds() -> Iterator[AttentionKind]:
    """Dense and causal in both dtypes at all common head dimensions; the rest in bf16 at 64 and 128."""
    for dtype in _DTYPES:
        for dim, dim_v in _DIMS:
            for options in (_PLAIN, _CAUSAL):
                yield AttentionKind(dim, dim_v, dtype, options=options)
    for dim in (64, 128):
        yield AttentionKind(dim, dim, options=_CAUSAL, lse=True)
        yield AttentionKind(dim, dim, options=_WINDOW)
        yield AttentionKind(dim, dim, layout="thd", options=_CAUSAL)
        yield AttentionKind(dim, dim, layout="thd")
        yield AttentionKind(dim, dim, layout="bhsd")
        yield AttentionKind(dim, dim, layout="bhsd", options=_CAUSAL._replace(alignment="top_left"))
        yield AttentionKind(dim, dim, lists="full")
        yield AttentionKind(dim, dim, options=_CAUSAL, lists="partial")
        yield AttentionKind(dim, dim, options=_WINDOW, lists="both")


def _extras(kind: AttentionKind, length: int, heads: int) -> Extras:
    """The arguments of a call besides q, k and v."""
    if kind.layout == "thd":
        starts = torch.empty(2, dtype=torch.int32)
        return Extras(seqlens=Seqlens(starts, starts), max_seqlens=MaxSeqlens(length))
    if kind.lists is None:
        return NO_EXTRAS
    rows = length // _BLOCK[0]
    entries = _WINDOW_ENTRIES if kind.lists == "both" else (rows, rows)
    lead = (1, 1 if kind.lists == "both" else heads, rows)
    partial, full = (unwritten(torch.device("cpu"), lead, count) for count in entries)
    absent = None, None
    pairs = {"full": (absent, full), "partial": (partial, absent), "both": (partial, full)}[kind.lists]
    return Extras(blocks=BlockLists(*pairs[0], *pairs[1], _BLOCK))


def _call(kind: AttentionKind, length: int, heads: int) -> AttentionArguments:
    """A call with so many heads, those of all sequences together. Each may be the same memory."""
    shapes = {"bshd": (1, length, heads), "bhsd": (1, heads, length), "thd": (length, heads)}
    q, v = (
        torch.empty(*shapes[kind.layout], dim, dtype=_DTYPES[kind.dtype]) for dim in (kind.dim, kind.dim_v)
    )
    extras = _extras(kind, length, heads)
    return AttentionArguments(q, q, v, kind.options, kind.layout, extras, return_lse=kind.lse)


def attention_kernels(kind: AttentionKind, arch: str) -> Iterator[Kernel]:
    """The kernel of each tile that `kind` can get; of the fastest family that the GPU has."""
    found: dict[str, Kernel] = {}
    for length, heads in _SIZES if kind.lists is None else _LIST_SIZES:
        (call,) = recorded(arch, partial(ATTENTION.run, _call(kind, length, heads)))
        config = call.constants["config"]
        twice = " twice an SM" if config.ctas_per_sm == 2 else ""
        queued = " queued" * (config.traits.is_persistent and call.args[-2] is not None)
        name = f"attention {config.family} {config.tile_m}x{config.tile_n}{twice} {kind.label}{queued}"
        found.setdefault(name, kernel_of(name, call))
    yield from found.values()


def iter_attention(arch: str) -> Iterator[Kernel]:
    """The attention kernels of an architecture, a key of `DEVICES_BY_ARCH`, and those that make lists."""
    for kind in kinds():
        yield from attention_kernels(kind, arch)
    yield from iter_lists(arch)
