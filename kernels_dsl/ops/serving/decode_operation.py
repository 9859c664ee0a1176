"""`attention_decode` as an operation: what is checked, and what a call launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

import lowering
from kernels_dsl.checks import options
from kernels_dsl.checks.eager_path import check_tensor
from kernels_dsl.checks.overlap import byte_extent, check_alone, ranges_meet
from kernels_dsl.config.attention import HEAD_DIM_STEP, MAX_HEAD_DIM, AttentionVariant
from kernels_dsl.config.decode import (
    ARRIVALS,
    FEW_MERGED_ROWS,
    FIXED_SPLIT,
    LEAST_MERGED_DIM,
    LEAST_WHOLE_ROWS,
    MAX_FIXED_SPLITS,
    MAX_KEYS,
    MOST_AT_ONCE,
    MOST_MERGED,
    DecodeConfig,
    decode_config,
    extra_part_rows,
    most_splits,
    tma_config,
    why_not_tma,
)
from kernels_dsl.ops import allocate
from kernels_dsl.ops.attention.arguments import check_sinks, check_softcap, window_limits
from kernels_dsl.ops.attention.outputs import ROW_ALIGN, check_out, is_aligned, prepared_for_tma
from kernels_dsl.ops.checked import is_checked
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.operation import Arguments, Operation
from kernels_dsl.ops.serving.scales import FP8, check_cache_scale, check_converts
from kernels_dsl.ops.serving.workspace import own_workspace
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import addresses
from lowering.records import NamedTuple, frozen

FUNCTION = lowering.jit("kernels_dsl.kernels.attention.decode:attention_decode", name="attention_decode")
DTYPES = (torch.bfloat16, torch.float16)
KEPT = 1 << 22
"""float32 of partial results in memory that is kept for a thread and stream, at most: 16 MiB."""
_MOST_PART_ROWS = 1 << 31
"""Of partial results: their numbers have 32 bits."""


class Decoded(NamedTuple):
    """The output (B, Sq, H, D), and the log-sum-exp of its rows (B, H, Sq) float32 where it is asked for. Of
    packed queries (T, H, D) and (H, T)."""

    out: torch.Tensor
    lse: torch.Tensor | None


@frozen
class DecodeArguments(Arguments):
    """The arguments of `attention_decode`, the window taken apart."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seqused_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    causal: bool = True
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    scale: float | None = None
    max_seqlen_q: int | None = None
    decode_equals_prefill: bool = False
    return_lse: bool = False
    out: torch.Tensor | None = None

    leading = "q"

    def check(self) -> None:
        """TypeError or ValueError where an argument is not one of `attention_decode`."""
        describe(self)

    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that a call reads, in the order of the fields."""
        return (
            self.q, self.k_cache, self.v_cache, self.seqused_k, self.block_table, self.sinks, self.k_scale,
            self.v_scale, self.cu_seqlens_q,
        )  # fmt: skip


@frozen
class DecodeCall:
    """A checked call. `tokens`: queries in all; `q_len`: of a sequence, of packed ones the most. `capacity`:
    keys that a sequence has room for."""

    batch: int
    tokens: int
    q_len: int
    heads: int
    kv_heads: int
    dim: int
    capacity: int
    packed: bool
    fixed: bool
    variant: AttentionVariant
    left: int
    right: int
    scale: float
    softcap: float

    @property
    def pack(self) -> int:
        """Query heads of a KV head."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp."""
        return (self.heads, self.tokens) if self.packed else (self.batch, self.heads, self.q_len)

    @property
    def together(self) -> int:
        """Query rows of a KV head that a CTA takes together, at most. The tile has a part in the bits: of
        packed queries, and where splits are fixed, it must not depend on the number of queries."""
        return self.pack if self.packed or self.fixed else self.q_len * self.pack

    def tiles(self, rows: int) -> int:
        """Tiles of so many query rows, of sequences that are not packed."""
        return self.batch * self.kv_heads * -(-self.q_len * self.pack // rows)

    def merges(self, config: DecodeConfig, ctas: int) -> bool:
        """True where the CTA of a tile's last split should merge them all. With an item a CTA at most, a
        second launch costs more than that does, on the host too, if the splits are few."""
        if self.packed or self.fixed or config.dim < LEAST_MERGED_DIM:
            return False
        splits = most_splits(self.capacity, self.together)
        few = splits * min(config.rows, self.together) <= MOST_MERGED
        return few and splits * self.tiles(config.rows) <= ctas

    def merged_by(self, config: DecodeConfig) -> DecodeConfig:
        """The same with the way in which a second kernel merges so many rows, as measured on Hopper."""
        rows = self.batch * self.q_len * self.heads
        if self.packed or self.fixed or config.merges or config.dim < LEAST_MERGED_DIM:
            return config
        if rows <= FEW_MERGED_ROWS and most_splits(self.capacity, self.together) > MOST_AT_ONCE:
            return replace(config, at_once=MOST_AT_ONCE)
        return replace(config, whole_rows=rows >= LEAST_WHOLE_ROWS)

    @property
    def parts_each(self) -> int:
        """Rows of partial results that each query row has for itself."""
        return -(-self.capacity // FIXED_SPLIT) if self.fixed else 1

    @property
    def extra_part_rows(self) -> int:
        """`config.decode.extra_part_rows` of a sequence."""
        rows = self.q_len * self.pack
        if self.fixed:
            return 0
        if self.packed:
            return extra_part_rows(self.capacity, self.pack, rows)
        return rows * (most_splits(self.capacity, rows) - 1)

    @property
    def part_rows(self) -> int:
        """Rows of partial results in all."""
        each = self.tokens * self.pack * self.parts_each
        return self.kv_heads * (each + self.batch * self.extra_part_rows)


def describe(call: DecodeArguments) -> DecodeCall:
    """The call as plain data. TypeError or ValueError where an argument is wrong."""
    options.boolean("return_lse", call.return_lse)
    options.boolean("decode_equals_prefill", call.decode_equals_prefill)
    if call.max_seqlen_q is not None and call.cu_seqlens_q is None:
        raise ValueError("max_seqlen_q is given, must be None without cu_seqlens_q")
    q = call.q
    for name, x in zip(DecodeArguments.tensors, call.inputs()):
        if x is not None:
            check_tensor(name, x)
            if x.device != q.device:
                raise ValueError(f"{name} is on {x.device}, must be on {q.device}, as q")
    if q.dtype not in DTYPES:
        raise TypeError(f"q is {q.dtype}, must be torch.bfloat16 or torch.float16")
    starts, form = call.cu_seqlens_q, "(B, Sq, H, D)" if call.cu_seqlens_q is None else "(T, H, D)"
    if q.dim() != (4 if starts is None else 3):
        raise ValueError(f"q has shape {tuple(q.shape)}, must be {form}")
    heads, dim = q.shape[-2:]
    _check_not_latent(call)
    if not HEAD_DIM_STEP <= dim <= MAX_HEAD_DIM or dim % HEAD_DIM_STEP:
        raise ValueError(
            f"q has head dimension {dim}, must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    batch, q_len = q.shape[:2] if starts is None else _packed(call, starts)
    kv_heads = _check_caches(call)
    scale = options.real("scale", 1.0 / math.sqrt(dim) if call.scale is None else call.scale, above=0)
    softcap = options.real("softcap", call.softcap, least=0)
    check_softcap(softcap)
    left, right = window_limits(call.causal, (call.window_left, call.window_right))
    variant = AttentionVariant(
        right=right is not None, left=left is not None, softcap=softcap > 0,
        sinks=check_sinks(call.sinks, heads, q.device),
    )  # fmt: skip
    for name, factor in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        check_cache_scale(name, factor, call.k_cache.dtype, kv_heads, batch)
    check_out(call.out, tuple(q.shape), q.dtype, q.device)
    tokens = batch * q_len if starts is None else q.shape[0]
    found = DecodeCall(
        batch, tokens, q_len, heads, kv_heads, dim, _capacity(call, batch), starts is not None,
        call.decode_equals_prefill, variant, left or 0, right or 0, float(scale), float(softcap) or 1.0,
    )  # fmt: skip
    if found.fixed:
        _check_fixed(call, right, found.capacity)
    if found.part_rows >= _MOST_PART_ROWS:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and caches have room for {found.capacity} keys a sequence, "
            f"{found.part_rows} rows of partial results, must have less than {_MOST_PART_ROWS}"
        )
    return found


def _check_fixed(call: DecodeArguments, right: int | None, capacity: int) -> None:
    """ValueError where results would depend on keys after a query's own, or there are too many splits."""
    if right != 0:
        raise ValueError(
            f"decode_equals_prefill is True, must be False with causal {call.causal} and a right width "
            f"of {call.window_right}, by which queries see keys after their own"
        )
    if capacity > FIXED_SPLIT * MAX_FIXED_SPLITS:
        raise ValueError(
            f"a sequence has room for {capacity} keys, must have for at most "
            f"{FIXED_SPLIT * MAX_FIXED_SPLITS} with decode_equals_prefill"
        )


def _packed(call: DecodeArguments, starts: torch.Tensor) -> tuple[int, int]:
    """The number of packed sequences, and the most queries that one has."""
    if starts.dtype != torch.int32 or starts.dim() != 1 or not starts.shape[0]:
        raise ValueError(
            f"cu_seqlens_q is {starts.dtype} {tuple(starts.shape)}, must be torch.int32 (sequences + 1,)"
        )
    tokens = call.q.shape[0]
    if call.max_seqlen_q is None:
        return starts.shape[0] - 1, tokens
    return starts.shape[0] - 1, min(options.integer("max_seqlen_q", call.max_seqlen_q, least=0), tokens)


def _check_not_latent(call: DecodeArguments) -> None:
    """ValueError for values narrower than keys. Multi-head latent attention (MLA), its projections absorbed,
    comes as such a call: of one cache (pages, keys, 1, 576), `v_cache` is `k_cache[..., :512]`, q has 576
    columns and the output 512. A kernel for it would be chosen in `_build`."""
    k, v = call.k_cache, call.v_cache
    if k.dim() == v.dim() == 4 and v.shape[3] < k.shape[3]:
        raise ValueError(
            f"v_cache has head dimension {v.shape[3]}, must have {k.shape[3]}, as k_cache: for values that "
            "are the first columns of keys, latents (MLA), there is no kernel yet"
        )


def _check_caches(call: DecodeArguments) -> int:
    """The number of KV heads."""
    q = call.q
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if cache.dtype not in (q.dtype, FP8):
            raise TypeError(f"{name} is {cache.dtype}, must be {q.dtype}, as q, or {FP8}")
        step_wanted = ROW_ALIGN // cache.element_size()
        if q.shape[-1] % step_wanted:
            raise ValueError(
                f"q has head dimension {q.shape[-1]}, must be a multiple of {step_wanted} with caches of "
                f"{FP8}"
            )
        if cache.dim() != 4 or cache.shape[3] != q.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(cache.shape)}, must be (B, keys, KV heads, {q.shape[-1]}), or with "
                "block_table (pages, keys of a page, …); of one with heads before keys, give the "
                "transpose(1, 2)"
            )
        steps = [step for size, step in zip(cache.shape[:3], cache.stride()) if size > 1]
        if cache.stride(3) != 1 or any(step <= 0 or step % step_wanted for step in steps):
            raise ValueError(
                f"{name} has strides {cache.stride()}, must have a contiguous head dimension, and strides "
                f"that are multiples of {step_wanted}, 16 bytes"
            )
    if call.v_cache.dtype != call.k_cache.dtype:
        raise TypeError(f"v_cache is {call.v_cache.dtype}, must be {call.k_cache.dtype}, as k_cache")
    if call.v_cache.shape != call.k_cache.shape:
        raise ValueError(
            f"v_cache has shape {tuple(call.v_cache.shape)}, must be {tuple(call.k_cache.shape)}, as k_cache"
        )
    heads, kv_heads = q.shape[-2], call.k_cache.shape[2]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q has {heads} heads, must be a multiple of k_cache's, {kv_heads}")
    return kv_heads


