"""The attention kernels that are worth compiling ahead of time, see `aot`.

Sizes choose between tiles, so that each kind of call is listed with every tile that some size gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.config.attention import AttentionVariant, Extent
from kernels_dsl.config.attention_table import choose, choose_for_lists
from kernels_dsl.config.family import FAMILIES
from kernels_dsl.config.problem import DEVICES_BY_ARCH, Device
from kernels_dsl.ops.aot.lists import iter_lists
from kernels_dsl.ops.attention.plan import FUNCTIONS
from lowering.records import frozen

Kernel = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LENGTH, _HEADS, _BATCH = 512, 4, 2  # only strides and alignment count
_SMS = 132
_BLOCK = (128, 128)
_WINDOW_ENTRIES = (4, 20)  # of cut and whole blocks; that a row of entries is a multiple of 16 bytes counts
_EXTENTS = tuple(
    Extent(length, length, heads, _SMS) for length in (128, 512, 1024, 4096, 16384) for heads in (8, 64, 1536)
)
_PLAIN, _CAUSAL = AttentionVariant(), AttentionVariant(right=True)
_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


@frozen
class AttentionKind:
    """What a call of attention is like.

    variant: without its lists; `lists` is None, "full" (unmasked blocks, as of `topk_blocks`), "partial"
    (masked ones, as of causal `topk_blocks`) or "both" (as of `window_blocks`, one list for all heads of a
    single sequence), of 128 × 128 blocks.
    layout: "bshd", "bhsd" or "thd" (packed).
    """

    dim: int
    dim_v: int
    dtype: str = "bf16"
    layout: str = "bshd"
    variant: AttentionVariant = _PLAIN
    lists: str | None = None
    lse: bool = False

    @property
    def label(self) -> str:
        """ "bf16 d128 causal lse"."""
        dims = f"d{self.dim}" + (f"/{self.dim_v}" if self.dim != self.dim_v else "")
        words = [self.dtype, dims] + [self.layout] * (self.layout != "bshd")
        if self.variant.left:
            words.append("window")
        elif self.variant.right:
            words.append("causal" + " top-left" * self.variant.top_left)
        words += [f"lists {self.lists}"] if self.lists else []
        return " ".join(words + ["lse"] * self.lse)


def kinds() -> Iterator[AttentionKind]:
    """Dense and causal in both dtypes at all common head dimensions; the rest in bf16 at 64 and 128."""
    for dtype in _DTYPES:
        for dim, dim_v in _DIMS:
            for variant in (_PLAIN, _CAUSAL):
                yield AttentionKind(dim, dim_v, dtype, variant=variant)
    for dim in (64, 128):
        yield AttentionKind(dim, dim, variant=_CAUSAL, lse=True)
        yield AttentionKind(dim, dim, variant=AttentionVariant(right=True, left=True))
        yield AttentionKind(dim, dim, layout="thd", variant=_CAUSAL)
        yield AttentionKind(dim, dim, layout="thd")
        yield AttentionKind(dim, dim, layout="bhsd")
        yield AttentionKind(dim, dim, layout="bhsd", variant=replace(_CAUSAL, top_left=True))
        yield AttentionKind(dim, dim, lists="full")
        yield AttentionKind(dim, dim, variant=_CAUSAL, lists="partial")
        yield AttentionKind(dim, dim, variant=AttentionVariant(right=True, left=True), lists="both")


def _arguments(kind: AttentionKind, family: str, queued: bool) -> tuple[Any, ...]:
    """The host function's runtime arguments on the meta device."""
    shapes = {
        "bshd": (_BATCH, _LENGTH, _HEADS),
        "bhsd": (_BATCH, _HEADS, _LENGTH),
        "thd": (_BATCH * _LENGTH, _HEADS),
    }
    lead = shapes[kind.layout]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, v = (empty(*lead, dim, dtype=_DTYPES[kind.dtype]) for dim in (kind.dim, kind.dim_v))
    packed = kind.layout == "thd"
    lse = None
    if kind.lse:
        shape = (_HEADS, _BATCH * _LENGTH) if packed else (_BATCH, _HEADS, _LENGTH)
        lse = empty(*shape, dtype=torch.float32)
    seqlens = (empty(_BATCH + 1), empty(_BATCH + 1), None) if packed else None
    lists: Any = None
    if kind.lists is not None:
        rows = _LENGTH // _BLOCK[0]
        lead = (1, 1) if kind.lists == "both" else (_BATCH, _HEADS)
        entries = _WINDOW_ENTRIES if kind.lists == "both" else (rows, rows)
        masked, whole = (
            tuple(x.expand(-1, _HEADS, *x.shape[2:]) for x in (empty(*lead, rows), empty(*lead, rows, n)))
            for n in entries
        )
        none = (None, None)
        lists = {"full": (*none, *whole), "partial": (*masked, *none), "both": (*masked, *whole)}[kind.lists]
    scalars = (1.0, 1.0, 0, 0)  # scale, softcap, left, right
    arguments = (q, q, v, v, lse, *scalars, seqlens, 0, lists, None, None, None)
    if not FAMILIES[family].is_persistent:
        return arguments
    return (*arguments, empty(1) if queued else None, _SMS)


def attention_kernels(kind: AttentionKind, device: Device) -> Iterator[Kernel]:
    """(name, jit function, arguments on the meta device, configuration) of each tile that `kind` can get.

    They are of the fastest family that `device` has.
    """
    family = device.families()[0]
    variant, dims = kind.variant, (kind.dim, kind.dim_v)
    if kind.lists is not None:
        config, split = choose_for_lists(family, *dims, variant, _BLOCK, device)
        variant = replace(variant, lists=split)
        found = ((config, extent) for extent in _EXTENTS)
    else:
        found = ((choose(family, *dims, variant, device, extent), extent) for extent in _EXTENTS)
    uneven = variant.uneven or kind.layout == "thd"
    for config, queued in dict.fromkeys(
        (config, uneven and config.several_tiles(extent)) for config, extent in found
    ):
        label = kind.label + " queued" * queued
        twice = " twice an SM" if config.ctas_per_sm == 2 else ""
        name = f"attention {family} {config.tile_m}x{config.tile_n}{twice} {label}"
        constexprs = {"layout": kind.layout, "config": config, "variant": variant}
        yield name, FUNCTIONS[family], _arguments(kind, family, queued), constexprs


def iter_attention(arch: str) -> Iterator[Kernel]:
    """The attention kernels of an architecture, a key of `DEVICES_BY_ARCH`, and those that make lists."""
    for kind in kinds():
        yield from attention_kernels(kind, DEVICES_BY_ARCH[arch])
    yield from iter_lists()
