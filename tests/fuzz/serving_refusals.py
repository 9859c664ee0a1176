"""Calls on caches that must be refused, by an error that names the argument, with nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl import flash_attn
from tests.fuzz.case import Settings
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena
from tests.fuzz.refusals import Arguments, Refusal, RefusalCase, int32, setting
from tests.fuzz.values import filler

BATCH, PAGES, PAGE, HEADS, KV_HEADS, DIM = 2, 6, 16, 4, 2, 64
E4M3, INT32 = torch.float8_e4m3fn, torch.int32


def _new(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Refusal:
    """Argument `name` becomes a tensor of this shape."""
    return setting(name, lambda a: torch.ones(shape, dtype=dtype, device=a["v_cache"].device))


def _as(name: str, dtype: torch.dtype) -> Refusal:
    return setting(name, lambda a: a[name].to(dtype))


def _fp8_with(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Refusal:
    """A scale of fp8 caches that is none."""

    def change(a: Arguments) -> None:
        a.update({cache: a[cache].to(E4M3) for cache in ("k_cache", "v_cache")})
        a[name] = torch.ones(shape, dtype=dtype, device=a["k_cache"].device)

    return Refusal(name, change)


def _checked(name: str, *values: int, shape: tuple[int, ...] = (-1,)) -> Refusal:
    """Values that `kernels_dsl.checked` alone sees."""
    make = int32(*values)
    return setting(name, lambda a: make({"q": a["v_cache"]}).view(shape), checked=True)


def _packed(make: Callable[[Arguments], torch.Tensor], checked: bool = False) -> Refusal:
    """Packed queries that start where `make` says."""
    return Refusal("cu_seqlens_q", lambda a: a.update(q=a["q"].flatten(0, 1), cu_seqlens_q=make(a)), checked)


def _starts(*values: int, checked: bool = False) -> Refusal:
    return _packed(lambda a: int32(*values)({"q": a["v_cache"]}), checked)


def _odd_address(a: Arguments) -> torch.Tensor:
    cache = a["v_cache"]
    return cache.new_empty(cache.numel() + 1)[1:].view(cache.shape)


def _odd_strides(a: Arguments) -> torch.Tensor:
    return a["k_cache"].new_empty((PAGES, PAGE, KV_HEADS, DIM + 1))[..., :DIM]


def _over_itself(a: Arguments) -> torch.Tensor:
    return a["k_cache"][:1].expand(PAGES, -1, -1, -1)


def _in_cache(a: Arguments) -> torch.Tensor:
    return a["k_cache"].flatten()[: a["q"].numel()].view(a["q"].shape)


CACHES = {
    "caches of another dtype": _as("k_cache", torch.float16),
    "v_cache of another dtype": _as("v_cache", E4M3),
    "v_cache of fewer pages": setting("v_cache", lambda a: a["v_cache"][:-1]),
    "v_cache of three modes": setting("v_cache", lambda a: a["v_cache"][0]),
}
DECODE = CACHES | {
    "q of float32": _as("q", torch.float32),
    "q of three modes": setting("q", lambda a: a["q"][0]),
    "packed q without starts": setting("q", lambda a: a["q"].flatten(0, 1)),
    "starts of int64": _packed(lambda a: torch.tensor([0, 2, 4], device=a["v_cache"].device)),
    "no starts": _packed(lambda a: torch.empty(0, dtype=INT32, device=a["v_cache"].device)),
    "a longest without starts": setting("max_seqlen_q", lambda a: 1),
    "a longest below 0": Refusal(
        "max_seqlen_q", lambda a: (_starts(0, 2, 4).change(a), a.update(max_seqlen_q=-1))
    ),
    "starts beyond q": _starts(0, 2, 9, checked=True),
    "starts that fall": _starts(0, 3, 1, checked=True),
    "heads that do not divide": setting("q", lambda a: a["q"][:, :, :3]),
    "a head dimension of 60": setting("q", lambda a: a["q"][..., :60]),
    "odd strides": setting("k_cache", _odd_strides),
    "an odd address": setting("v_cache", _odd_address),
    "lengths of int64": _as("seqused_k", torch.int64),
    "another number of lengths": _new("seqused_k", (3,), INT32),
    "no lengths beside pages": setting("seqused_k", lambda a: None),
    "a table of int64": _as("block_table", torch.int64),
    "a table of one mode": setting("block_table", lambda a: a["block_table"][0]),
    "pages without a table": setting("block_table", lambda a: None),
    "scales of 16-bit caches": _new("k_scale", (), torch.float32),
    "scales of another shape": _fp8_with("v_scale", (3,), torch.float32),
    "scales of bf16": _fp8_with("k_scale", (), torch.bfloat16),
    "sinks of another shape": _new("sinks", (HEADS + 1,), torch.float32),
    "window of three": setting("window", lambda a: (1, 2, 3)),
    "causal as a word": setting("causal", lambda a: "no"),
    "no scale": setting("scale", lambda a: 0.0),
    "softcap below 0": setting("softcap", lambda a: -1.0),
    "out of another shape": setting("out", lambda a: torch.empty_like(a["q"])[:, :, :-1]),
    "out is q": setting("out", lambda a: a["q"]),
    "out in a cache": setting("out", _in_cache),
    "a length past the room": _checked("seqused_k", 3, 999),
    "a length below 0": _checked("seqused_k", -1, 3),
    "a page that is none": _checked("block_table", *[PAGES] * 6, shape=(BATCH, 3)),
}
APPEND = CACHES | {
    "k of float32": _as("k", torch.float32),
    "v of another dtype": _as("v", torch.float16),
    "v of fewer tokens": setting("v", lambda a: a["v"][:, :-1]),
    "k of two modes": setting("k", lambda a: a["k"][0, 0]),
    "a cache of fewer heads": setting("k_cache", lambda a: a["k_cache"][:, :, :1]),
    "a cache over itself": setting("k_cache", _over_itself),
    "one cache for both": setting("v_cache", lambda a: a["k_cache"]),
    "both places": _new("cache_seqlens", (BATCH,), INT32),
    "no place": setting("slot_mapping", lambda a: None),
    "slots of float32": _as("slot_mapping", torch.float32),
    "slots of another shape": setting("slot_mapping", lambda a: a["slot_mapping"][:, :-1]),
    "a table beside slots": _new("block_table", (BATCH, 1), INT32),
    "scales of 16-bit caches": _new("v_scale", (), torch.float32),
    "scales of bf16": _fp8_with("k_scale", (), torch.bfloat16),
    "a gradient": Refusal("k_cache", lambda a: a.update(k=a["k"].detach().requires_grad_())),
    "a slot past the last": _checked("slot_mapping", 0, 1, 2, PAGES * PAGE, shape=(BATCH, 2)),
    "a slot twice": _checked("slot_mapping", 5, 1, 2, 5, shape=(BATCH, 2)),
}
MERGE = {
    "out of integers": _as("out", INT32),
    "out of two modes": setting("out", lambda a: a["out"][0, 0]),
    "no states": Refusal("out", lambda a: a.update(out=a["out"][:0], lse=a["lse"][:0])),
    "lse of bf16": _as("lse", torch.bfloat16),
    "lse of another shape": setting("lse", lambda a: a["lse"][..., :-1]),
    "result of integers": setting("out_dtype", lambda a: INT32),
}
PAGED = {
    "k of three modes": setting("k", lambda a: a["k"][0]),
    "v of fewer pages": setting("v", lambda a: a["v"][:-1]),
    "starts of keys": setting("cu_seqlens_k", lambda a: a["cu_seqlens_q"]),
    "no lengths": setting("seqused_k", lambda a: None),
    "another number of lengths": setting("seqused_k", lambda a: a["seqused_k"][:-1]),
    "a table of int64": _as("block_table", torch.int64),
    "a table of one mode": setting("block_table", lambda a: a["block_table"][0]),
    "a table of fewer sequences": setting("block_table", lambda a: a["block_table"][:-1]),
    "a length past the room": setting("seqused_k", lambda a: a["seqused_k"] + 999, checked=True),
    "a page that is none": setting("block_table", lambda a: a["block_table"] + PAGES, checked=True),
}
KVCACHE = {
    "rotation": setting("rotary_cos", lambda a: a["q"]),
    "padding on the left": setting("cache_leftpad", lambda a: a["cache_seqlens"]),
    "slopes": setting("alibi_slopes", lambda a: a["q"]),
    "three splits": setting("num_splits", lambda a: 3),
    "k alone": setting("v", lambda a: None),
    "new keys without lengths": setting("cache_seqlens", lambda a: None),
    "a length below 0": setting("cache_seqlens", lambda a: -1),
    "lengths of int64": _as("cache_seqlens", torch.int64),
    "two tables": setting("page_table", lambda a: a["block_table"]),
    "a table of float32": _as("block_table", torch.float32),
    "q of three modes": setting("q", lambda a: a["q"][0]),
    "softcap below 0": setting("softcap", lambda a: -1.0),
    "v_cache of another dtype": _as("v_cache", E4M3),
}
OPERATIONS = {
    "attention_decode": DECODE,
    "append_kv": APPEND,
    "merge_states": MERGE,
    "attention_varlen": PAGED,
    "flash_attn_with_kvcache": KVCACHE,
}


class ServingRefusalCase(RefusalCase):
    """One on caches."""

    tables = OPERATIONS

    def _owner(self, settings: Settings) -> Any:
        return flash_attn if self.operation in flash_attn.__all__ else super()._owner(settings)

    def _arguments(self, arena: Arena, settings: Settings) -> Arguments:
        """Those of a call that would be fine."""
        seeds = Draw("serving refusals", self.draw.number, settings)

        def tensor(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return arena.input(name, filler(shape, dtype, seeds.value_seed(), settings.device, False))

        def numbers(name: str, values: Callable[[], torch.Tensor]) -> torch.Tensor:
            return arena.input(name, lambda _: values().to(INT32))

        if self.operation == "merge_states":
            return {"out": tensor("out", 2, 3, 2, 8), "lse": tensor("lse", 2, 3, 2, dtype=torch.float32)}
        caches = {name: tensor(name, PAGES, PAGE, KV_HEADS, DIM) for name in ("k_cache", "v_cache")}
        new = {name: tensor(name, BATCH, 2, KV_HEADS, DIM) for name in "kv"}
        if self.operation == "append_kv":
            slots = numbers("slot_mapping", lambda: torch.arange(2 * BATCH).view(BATCH, 2))
            return {**new, **caches, "slot_mapping": slots}
        table = numbers("block_table", lambda: torch.arange(PAGES).view(BATCH, 3))
        lengths = numbers("lengths", lambda: torch.tensor([20, 3]))
        if self.operation == "attention_varlen":
            starts = numbers("cu_seqlens_q", lambda: torch.tensor([0, 2, 5]))
            rows = {"q": tensor("q", 5, HEADS, DIM), "k": caches["k_cache"], "v": caches["v_cache"]}
            found = {"cu_seqlens_q": starts, "max_seqlen_q": 3, "seqused_k": lengths, "block_table": table}
            return {**rows, **found}
        q = {"q": tensor("q", BATCH, 2, HEADS, DIM), **caches, "block_table": table}
        if self.operation == "attention_decode":
            return {**q, "seqused_k": lengths}
        return {**q, **new, "cache_seqlens": lengths}
