"""`append_kv` as an operation: what is checked, and what a call launches."""

from __future__ import annotations

import math
from typing import Any

import torch

import lowering
from kernels_dsl.checks.eager_path import check_output, check_tensor
from kernels_dsl.checks.overlap import byte_extent, check_alone, ranges_meet, self_overlaps
from kernels_dsl.ops.checked import is_checked
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.operation import Arguments, Operation
from kernels_dsl.ops.serving.scales import FP8, check_cache_scale, check_converts
from kernels_dsl.ops.serving.vectors import width_of
from kernels_dsl.ops.target import Target
from lowering.records import NamedTuple, frozen

FUNCTION = lowering.jit("kernels_dsl.kernels.serving.append_kv:append_kv", name="append_kv")
DTYPES = (torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


@frozen
class AppendArguments(Arguments):
    """The arguments of `append_kv`."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    outputs = ("k_cache", "v_cache")
    leading = "k"

    def check(self) -> None:
        """TypeError or ValueError where an argument is not one of `append_kv`."""
        describe(self)


class AppendPlan(NamedTuple):
    """The launch of calls with such tensors.

    `extents`: bytes that each tensor of a call spans. `distances`: from a cache of keys to one of values, in
    bytes, at which they share no element.
    """

    launch: Launch | None
    batched: bool
    extents: tuple[int, ...]
    distances: set[int]

    def run(self, tensors: tuple[Any, ...]) -> None:
        """Appends; `tensors`: the fields of `AppendArguments`."""
        if self.launch is None:
            return
        k, v, k_cache, v_cache, slots, lengths, table, *scales = tensors
        if not self.batched:
            k, v, slots = k[None], v[None], slots[None]
        if scales[0] is not None or scales[1] is not None:
            scales = [x if x is None else x.expand(k.shape[-2]) for x in scales]
        self.launch(k, v, k_cache, v_cache, slots, lengths, table, *scales)

    def apart(self, tensors: tuple[Any, ...]) -> bool:
        """True if the caches of such a call share memory neither with each other nor with what it reads."""
        keys, values = tensors[2:4]
        if values.data_ptr() - keys.data_ptr() not in self.distances:
            return False
        others, extents = (*tensors[:2], *tensors[4:]), (*self.extents[:2], *self.extents[4:])
        return not any(
            ranges_meet(cache, others, (extent, *extents))
            for cache, extent in zip((keys, values), self.extents[2:4])
        )


def describe(call: AppendArguments) -> None:
    """TypeError or ValueError where an argument is wrong, by shapes, dtypes and devices alone."""
    for name, x in {**call.read(), **call.written()}.items():
        if x is None:
            continue
        (check_output if name in call.outputs else check_tensor)(name, x)
        if x.device != call.k.device:
            raise ValueError(f"{name} is on {x.device}, must be on {call.k.device}, as k")
    k, v = call.k, call.v
    if k.dtype not in DTYPES:
        raise TypeError(f"k is {k.dtype}, must be torch.bfloat16 or torch.float16")
    if v.dtype != k.dtype:
        raise TypeError(f"v is {v.dtype}, must be {k.dtype}, as k")
    if k.dim() not in (3, 4):
        raise ValueError(f"k has shape {tuple(k.shape)}, must be (T, H, D) or (B, S, H, D)")
    if v.dim() != k.dim() or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {tuple(v.shape)}, must be {(*k.shape[:-1], '…')}, as k")
    _check_caches(call)
    _check_places(call)
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        check_cache_scale(name, scale, call.k_cache.dtype, k.shape[-2])


def _check_caches(call: AppendArguments) -> None:
    heads = call.k.shape[-2]
    for name, cache, new in (("k_cache", call.k_cache, call.k), ("v_cache", call.v_cache, call.v)):
        if cache.dtype not in (call.k.dtype, FP8):
            raise TypeError(f"{name} is {cache.dtype}, must be {call.k.dtype}, as k, or {FP8}")
        if cache.dim() != 4 or cache.shape[2] != heads or cache.shape[3] != new.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(cache.shape)}, must be (pages, tokens of a page, {heads}, "
                f"{new.shape[-1]}); of one with heads before tokens, give the transpose(1, 2)"
            )
        if self_overlaps(cache):
            raise ValueError(
                f"{name} has strides {cache.stride()} for shape {tuple(cache.shape)}, must not overlap itself"
            )
    if call.v_cache.dtype != call.k_cache.dtype or call.v_cache.shape[:2] != call.k_cache.shape[:2]:
        raise ValueError(
            f"v_cache is {call.v_cache.dtype} {tuple(call.v_cache.shape)}, must have k_cache's dtype, pages "
            f"and tokens of a page: {call.k_cache.dtype} {tuple(call.k_cache.shape)}"
        )


def _check_places(call: AppendArguments) -> None:
    tokens, slots, lengths, table = call.k.shape[:-2], call.slot_mapping, call.cache_seqlens, call.block_table
    if (slots is None) == (lengths is None):
        count = "neither" if slots is None else "both"
        raise ValueError(f"slot_mapping and cache_seqlens: {count} is given, must be one of the two")
    if slots is not None:
        if table is not None:
            raise ValueError(
                "block_table is given with slot_mapping, must be None: it goes with cache_seqlens"
            )
        if slots.dtype not in INDEX_DTYPES:
            raise TypeError(f"slot_mapping is {slots.dtype}, must be torch.int32 or torch.int64")
        if slots.shape != tokens:
            raise ValueError(f"slot_mapping has shape {tuple(slots.shape)}, must be {tuple(tokens)}")
        return
    assert lengths is not None
    if call.k.dim() != 4:
        raise ValueError(f"k has shape {tuple(call.k.shape)}, must be (B, S, H, D) with cache_seqlens")
    batch = tokens[0]
    for name, x, modes in (("cache_seqlens", lengths, 1), ("block_table", table, 2)):
        if x is None:
            continue
        if x.dtype != torch.int32:
            raise TypeError(f"{name} is {x.dtype}, must be torch.int32")
        if x.dim() != modes or x.shape[0] != batch:
            wanted = f"({batch},)" if modes == 1 else f"({batch}, pages of a sequence)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be {wanted}")
    if table is None and call.k_cache.shape[0] < batch:
        raise ValueError(
            f"k_cache has shape {tuple(call.k_cache.shape)}, must hold the {batch} sequences of k where "
            "there is no block_table"
        )


def tensors_of(call: AppendArguments) -> tuple[Any, ...]:
    """The tensors of a call, in the order of the fields."""
    return tuple(getattr(call, name) for name in call.__dataclass_fields__)  # type: ignore[attr-defined]


def _build(_described: None, call: AppendArguments, target: Target) -> AppendPlan:
    target.families(None, "k")
    if call.k_cache.dtype == FP8:
        check_converts(target, "k_cache")
    k, v, k_cache = call.k, call.v, call.k_cache
    launch = None
    if k.numel() + v.numel() and k_cache.shape[:2].numel():
        width = width_of(math.gcd(k.shape[-1], v.shape[-1]), k, v, k_cache, call.v_cache)
        early = target.device.capability >= (9, 0)
        launch = Launch(FUNCTION, target, {"vector": width, "early": early})
    extents = tuple(0 if x is None else byte_extent(x) for x in tensors_of(call))
    return AppendPlan(launch, k.dim() == 4, extents, set())


def _follow(plan: AppendPlan, call: AppendArguments) -> None:
    tensors = tensors_of(call)
    if not plan.apart(tensors):
        for name, cache in call.written().items():
            check_alone(name, cache, call.read())
        _check_caches_apart(call.k_cache, call.v_cache)
        plan.distances.add(call.v_cache.data_ptr() - call.k_cache.data_ptr())
    if is_checked():
        _check_values(call)
    plan.run(tensors)


def _check_caches_apart(keys: torch.Tensor, values: torch.Tensor) -> None:
    """ValueError where both caches have an element in common. They may take turns in memory, by pages, tokens
    or heads."""
    if not ranges_meet(keys, (values,), (byte_extent(keys), byte_extent(values))):
        return
    first, second = sorted((keys, values), key=torch.Tensor.data_ptr)
    distance, remainder = divmod(second.data_ptr() - first.data_ptr(), keys.element_size())
    shape = (2, *keys.shape[:3], max(keys.shape[3], values.shape[3]))
    both = torch.empty_strided(shape, (distance, *keys.stride()), dtype=keys.dtype, device="meta")
    if remainder or keys.stride() != values.stride() or self_overlaps(both):
        raise ValueError("v_cache shares memory with k_cache, must be a tensor of its own")


def _check_values(call: AppendArguments) -> None:
    """ValueError for places outside the caches, and for two tokens in one slot. Waits for the GPU."""
    pages, size = call.k_cache.shape[:2]
    if call.slot_mapping is not None:
        slots = call.slot_mapping.flatten().cpu()
        slots = slots[slots != -1]
        wrong = slots[(slots < 0) | (slots >= pages * size)]
        if wrong.numel():
            raise ValueError(f"slot_mapping has {int(wrong[0])}, must be -1 or from 0 to {pages * size - 1}")
        if slots.unique().numel() != slots.numel():
            raise ValueError("slot_mapping has a slot twice, must have each once")
        return
    assert call.cache_seqlens is not None
    new, table = call.k.shape[1], None if call.block_table is None else call.block_table.cpu()
    room = size if table is None else size * table.shape[1]
    for b, length in enumerate(call.cache_seqlens.tolist()):
        if not 0 <= length <= room - new:
            raise ValueError(f"cache_seqlens[{b}] is {length}, must be from 0 to {room - new}")
        if table is not None and new:
            for n in range(length // size, (length + new - 1) // size + 1):
                if not 0 <= table[b, n] < pages:
                    page = int(table[b, n])
                    raise ValueError(f"block_table[{b}, {n}] is {page}, must be from 0 to {pages - 1}")


APPEND_KV = Operation("append_kv", AppendArguments, describe, _build, _follow)
