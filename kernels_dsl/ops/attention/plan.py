"""From a checked call of attention to a launch: which kernel, with which tiles, on which views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import lowering
from kernels_dsl.config.attention import Extent, Sm90AttentionConfig, split_of
from kernels_dsl.config.attention_table import AttentionConfig, choose, choose_for_lists, why_not
from kernels_dsl.ops import fresh
from kernels_dsl.ops.attention.arguments import MODES, NO_EXTRAS, AttentionCall, Extras
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import tile_counter

FUNCTIONS = {
    "sm90": lowering.jit("kernels_dsl.kernels.attention.sm90:attention_sm90", name="attention_sm90"),
    "sm80": lowering.jit("kernels_dsl.kernels.attention.sm80:attention_sm80", name="attention_sm80"),
}
ROW_ALIGN = 16
Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Plan:
    """How calls like one that was seen run: `run(q, k, v, out, extras)` gives (o, log-sum-exp or None).

    `bare(q, k, v)` gives o alone, with as little of the host's time as can be: it is there after the first
    run, for calls on one GPU that have no extras, no `out` and no log-sum-exp, and whose tensors fit.
    """

    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    config: AttentionConfig | None
    bare: Callable[..., torch.Tensor] | None = None


def build(
    call: AttentionCall,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor | None,
    want_lse: bool,
    target: Target,
    choice: tuple[AttentionConfig | None, str | None] = (None, None),
    max_q: int = 0,
) -> Plan:
    """The plan of a call; `choice`: configuration and family that the caller asks for, or None.

    ValueError where no kernel serves it, with the reason.
    """
    config, family = choice
    if config is not None:
        if family not in (None, config.family):
            raise ValueError(f"family is {family!r}, must be config's, {config.family!r}, or None")
        family = config.family
    family = target.families(family, "q")[0]
    if is_empty(call):
        return Plan(without_keys(call, want_lse, call.dtype), None)
    variant = call.variant
    if call.block is not None:
        chosen, split = choose_for_lists(family, call.dim, call.dim_v, variant, call.block, target.device)
        variant = replace(variant, lists=split)
    else:
        rows = max_q if call.packed else call.q_len
        group = call.heads // call.kv_heads
        extent = Extent(rows, call.k_len, call.batch * call.heads, target.device.sm_count, group)
        chosen = choose(family, call.dim, call.dim_v, variant, target.device, extent)
    if config is not None:
        reason = why_not(config, call.dim, call.dim_v, target.device)
        if reason is not None:
            raise ValueError(f"config is {config}, must be one that fits: {reason}")
        _check_pack(config, call)
        chosen = config
        if call.block is not None:
            variant = replace(variant, lists=split_of(config, call.block))
    steps = tuple(prepared_for_tma(x) for x in tensors)
    constexprs = {"layout": call.layout, "config": chosen, "variant": variant}
    launch = Launch(FUNCTIONS[family], target, constexprs)
    tail = _Tail(call, launch, chosen, max_q)
    make_out = _out_view(call, tensors[0], out)
    plan = Plan(_run(call, launch, steps, make_out, want_lse, tail), chosen)
    if steps == (None, None, None) and out is None and not want_lse:
        plan.run = _then_bare(plan, launch, make_out, tail)
    return plan


def _check_pack(config: AttentionConfig, call: AttentionCall) -> None:
    """ValueError where a caller's configuration packs heads that cannot share a tile."""
    pack, group = getattr(config, "pack", 1), call.heads // call.kv_heads
    if pack > 1 and (group % pack or not call.variant.packable or call.block is not None):
        raise ValueError(
            f"config packs {pack} heads, must pack a divisor of the {group} query heads of a KV head, and "
            "1 with sinks, mask tensors, functions or blocks"
        )


def is_empty(call: AttentionCall) -> bool:
    """No query, or no key: no kernel is needed."""
    return 0 in (call.batch, call.heads, call.q_len, call.k_len)


