"""Calls of attention that must be refused, by an error that names the argument, with nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kernels_dsl
from kernels_dsl.sparse.block_lists import BlockLists
from tests.fuzz.attention_functions import near
from tests.fuzz.case import Settings
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena
from tests.fuzz.refusals import Arguments, Refusal, RefusalCase, int32, setting
from tests.fuzz.values import filler

HEADS, KV_HEADS = 4, 2


def _lists(rows: int, **changes: Any) -> Callable[[Arguments], BlockLists]:
    def make(arguments: Arguments) -> BlockLists:
        device = arguments["q"].device
        counts = torch.full((1, 1, rows), changes.get("count", 1), dtype=torch.int32, device=device)
        indices = torch.full((1, 1, rows, 2), changes.get("index", 0), dtype=torch.int32, device=device)
        return BlockLists(counts, indices, block=changes.get("block", (128, 128)))

    return make


def _config(pack: int, tile_m: int) -> Callable[[Arguments], Any]:
    return lambda arguments: kernels_dsl.Sm80AttentionConfig(tile_m, 64, 32 * pack, 64)


DENSE = {
    "out is q": setting("out", lambda a: a["q"]),
    "out overlaps itself": setting("out", lambda a: a["q"].new_empty(1).expand(a["q"].shape)),
    "out of another shape": setting("out", lambda a: torch.empty_like(a["q"])[:, :-1]),
    "out that torch negates": setting("out", lambda a: torch._neg_view(torch.empty_like(a["q"]))),
    "out of another dtype": setting("out", lambda a: torch.empty_like(a["q"], dtype=torch.float32)),
    "q of float32": setting("q", lambda a: a["q"].float()),
    "k of another dtype": setting("k", lambda a: a["k"].to(torch.float16)),
    "k of another batch": setting("k", lambda a: a["k"][:1]),
    "k of another head dimension": setting("k", lambda a: a["k"][..., :32]),
    "v of another length": setting("v", lambda a: a["v"][:, :-1]),
    "heads that do not divide": setting("q", lambda a: a["q"][:, :, :3]),
    "head dimension of 60": setting("v", lambda a: a["v"][..., :60]),
    "three modes": setting("k", lambda a: a["k"][0]),
    "no scale": setting("scale", lambda a: 0.0),
    "a scale that is no number": setting("scale", lambda a: float("nan")),
    "softcap below 0": setting("softcap", lambda a: -1.0),
    "infinite softcap": setting("softcap", lambda a: float("inf")),
    "window below -1": setting("window", lambda a: (-5, 0)),
    "window of three": setting("window", lambda a: (1, 2, 3)),
    "alignment": setting("alignment", lambda a: "middle"),
    "mask of another shape": setting("mask", lambda a: torch.ones(3, 2, device=a["q"].device)),
    "mask of integers": setting("mask", lambda a: torch.ones((), dtype=torch.int32, device=a["q"].device)),
    "sinks of another shape": setting("sinks", lambda a: torch.ones(HEADS + 1, device=a["q"].device)),
    "rows of lists": setting("blocks", _lists(9)),
    "blocks of 96": setting("blocks", _lists(1, block=(128, 96)), named="block"),
    "index out of range": setting("blocks", _lists(1, index=7), named="indices", checked=True),
    "index below 0": setting("blocks", _lists(1, index=-1), named="indices", checked=True),
    "count too large": setting("blocks", _lists(1, count=3), named="counts", checked=True),
    "no such family": setting("family", lambda a: "sm70"),
    "configuration of narrow heads": setting("config", _config(1, 128)),
    "tile of 96 rows": setting("config", _config(2, 96)),
    "function that is none": setting("mask_mod", lambda a: 3),
    "aux of booleans": Refusal("aux", lambda a: a.update(mask_mod=near, aux=(a["q"] > 0,))),
}  # fmt: skip
PACKED = {
    "max_seqlen_q below 0": setting("max_seqlen_q", lambda a: -1),
    "sums of int64": setting("cu_seqlens_q", lambda a: a["cu_seqlens_q"].long()),
    "another number of sums": setting("cu_seqlens_k", lambda a: a["cu_seqlens_k"][:-1]),
    "another number of used keys": setting("seqused_k", int32(1)),
    "a mask without max_seqlen_k": Refusal(
        "max_seqlen_k", lambda a: a.update(mask=torch.ones((), dtype=torch.bool, device=a["q"].device))
    ),
    "out of four modes": setting("out", lambda a: a["q"][None].clone()),
    "sums that fall": setting("cu_seqlens_q", int32(0, 4, 3), checked=True),
    "rows of no sequence without out": setting("cu_seqlens_q", int32(0, 4, 6), checked=True),
    "sums beyond the rows": setting("cu_seqlens_k", int32(0, 4, 99), checked=True),
    "a sequence that is too long": setting("max_seqlen_q", lambda a: 1, checked=True),
    "more keys used than there are": setting("seqused_k", int32(1, 9), checked=True),
}
TORCH = {
    "dropout": setting("dropout_p", lambda a: 0.1),
    "a mask beside is_causal": Refusal(
        "attn_mask", lambda a: a.update(is_causal=True, attn_mask=torch.ones((), device=a["query"].device))
    ),
    "heads without enable_gqa": setting("enable_gqa", lambda a: False, named="key"),
}
OPERATIONS = {
    "attention": DENSE,
    "attention_varlen": PACKED,
    "scaled_dot_product_attention": TORCH,
}


class AttentionRefusalCase(RefusalCase):
    """One of attention."""

    tables = OPERATIONS

    def _arguments(self, arena: Arena, settings: Settings) -> Arguments:
        """Those of a call that would be fine."""
        seeds = Draw("refusal values", self.draw.number, self.draw.settings)

        def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            fill = filler(shape, torch.bfloat16, seeds.value_seed(), settings.device, False)
            return arena.input(name, fill)

        if self.operation == "attention_varlen":
            q, k, v = (
                tensor("q", (8, HEADS, 64)),
                tensor("k", (8, KV_HEADS, 64)),
                tensor("v", (8, KV_HEADS, 64)),
            )
            sums = arena.input("sums", lambda _: torch.tensor([0, 4, 8], dtype=torch.int32))
            return {"q": q, "k": k, "v": v, "cu_seqlens_q": sums, "cu_seqlens_k": sums, "max_seqlen_q": 4}
        if self.operation == "attention":
            q, k, v = tensor("q", (2, 5, HEADS, 64)), tensor("k", (2, 9, KV_HEADS, 64)), None
            return {"q": q, "k": k, "v": tensor("v", tuple(k.shape)) if v is None else v}
        q, k = tensor("query", (2, HEADS, 5, 64)), tensor("key", (2, KV_HEADS, 9, 64))
        return {"query": q, "key": k, "value": tensor("value", tuple(k.shape)), "enable_gqa": True}
