"""From a checked call of attention to a launch: which kernel, with which tiles, on which views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import lowering
from kernels_dsl.checks import options
from kernels_dsl.config.attention import Extent, Sm90AttentionConfig, split_of
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig
from kernels_dsl.config.attention_table import AttentionConfig, choose, choose_for_lists, why_not
from kernels_dsl.ops import allocate
from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionArguments,
    AttentionCall,
    Extras,
    MaxSeqlens,
    Seqlens,
)
from kernels_dsl.ops.attention.list_order import check_list_options, longest_first
from kernels_dsl.ops.attention.outputs import (
    Step,
    destination,
    is_aligned,
    is_empty,
    lse_shape,
    out_shape,
    prepared_for_tma,
    without_kernel,
)
from kernels_dsl.ops.attention.pages import gather_pages
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import tile_counter
from lowering.records import NamedTuple

FUNCTIONS = {
    "sm90": lowering.jit("kernels_dsl.kernels.attention.forward_sm90:attention_sm90", name="attention_sm90"),
    "sm80": lowering.jit("kernels_dsl.kernels.attention.forward_sm80:attention_sm80", name="attention_sm80"),
}
MAX_TILES = (1 << 31) - (1 << 16)
"""Of a launch: kernels count work tiles, and as many more as there are CTAs, in 32 bits."""


class Plan:
    """The launches of calls like one that was seen: `run(q, k, v, out, extras)` gives (o, log-sum-exp or
    None), and with fp8 operands `run((q, k, v, *descales), extras, out)` what the caller gets.

    `bare(q, k, v, *descales)` gives o alone, with as little of the host's time as can be: it is there after
    the first run, for calls without extras, `out` and log-sum-exp whose tensors fit.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        config: AttentionConfig | None,
        bare: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.run, self.config, self.bare = run, config, bare


def build(call: AttentionCall, arguments: AttentionArguments, target: Target) -> Plan:
    """The plan of a call. ValueError where no kernel serves it, with the reason."""
    config, family, out, want_lse = arguments.config, arguments.family, arguments.out, arguments.return_lse
    tensors = arguments.q, arguments.k, arguments.v
    options.instance("family", family, str, type(None))
    if config is not None:
        options.instance("config", config, Sm90AttentionConfig, Sm80AttentionConfig)
        if family not in (None, config.family):
            raise ValueError(f"family is {family!r}, must be config's, {config.family!r}, or None")
        family = config.family
    family = target.families(family, "q")[0]
    if config is not None:
        reason = why_not(config, call.dim, call.dim_v, target.device)
        if reason is not None:
            raise ValueError(f"config is {config}, must be one that fits: {reason}")
        _check_pack(config, call)
        check_list_options(config, call)
    if is_empty(call):
        return Plan(without_kernel(call, want_lse, call.dtype), None)
    variant = call.variant
    if call.block is not None:
        chosen, split = choose_for_lists(family, call.dim, call.dim_v, variant, call.block, target.device)
        variant = replace(variant, lists=split)
    else:
        group = call.heads // call.kv_heads
        extent = Extent(call.longest_q, call.k_len, call.batch * call.heads, target.device.sm_count, group)
        chosen = choose(family, call.dim, call.dim_v, variant, target.device, extent)
    if config is not None:
        chosen = config
        if call.block is not None:
            variant = replace(variant, lists=split_of(config, call.block))
    check_grid(call, chosen)
    gathers = call.page > 0 and not _reads_pages(chosen, tensors)
    # Gathered pages fit.
    steps = tuple(None if gathers and n else prepared_for_tma(x) for n, x in enumerate(tensors))
    constexprs = {"layout": call.layout, "config": chosen, "variant": variant}
    launch = Launch(FUNCTIONS[family], target, constexprs)
    tail = _Tail(call, launch, chosen)
    make_out = _new_out(call, tensors[0]) if out is None else _given_out(call, out)
    run = _run(call, launch, steps, make_out, want_lse, tail)
    plan = Plan(_gathering(run) if gathers else run, chosen)
    if steps == (None, None, None) and out is None and not want_lse and not call.page:
        plan.run = _then_bare(plan, launch, make_out, tail)
    return plan