def out_shape(call: AttentionCall) -> tuple[int, ...]:
    """Shape of the output."""
    if call.packed:
        return (call.q_len, call.heads, call.dim_v)
    sizes = (call.batch, call.q_len, call.heads, call.dim_v)
    return tuple(sizes[MODES[call.layout].index(mode)] for mode in range(4))


def check_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """TypeError or ValueError for an `out`, if there is one, of another shape, dtype or device."""
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}, must be a torch.Tensor")
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, must be {dtype} {shape} on {device}"
        )


def lse_shape(call: AttentionCall) -> tuple[int, ...]:
    """Shape of the log-sum-exp."""
    return (call.heads, call.q_len) if call.packed else (call.batch, call.heads, call.q_len)


def without_keys(call: AttentionCall, want_lse: bool, dtype: torch.dtype) -> Callable[..., Any]:
    """No query, or no key: then the output, of `dtype`, is 0, and the log-sum-exp -inf or the sink."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, extras: Extras) -> Any:
        out = torch.empty(out_shape(call), dtype=dtype, device=q.device) if out is None else out
        out.zero_()
        if not want_lse:
            return out, None
        lse = torch.full(lse_shape(call), -torch.inf, dtype=torch.float32, device=q.device)
        if extras.sinks is not None:
            lse.copy_(extras.sinks.float()[:, None].expand_as(lse))
        return out, lse

    return run


def _aligned(x: torch.Tensor) -> bool:
    """Kernels take it as it is: contiguous head dimension, strides and base multiples of 16 bytes."""
    width = x.element_size()
    strides = [s for size, s in zip(x.shape[:-1], x.stride()[:-1]) if size > 1]
    return (
        (x.stride(-1) == 1 or x.shape[-1] == 1)
        and x.data_ptr() % ROW_ALIGN == 0
        and all(s > 0 and s * width % ROW_ALIGN == 0 for s in strides)
    )


def _plain_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides` with those of modes of size 1, which may hold anything, replaced by the whole extent."""
    extent = 1 + sum((size - 1) * s for size, s in zip(shape, strides))
    extent = -(-extent // ROW_ALIGN) * ROW_ALIGN
    rows = tuple(s if size > 1 else extent for size, s in zip(shape[:-1], strides))
    return (*rows, strides[-1])


def prepared_for_tma(x: torch.Tensor) -> Step | None:
    """What makes tensors like this one fit for TMA and 16-byte copies; None for nothing."""
    if not _aligned(x):
        return lambda t: t.clone(memory_format=torch.contiguous_format)
    strides = _plain_strides(tuple(x.shape), x.stride())
    if strides == x.stride():
        return None
    return lambda t: t.as_strided(t.shape, strides)


def _out_view(call: AttentionCall, q: torch.Tensor, out: torch.Tensor | None) -> Callable[..., Any]:
    """`make(q, out)`: (what the kernel writes, what the caller gets)."""
    shape = out_shape(call)
    if out is not None and not (_aligned(out) and prepared_for_tma(out) is None):

        def through_fresh(q: torch.Tensor, out: torch.Tensor) -> Any:
            return q.new_empty(shape), out

        return through_fresh
    if call.layout == "bhsd" and q.stride(1) < q.stride(2) and call.q_len > 1 and call.heads > 1:
        # A transposed (B, S, H, D) tensor: the output gets the same order in memory.
        stored = (call.batch, call.q_len, call.heads, call.dim_v)

        def transposed(q: torch.Tensor, out: torch.Tensor | None) -> Any:
            out = q.new_empty(stored).transpose(1, 2) if out is None else out
            return out, out

        return transposed

    def plain(q: torch.Tensor, out: torch.Tensor | None) -> Any:
        out = q.new_empty(shape) if out is None else out
        return out, out

    return plain


def _kernel_extras(call: AttentionCall, extras: Extras, max_q: int) -> tuple[Any, ...]:
    """(seqlens, max_q, lists, sinks, mask, aux) as the kernel takes them."""
    mask = extras.mask
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        lengths = extras.max_seqlens if call.packed else (call.q_len, call.k_len)
        assert lengths is not None and lengths[1] is not None
        mask = mask.expand(call.batch, call.heads, lengths[0], lengths[1])
    return extras.seqlens, max_q, *lists_and_sinks(call, extras), mask, tuple(extras.aux) or None


def lists_and_sinks(call: AttentionCall, extras: Extras) -> tuple[Any, Any]:
    """Block lists for each batch and head, and float32 sinks, as the kernels take them."""
    lists: Any = None
    if extras.blocks is not None:
        lead = (call.batch, call.heads)
        lists = tuple(None if x is None else x.expand(*lead, *x.shape[2:]) for x in extras.blocks.tensors)
    return lists, None if extras.sinks is None else extras.sinks.float().contiguous()


class _Tail:
    """A kernel's arguments behind the tensors q, k, v, o and log-sum-exp."""

    def __init__(self, call: AttentionCall, launch: Launch, config: AttentionConfig, max_q: int) -> None:
        sms = launch.target.device.sm_count
        self.call = call
        self.max_q = max_q
        self.scalars = (call.scale, call.softcap, call.left, call.right)
        self.index = launch.target.index
        self.last: tuple[Any, ...] = ()
        self.queued = False
        if isinstance(config, Sm90AttentionConfig):
            self.last = (sms,)
            rows = max_q if call.packed else call.q_len
            uneven = call.packed or call.block is not None or call.variant.uneven
            self.queued = uneven and config.several_tiles(Extent(rows, 0, call.heads * call.batch, sms))
            if not self.queued:
                self.last = (None, sms)
        self.bare = (*self.scalars, None, max_q, None, None, None, None)

    def __call__(self, extras: Extras) -> tuple[Any, ...]:
        """The arguments of a call with these extras."""
        first = self.bare
        if extras is not NO_EXTRAS:
            first = (*self.scalars, *_kernel_extras(self.call, extras, self.max_q))
        return (*first, tile_counter(self.index), *self.last) if self.queued else (*first, *self.last)


def _then_bare(plan: Plan, launch: Launch, make_out: Callable[..., Any], tail: _Tail) -> Callable[..., Any]:
    """`plan.run` which gives the plan its `bare` once there is a kernel."""
    run = plan.run

    def bare_of(kernel: Callable[..., Any], q: torch.Tensor) -> Callable[..., torch.Tensor]:
        fixed, last, index = (*tail.bare, *tail.last), tail.last, tail.index
        usual = make_out(q, None)[0]
        new = fresh.maker(usual.shape, usual.dtype, usual.device, usual.stride())

        def even(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = new()
            kernel(q, k, v, out, None, *fixed)
            return out

        def queued(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = new()
            kernel(q, k, v, out, None, *tail.bare, tile_counter(index), *last)
            return out

        return queued if tail.queued else even

    def first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, extras: Extras) -> Any:
        result = run(q, k, v, out, extras)
        kernel = launch.direct()
        if kernel is not None and extras is NO_EXTRAS:
            plan.bare = bare_of(kernel, q)
        return result

    return first


def _run(
    call: AttentionCall,
    launch: Launch,
    steps: tuple[Step | None, ...],
    make_out: Callable[..., Any],
    want_lse: bool,
    tail: _Tail,
) -> Callable[..., Any]:
    shape_of_lse = lse_shape(call)
    prepare_q, prepare_k, prepare_v = steps
    kernel: Callable[..., Any] | None = None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, extras: Extras) -> Any:
        if prepare_q is not None:
            q = prepare_q(q)
        if prepare_k is not None:
            k = prepare_k(k)
        if prepare_v is not None:
            v = prepare_v(v)
        written, result = make_out(q, out)
        lse = torch.empty(shape_of_lse, dtype=torch.float32, device=q.device) if want_lse else None
        arguments: tuple[Any, ...] = (q, k, v, written, lse, *tail(extras))
        nonlocal kernel
        if kernel is not None:
            kernel(*arguments)
        else:
            launch(*arguments)
            kernel = launch.direct()
        if written is not result:
            result.copy_(written)
        return result, lse

    return run