def _capacity(call: DecodeArguments, batch: int) -> int:
    """Keys that a sequence has room for; checks lengths and table."""
    pages, size = call.k_cache.shape[:2]
    used, table = call.seqused_k, call.block_table
    if used is not None and (used.dtype != torch.int32 or tuple(used.shape) != (batch,)):
        raise ValueError(f"seqused_k is {used.dtype} {tuple(used.shape)}, must be torch.int32 ({batch},)")
    capacity = size
    if table is None:
        if pages != batch:
            raise ValueError(
                f"k_cache has shape {tuple(call.k_cache.shape)}, must have {batch} sequences, as q, or "
                "block_table be given"
            )
    else:
        if used is None:
            raise ValueError("seqused_k is None, must be given beside block_table")
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
            raise ValueError(
                f"block_table is {table.dtype} {tuple(table.shape)}, must be torch.int32 ({batch}, pages)"
            )
        capacity = size * table.shape[1]
    if capacity > MAX_KEYS:
        raise ValueError(f"a sequence has room for {capacity} keys, must have for at most {MAX_KEYS}")
    return capacity


class DecodePlan:
    """The launch of calls with such tensors. `extents`: bytes that each input spans, and last `out`.

    `bare(q, k_cache, v_cache, seqused_k, block_table)` gives the output of calls with these alone, with as
    little of the host's time as can be: it is there after a first `run`, if at all.
    """

    def __init__(
        self,
        run: Callable[[tuple[Any, ...]], Decoded],
        extents: tuple[int, ...],
        bare: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.run, self.extents, self.bare = run, extents, bare

    def apart(self, inputs: tuple[Any, ...], out: torch.Tensor | None) -> bool:
        """True if `out` shares no memory with what such a call reads."""
        if out is None:
            return True
        return not ranges_meet(out, inputs, (self.extents[-1], *self.extents[:-1]))


def _build(decoded: DecodeCall, call: DecodeArguments, target: Target) -> DecodePlan:
    target.families(None, "q")
    if call.k_cache.dtype == FP8:
        check_converts(target, "k_cache")
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if cache.data_ptr() % ROW_ALIGN:
            raise ValueError(
                f"{name} begins at address {cache.data_ptr():#x}, must at a multiple of {ROW_ALIGN}"
            )
    extents = tuple(0 if x is None else byte_extent(x) for x in (*call.inputs(), call.out))
    if 0 in (decoded.batch, decoded.q_len, decoded.heads, decoded.capacity, call.k_cache.shape[0]):
        return DecodePlan(_without_keys(decoded, call.return_lse), extents)
    config = decode_config(
        decoded.dim, decoded.together, decoded.pack, target.device, call.k_cache.element_size()
    )
    # Where splits are fixed one kernel serves all numbers of queries.
    tiled = decoded.fixed or decoded.q_len * decoded.pack > config.rows
    config = replace(config, tiled=tiled, fixed=decoded.fixed)
    merges = decoded.merges(config, target.device.sm_count * config.ctas_per_sm)
    config = replace(config, merges=merges)
    if target.device.has_wgmma:  # elsewhere not measured
        config = decoded.merged_by(config)
    page = 0 if call.block_table is None else call.k_cache.shape[1]
    strides = call.k_cache.stride(), call.v_cache.stride()
    if why_not_tma(config, target.device, decoded.dim, page, strides) is None:
        config = tma_config(config, target.device, page)
    return _launching(decoded, config, call, target, extents)


def _launching(
    decoded: DecodeCall,
    config: DecodeConfig,
    call: DecodeArguments,
    target: Target,
    extents: tuple[int, ...],
) -> DecodePlan:
    device = call.q.device
    words = ARRIVALS + (decoded.tiles(config.rows) if config.merges else 0)
    memory = _memory(decoded.part_rows * (config.dim + 1), words, config.merges, target, device)
    make_out = allocate.maker(tuple(call.q.shape), call.q.dtype, device)
    make_lse = allocate.maker(decoded.lse_shape, torch.float32, device)
    # About as many as there are at most: more CTAs would have none.
    items = decoded.part_rows // min(config.rows, decoded.together) + decoded.batch * decoded.kv_heads
    scalars = (
        decoded.scale, decoded.softcap, decoded.left, decoded.right, decoded.q_len, decoded.parts_each,
        decoded.extra_part_rows, min(items, target.device.sm_count * config.ctas_per_sm),
    )  # fmt: skip
    early = target.device.capability >= (9, 0)
    launch = Launch(FUNCTION, target, {"config": config, "variant": decoded.variant, "early": early})
    dense = call.q.stride() == allocate.dense_strides(tuple(call.q.shape))
    prepare = None if dense and is_aligned(call.q) else prepared_for_tma(call.q)
    staged = call.out is not None and not is_aligned(call.out)
    return_lse = call.return_lse
    others = (call.sinks, call.k_scale, call.v_scale, call.cu_seqlens_q, call.out)
    plain = prepare is None and not return_lse and all(x is None for x in others)
    k_view, v_view = (_with_modes(x) for x in (call.k_scale, call.v_scale))
    kernel: Callable[..., Any] = launch

    def run(tensors: tuple[Any, ...]) -> Decoded:
        nonlocal kernel
        q, k, v, used, table, sinks, k_scale, v_scale, starts, out = tensors
        if k_view is not None:
            k_scale = k_view(k_scale)
        if v_view is not None:
            v_scale = v_view(v_scale)
        if prepare is not None:
            q = prepare(q)
        written = make_out() if out is None or staged else out
        lse = make_lse() if return_lse else None
        kernel(q, k, v, written, lse, *memory(), used, table, sinks, k_scale, v_scale, starts, *scalars)
        if kernel is launch and (found := launch.direct()) is not None:
            kernel = found
            plan.bare = bare if plain else None
        if staged:
            out.copy_(written)
            written = out
        return Decoded(written, lse)

    fixed = (None, None, None, None, *scalars)

    def bare(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        out = make_out()
        kernel(q, k, v, out, None, *memory(), used, table, *fixed)
        return out

    plan = DecodePlan(run, extents)
    return plan


Memory = Callable[[], tuple[int, int]]
"""Gives the addresses of partial results and of counters for the next launch."""


def _memory(elements: int, words: int, one_kernel: bool, target: Target, device: torch.device) -> Memory:
    """So many float32, where they are few in memory that is kept, which costs no allocation; so many
    counters, which the launches of a stream share. So they do with results that one kernel reads again."""
    index = target.index
    if elements > KEPT:
        make = allocate.maker((elements,), torch.float32, device)
        return lambda: (lowering.Address(make()), addresses(index, 1, words)[1])
    if one_kernel:
        return lambda: addresses(index, elements, words)
    return lambda: (own_workspace(index, elements), addresses(index, 1, words)[1])


def _with_modes(scale: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The view of such scales that a kernel takes; None: they are as it takes them."""
    return allocate.with_a_mode if scale is not None and scale.dim() == 0 else None


def _without_keys(decoded: DecodeCall, return_lse: bool) -> Callable[[tuple[Any, ...]], Decoded]:
    """The result of a call without rows or keys: 0, and log-sum-exps of -inf or the sinks as kernels do."""

    def run(tensors: tuple[Any, ...]) -> Decoded:
        q, *_, sinks, _, _, _, out = tensors
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
        if not return_lse:
            return Decoded(out, None)
        lse = torch.full(decoded.lse_shape, -math.inf, dtype=torch.float32, device=q.device)
        if sinks is not None:
            lse.copy_((sinks.float() * math.log2(math.e) * math.log(2.0))[:, None].expand_as(lse))
        return Decoded(out, lse)

    return run


def _follow(plan: DecodePlan, call: DecodeArguments) -> Decoded:
    if call.out is not None and not plan.apart(call.inputs(), call.out):
        check_alone("out", call.out, call.read())
    if is_checked():
        _check_values(call)
    return plan.run((*call.inputs(), call.out))


def _check_values(call: DecodeArguments) -> None:
    """ValueError for lengths and pages outside the caches, and for sequences outside of packed queries. Waits
    for the GPU."""
    if call.cu_seqlens_q is not None:
        _check_starts(call, call.cu_seqlens_q.tolist())
    if call.seqused_k is None:
        return
    (pages, size), table = call.k_cache.shape[:2], call.block_table
    room = size if table is None else size * table.shape[1]
    of_host = None if table is None else table.tolist()
    for b, length in enumerate(call.seqused_k.tolist()):
        if not 0 <= length <= room:
            raise ValueError(f"seqused_k[{b}] is {length}, must be from 0 to {room}")
        if of_host is not None and size:
            for n, page in enumerate(of_host[b][: -(-length // size)]):
                if not 0 <= page < pages:
                    raise ValueError(f"block_table[{b}, {n}] is {page}, must be from 0 to {pages - 1}")


def _check_starts(call: DecodeArguments, starts: list[int]) -> None:
    """ValueError for numbers of packed queries that are not those of sequences of up to `max_seqlen_q`."""
    tokens, most = call.q.shape[0], call.max_seqlen_q
    if starts[0] != 0:
        raise ValueError(f"cu_seqlens_q[0] is {starts[0]}, must be 0")
    for b, (before, after) in enumerate(pairwise(starts)):
        if not before <= after <= tokens:
            raise ValueError(f"cu_seqlens_q[{b + 1}] is {after}, must be from {before} to {tokens}")
        if most is not None and after - before > most:
            raise ValueError(
                f"max_seqlen_q is {most}, must be at least {after - before}, those of sequence {b}"
            )


ATTENTION_DECODE = Operation("attention_decode", DecodeArguments, describe, _build, _follow)