def check_grid(call: AttentionCall, config: AttentionConfig) -> None:
    """ValueError where a launch would have more work tiles than kernels can count."""
    tiles = -(-call.longest_q * config.pack // config.tile_m) * call.heads * call.batch
    if tiles >= MAX_TILES:
        name = "max_seqlen_q" if call.packed else "q's length"
        raise ValueError(
            f"{name} is {call.longest_q} with {call.batch} sequences of {call.heads} heads: {tiles} work "
            f"tiles of {config.tile_m} rows, must be less than {MAX_TILES}"
        )


def _check_pack(config: AttentionConfig, call: AttentionCall) -> None:
    """ValueError where a caller's configuration packs heads that cannot share a tile."""
    pack, group = config.pack, call.heads // call.kv_heads
    if pack > 1 and (group % pack or not call.variant.packable or call.block is not None):
        raise ValueError(
            f"config packs {pack} heads, must pack a divisor of the {group} query heads of a KV head, and "
            "1 with sinks, mask tensors, functions or blocks"
        )


class _Out(NamedTuple):
    """The tensor that a kernel writes, and the one that the caller gets: the same, or `result` is a copy or
    another view."""

    written: torch.Tensor
    result: torch.Tensor
    copied: bool


MakeOut = Callable[[torch.Tensor, Any], _Out]
"""Of q and the caller's `out`."""


def _given_out(call: AttentionCall, out: torch.Tensor) -> MakeOut:
    to = destination(call, out)
    return lambda q, out: _Out(to.of(out), out, to.copied)


def _new_out(call: AttentionCall, q: torch.Tensor) -> MakeOut:
    """A transposed (B, S, H, D) tensor has an output of the same order in memory."""
    shape, transposed = out_shape(call), False
    if call.layout == "bhsd" and q.stride(1) < q.stride(2) and call.q_len > 1 and call.heads > 1:
        shape, transposed = (call.batch, call.q_len, call.heads, call.dim_v), True

    def make(q: torch.Tensor, _: None) -> _Out:
        out = q.new_empty(shape)
        out = out.transpose(1, 2) if transposed else out
        return _Out(out, out, False)

    return make


def kernel_extras(call: AttentionCall, extras: Extras) -> tuple[Any, ...]:
    """(seqlens, max_q, lists, sinks, mask, aux) as the kernel takes them."""
    if extras is NO_EXTRAS:
        return None, call.longest_q, None, None, None, None
    mask = extras.mask
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        longest = extras.max_seqlens if call.packed else MaxSeqlens(call.q_len, call.k_len)
        assert longest is not None and longest.k is not None
        mask = mask.expand(call.batch, call.heads, longest.q, longest.k)
    lists, sinks = lists_and_sinks(call, extras)
    seqlens = None if extras.seqlens is None else tuple(extras.seqlens)
    if seqlens is not None and seqlens[3] is None:
        seqlens = seqlens[:3]
    return seqlens, call.longest_q, lists, sinks, mask, extras.aux or None


def lists_and_sinks(call: AttentionCall, extras: Extras) -> tuple[Any, Any]:
    """Block lists for each batch and head, and float32 sinks, as the kernels take them."""
    lists: Any = None
    if extras.blocks is not None:
        lead = (call.batch, call.heads)
        lists = tuple(None if x is None else x.expand(*lead, *x.shape[2:]) for x in extras.blocks.tensors)
    return lists, None if extras.sinks is None else extras.sinks.float().contiguous()


def _reads_pages(config: AttentionConfig, tensors: tuple[torch.Tensor, ...]) -> bool:
    """True where a kernel copies K and V from their pages. Others have them gathered, as have caches whose
    rows are not on 16 bytes: that copies the pages of sequences, not the cache."""
    return config.family == "sm80" and all(is_aligned(x) for x in tensors[1:])


def _gathering(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` on a call's pages as packed sequences, of whose keys `seqused_k` count."""

    def gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, extras: Extras) -> Any:
        seqlens = extras.seqlens
        assert seqlens is not None and seqlens.table is not None
        k, v, starts = gather_pages(k, v, seqlens.table)
        return run(q, k, v, out, extras._replace(seqlens=Seqlens(seqlens.q, starts, seqlens.used)))

    return gathered


class _Tail:
    """A kernel's arguments behind the tensors q, k, v, o and log-sum-exp."""

    def __init__(self, call: AttentionCall, launch: Launch, config: AttentionConfig) -> None:
        sms = launch.target.device.sm_count
        self.call = call
        self.scalars = (call.scale, call.softcap, call.left, call.right)
        self.index = launch.target.index
        self.last: tuple[Any, ...] = ()
        self.queued = False
        if config.traits.is_persistent:
            self.last = (sms,)
            uneven = call.packed or call.block is not None or call.variant.uneven
            extent = Extent(call.longest_q, 0, call.heads * call.batch, sms)
            self.queued = uneven and config.several_tiles(extent)
            if not self.queued:
                self.last = (None, sms)
        self.ordered = config if config.longest_first and self.queued else None
        self.ctas = sms if self.ordered is None else sms * self.ordered.ctas_per_sm
        self.bare = (*self.scalars, None, call.longest_q, None, None, None, None)

    def __call__(self, extras: Extras) -> tuple[Any, ...]:
        """The arguments of a call with these extras."""
        first = self.bare
        if extras is not NO_EXTRAS:
            seqlens, longest, lists, *others = kernel_extras(self.call, extras)
            if self.ordered is not None and lists is not None:
                lists = (*lists, longest_first(self.call, extras, self.ordered, self.ctas))
            first = (*self.scalars, seqlens, longest, lists, *others)
        return (*first, tile_counter(self.index), *self.last) if self.queued else (*first, *self.last)


def _then_bare(plan: Plan, launch: Launch, make_out: MakeOut, tail: _Tail) -> Callable[..., Any]:
    """`plan.run` which gives the plan its `bare` once there is a kernel."""
    run = plan.run

    def bare_of(kernel: Callable[..., Any], q: torch.Tensor) -> Callable[..., torch.Tensor]:
        fixed, last, index = (*tail.bare, *tail.last), tail.last, tail.index
        written = make_out(q, None).written
        new = allocate.maker(written.shape, written.dtype, written.device, written.stride())

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
    make_out: MakeOut,
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
        written, result, copied = make_out(q, out)
        lse = torch.empty(shape_of_lse, dtype=torch.float32, device=q.device) if want_lse else None
        arguments: tuple[Any, ...] = (q, k, v, written, lse, *tail(extras))
        nonlocal kernel
        if kernel is not None:
            kernel(*arguments)
        else:
            launch(*arguments)
            kernel = launch.direct()
        if copied:
            result.copy_(written)
        return result, lse

    return run
