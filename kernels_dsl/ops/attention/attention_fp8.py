"""Attention forward with e4m3 operands: softmax(scale · Q Kᵀ) V, from fp8 values and their scales.

V is transposed by a kernel of its own before the attention, since fp8 matrix instructions read operands along
the summed mode only; its time is part of the call. One host function launches both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import lowering
from kernels_dsl.config.attention import DESCALE_KEYS, LATER_NUMBERS, Extent, Sm90AttentionConfig
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig
from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.config.quantize import PITCH
from kernels_dsl.ops import allocate, call_cache, checked, overlap
from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionCall,
    Extras,
    checked_scalars,
    describe,
    widths_of,
)
from kernels_dsl.ops.attention.blocks import BlockLists
from kernels_dsl.ops.attention.fp8_choice import check_choice, choose
from kernels_dsl.ops.attention.outputs import (
    Destination,
    check_out,
    destination,
    is_empty,
    lse_shape,
    out_shape,
    without_kernel,
)
from kernels_dsl.ops.attention.plan import check_grid, lists_and_sinks
from kernels_dsl.ops.attention.views import Step, prepared_for_tma
from kernels_dsl.ops.eager_path import (
    check_memory,
    check_output,
    check_tensor,
    needs_dispatcher,
    signature,
    watched,
    written_out,
)
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.options import boolean, instance, integer
from kernels_dsl.ops.target import target_of
from kernels_dsl.ops.tile_counter import counter_and_workspace, tile_counter

_JOINT = "kernels_dsl.kernels.attention.fp8_with_transpose"
FUNCTIONS = {
    "sm90": lowering.jit(f"{_JOINT}:attention_fp8_with_transpose", name="attention_sm90_fp8"),
    "sm80": lowering.jit(f"{_JOINT}:attention_fp8_sm80_with_transpose", name="attention_sm80_fp8"),
}
DIM_STEP = 16
"""Head dimensions are multiples of this: 16 bytes, which TMA wants of every stride."""
NAMED = ("q", "k", "v", "q_descale", "k_descale", "v_descale")
_PLANS: dict[Any, Any] = {}
"""Plans, and of calls without extras, `out`, log-sum-exp and configuration their `bare` (`call_cache`)."""
_Tensor = torch.Tensor


@dataclass
class _Plan:
    """How calls like one that was seen run: `run((q, k, v, *descales), extras, out)` gives what the caller
    gets.

    `bare(q, k, v, *descales)` does the same with as little of the host's time as can be: it is there after
    the first run, for calls on one GPU without extras, `out` and log-sum-exp whose tensors kernels take as
    they are.
    """

    run: Callable[[tuple[Any, ...], Extras, torch.Tensor | None], Any]
    bare: Callable[..., torch.Tensor] | None = None


def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    blocks: BlockLists | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Any:
    """softmax(scale · (q · q_descale) (k · k_descale)ᵀ) (v · v_descale), in bf16.

    q: (B, Sq, H, D), k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv), torch.float8_e4m3fn, D and Dv multiples of 16 up
    to 256. The descales, float32: one element, or a factor a head: (B, H) or (B, Hk) for q, (B, Hk) for k and
    v, as FlashAttention-3 has them, or with two more modes of 1, as
    `quantize(x.transpose(1, 2), scaling="matrix")` returns them; None is 1. For k and v also a factor for
    every 128 keys, (B, Hk, ceil(Sk / 128)) or with one more mode of 1, as "128x128" returns them up to D =
    128; they must be greater than 0. The other arguments are those of `kernels_dsl.attention`; there is no
    `mask`, `score_mod`, `mask_mod`.

    Scores and the softmax are float32. The probabilities are scaled by a power of two a row and rounded to
    e4m3: a relative error of at most 1/16, and for those below 2⁻¹² of the row's largest sum over a quarter
    of a block of keys an absolute one of 2⁻¹⁶ of that sum. On Hopper, at D up to 128 and without
    `return_lse`, a third of the exponentials is piecewise linear, with an error of -4 to 2 % of its own
    (docs/how_attention_fp8_works.md).

    Returns (B, Sq, H, Dv) bf16, and with `return_lse` float32 (B, H, Sq). Compute capability 9.0, 8.9 and
    12.0. Raises TypeError and ValueError that name the argument; `attention_fp8_supports` gives the reasons
    as text. No gradients.
    """
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    options = (causal, window if window is None else widths_of(window), alignment, scale, softcap)
    key: Any = None
    usual: tuple[Any, ...] = ()
    if sinks is blocks is out is config is None and return_lse is False:
        if type(q) is type(k) is _Tensor:
            usual = (q, k, v, q_descale, k_descale, v_descale)
            given = (q_descale is None, k_descale is None, v_descale is None)
            if True in given:
                usual = (q, k, v, *[x for x in usual[3:] if x is not None])
            try:
                key = (q.shape, k.shape, given, options)
                bare = call_cache.find(_PLANS, key, usual)
            except RuntimeError:  # nested tensors, which have no shape, are refused further on
                bare = None
            if bare is not None:
                try:
                    return bare(q, k, v, q_descale, k_descale, v_descale)
                except ValueError:
                    call_cache.look_at_addresses(_PLANS, key)
    extras = NO_EXTRAS if sinks is blocks is None else Extras(sinks=sinks, blocks=blocks)
    descales = (q_descale, k_descale, v_descale)
    return _dispatched((q, k, v), descales, options, extras, (return_lse, config, out), (key, usual))


def attention_fp8_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    *,
    seqused_k: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    blocks: BlockLists | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Any:
    """`attention_fp8` of packed sequences, each to itself, arguments as there and in `attention_varlen`.

    q: (Tq, H, D), k: (Tk, Hk, D), v: (Tk, Hk, Dv). cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,) rising
    from 0. max_seqlen_q: no sequence has more queries. seqused_k: int32 (sequences,). The batch of descales
    and of `blocks` is the sequences.

    Returns (Tq, H, Dv) bf16, and with `return_lse` float32 (H, Tq).
    """
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    options = (causal, window if window is None else widths_of(window), alignment, scale, softcap)
    seqlens = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    if type(max_seqlen_q) is not int:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q)
    extras = Extras(sinks=sinks, blocks=blocks, seqlens=seqlens, max_seqlens=(max_seqlen_q, None))
    rest = (return_lse, config, out)
    return _dispatched((q, k, v), (q_descale, k_descale, v_descale), options, extras, rest)


def _dispatched(
    tensors: tuple[torch.Tensor, ...],
    descales: tuple[Any, ...],
    options: tuple[Any, ...],
    extras: Extras,
    rest: tuple[Any, ...],
    usual: tuple[Any, tuple[Any, ...]] = (None, ()),
) -> Any:
    """A call by itself, or as an operator where something must see it as one. As `run_direct`, and `usual`:
    (key, tensors) that it is to be found by again."""
    return_lse, config, out = rest
    boolean("return_lse", return_lse)
    if extras is not NO_EXTRAS and not watched():
        extras = extras.written_out()
    if needs_dispatcher((*tensors, *descales, extras.sinks, out)):
        if not watched():
            if out is not None:
                check_output("out", out)
            made = written_out((*tensors, *descales))
            if made is not None:
                return _dispatched(made[:3], made[3:], options, extras, rest)
        from kernels_dsl.ops.attention import fp8_register

        if config is not None:
            raise TypeError("config is given, must be None under torch.compile or a mode")
        return fp8_register.call(tensors, descales, options, extras, (return_lse, out))
    plan = _plan_of(tensors, descales, options, extras, rest)
    if out is not None:
        named = {**dict(zip(NAMED, (*tensors, *descales))), **extras.tensors()}
        overlap.check_alone("out", out, named)
    if extras is not NO_EXTRAS and checked.is_checked():
        rows = 0 if extras.seqlens is not None else 1
        checked.check_values(extras, (tensors[0].shape[rows], tensors[1].shape[rows]), out is None)
    result = plan.run((*tensors, *descales), extras, out)
    if plan.bare is not None and usual[0] is not None:
        call_cache.keep(_PLANS, *usual, plan.bare)
    return result


def run_direct(
    tensors: tuple[torch.Tensor, ...],
    descales: tuple[Any, ...],
    options: tuple[Any, ...],
    extras: Extras,
    rest: tuple[Any, ...],
) -> Any:
    """A call past the dispatcher. `tensors`: q, k, v; `options`: (causal, window, alignment, scale, softcap);
    `rest`: (return_lse, config, out)."""
    return _plan_of(tensors, descales, options, extras, rest).run((*tensors, *descales), extras, rest[2])


def _plan_of(
    tensors: tuple[torch.Tensor, ...],
    descales: tuple[Any, ...],
    options: tuple[Any, ...],
    extras: Extras,
    rest: tuple[Any, ...],
) -> _Plan:
    """The plan of a call; arguments as those of `run_direct`."""
    key: Any = None
    known = extras.blocks is None or isinstance(extras.blocks, BlockLists)
    if known and all(isinstance(x, torch.Tensor) for x in tensors):
        key = (*map(signature, (*tensors, *descales, rest[2])), options, rest[:2])
        if extras is not NO_EXTRAS:
            others = tuple((name, signature(x)) for name, x in extras.tensors().items())
            key = (key, others, extras.blocks and extras.blocks.block, extras.max_seqlens)
    plan: _Plan | None = None
    try:
        plan = _PLANS.get(key) if key is not None else None
    except TypeError:  # as in `attention_fp8`
        key = None
    if plan is None:
        plan = _plan(tensors, descales, options, extras, rest)
        named = dict(zip(NAMED, (*tensors, *descales)))
        check_memory({**named, **extras.tensors(), "out": rest[2]})
        if key is not None and not target_of(tensors[0], "q").emulated:
            call_cache.put(_PLANS, key, plan)
    return plan


def attention_fp8_supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> str | None:
    """Why `attention_fp8(q, k, v, **options)` cannot run here; None if it can. Compiles nothing.

    With `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q` and perhaps `seqused_k`: `attention_fp8_varlen`.
    """
    names = ("q_descale", "k_descale", "v_descale")
    descales = tuple(options.pop(name, None) for name in names)
    values = tuple(
        options.pop(name, default)
        for name, default in (
            ("causal", False), ("window", None), ("alignment", "bottom_right"), ("scale", None),
            ("softcap", 0.0),
        )
    )  # fmt: skip
    seqlens = tuple(options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    longest = (options.pop("max_seqlen_q", 0), None)
    packed = seqlens[0] is not None or seqlens[1] is not None
    extras = Extras(
        sinks=options.pop("sinks", None),
        blocks=options.pop("blocks", None),
        seqlens=seqlens if packed else None,
        max_seqlens=longest if packed else None,
    )
    rest = (options.pop("return_lse", False), options.pop("config", None), options.pop("out", None))
    if options:
        return f"{sorted(options)[0]} is given, must not: fp8 attention has no such argument"
    try:
        boolean("return_lse", rest[0])
        _plan((q, k, v), descales, values, extras, rest)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _check_descale(
    name: str, x: Any, batch: int, heads: tuple[int, ...], device: torch.device, blocks: int | None = None
) -> None:
    """`blocks`: key blocks that may have a factor each; None: only heads may."""
    if x is None:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, must be a float32 torch.Tensor")
    check_tensor(name, x)
    shapes: list[tuple[int, ...]] = [(batch, h) for h in dict.fromkeys(heads)]
    if _of_blocks(x) and blocks is not None:
        shapes = [(batch, heads[0], blocks)]
    fits = x.numel() == 1 or tuple(x.shape) in [s + tail for s in shapes for tail in ((), (1,), (1, 1))]
    if x.dtype != torch.float32 or x.device != device or not fits:
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, must be torch.float32 of one element or "
            f"{' or '.join(map(str, shapes))} on {device}"
        )


def _of_blocks(x: torch.Tensor | None) -> bool:
    """Whether a descale has a factor for each block of keys."""
    return x is not None and x.dim() >= 3 and x.shape[2] != 1


def _descale_modes(x: torch.Tensor | None) -> int | None:
    """How many of a descale's modes the kernel indexes; 0: it is one element."""
    if x is None:
        return None
    return 0 if x.numel() == 1 else 3 if _of_blocks(x) else 2


def _descale_step(x: torch.Tensor | None, heads: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes the kernel's descale of the caller's; None for nothing."""
    if x is None or (x.numel() > 1 and x.shape[1] == heads):
        return None
    if x.numel() == 1:
        return allocate.with_a_mode if x.dim() == 0 else None
    return lambda t: t.reshape(t.shape[:2]).repeat_interleave(heads // t.shape[1], dim=1)


def described(
    tensors: tuple[Any, ...], descales: tuple[Any, ...], options: tuple[Any, ...], extras: Extras
) -> AttentionCall:
    """A checked call; arguments as those of `run_direct`. TypeError and ValueError name what is wrong."""
    causal, window, alignment, scale, softcap = options
    if extras.blocks is not None and not isinstance(extras.blocks, BlockLists):
        raise TypeError(f"blocks is a {type(extras.blocks).__name__}, must be BlockLists")
    layout = "bshd" if extras.seqlens is None else "thd"
    call = describe(
        *tensors, layout=layout, causal=causal, window=window, alignment=alignment, scale=scale,
        softcap=softcap, extras=extras, dtypes=(torch.float8_e4m3fn,),
    )  # fmt: skip
    for name, size in (("q", call.dim), ("v", call.dim_v)):
        if size % DIM_STEP:
            raise ValueError(f"{name} has head dimension {size}, must be a multiple of {DIM_STEP} with fp8")
    heads = ((call.heads, call.kv_heads), (call.kv_heads,), (call.kv_heads,))
    blocks = None if call.packed else -(-call.k_len // DESCALE_KEYS)
    for name, x, allowed, parts in zip(("q", "k", "v"), descales, heads, (None, blocks, blocks)):
        _check_descale(f"{name}_descale", x, call.batch, allowed, tensors[0].device, parts)
    return call


def _plan(
    tensors: tuple[Any, ...],
    descales: tuple[Any, ...],
    options: tuple[Any, ...],
    extras: Extras,
    rest: tuple[Any, ...],
) -> _Plan:
    """What serves calls like this one; arguments as those of `run_direct`."""
    call = described(tensors, descales, options, extras)
    q = tensors[0]
    target = target_of(q, "q")
    return_lse, config, out = rest
    instance("config", config, Sm90AttentionConfig, Sm80AttentionConfig, type(None))
    check_out(out, out_shape(call), torch.bfloat16, q.device)
    overlap.check_self_overlap(out)
    by_block = any(map(_of_blocks, descales[1:]))
    check_choice(call, target, by_block, config)
    if is_empty(call):
        zeros = without_kernel(call, return_lse, torch.bfloat16)

        def empty(tensors: tuple[Any, ...], extras: Extras, out: torch.Tensor | None) -> Any:
            found = zeros(*tensors[:3], out, extras)
            return found if return_lse else found[0]

        return _Plan(empty)
    chosen, variant = choose(call, target.device, by_block, config)
    check_grid(call, chosen)
    constexprs = {
        "layout": call.layout, "config": chosen, "variant": variant,
        "descale_modes": tuple(map(_descale_modes, descales)),
    }  # fmt: skip
    heads = (call.heads, call.kv_heads, call.kv_heads)
    turns_v = isinstance(chosen, Sm90AttentionConfig) and chosen.turns_v
    by_tma = isinstance(chosen, Sm90AttentionConfig) and (turns_v or chosen.later_v)
    values_step = prepared_for_tma(tensors[2]) if by_tma else _values_step(call, tensors[2])
    steps = (*map(prepared_for_tma, tensors[:2]), values_step)
    steps += tuple(map(_descale_step, descales, heads))
    shapes = (_turned_shape(call), out_shape(call), lse_shape(call))
    dtypes = (tensors[2].dtype, torch.bfloat16, torch.float32)
    make = [allocate.maker(shape, dtype, q.device) for shape, dtype in zip(shapes, dtypes)]
    if turns_v:
        make[0] = _nothing
    to = None if out is None else destination(call, out)
    launch = Launch(FUNCTIONS[chosen.family], target, constexprs)
    return _launching(call, launch, steps, make, (extras, to, return_lse))


def _nothing() -> None:
    """In place of V's transpose, where the kernel makes it."""


def _values_step(call: AttentionCall, v: torch.Tensor) -> Step | None:
    """What is done to V before the kernels; None for nothing. The transpose takes any contiguous rows, that
    of packed sequences whole 16 bytes."""
    if call.packed:
        return prepared_for_tma(v)
    return None if v.stride(-1) == 1 else lambda t: t.contiguous()


def _turned_shape(call: AttentionCall) -> tuple[int, ...]:
    """Of V's transpose: keys in the kernel's order, in whole 16 bytes."""
    keys = -(-call.k_len // PITCH)
    if call.packed:  # sequences at `blocks.seqlen.padded_start`
        return (call.kv_heads, call.dim_v, (keys + call.batch) * PITCH)
    return (call.batch, call.kv_heads, call.dim_v, keys * PITCH)


def _launching(
    call: AttentionCall,
    launch: Launch,
    steps: tuple[Step | None, ...],
    make: list[Callable[[], torch.Tensor | None]],
    rest: tuple[Extras, Destination | None, bool],
) -> _Plan:
    """`steps`: what prepares q, k, v and descales. `make`: makers of V's transpose, output, log-sum-exp.
    `rest`: extras, where an `out` is given what becomes of it, and whether the log-sum-exp is asked for."""
    make_turned, make_out, make_lse = make
    extras, to, return_lse = rest
    scalars = (call.scale, call.softcap, call.left, call.right)
    max_ctas, index = launch.target.device.sm_count, launch.target.index
    chosen = launch.constexprs["config"]
    hopper = isinstance(chosen, Sm90AttentionConfig)
    queued = hopper and (call.packed or call.block is not None or call.variant.uneven)
    if queued and not call.packed:
        extent = Extent(call.q_len, call.k_len, call.batch * call.heads, max_ctas)
        queued = chosen.several_tiles(extent)
    simple = extras is NO_EXTRAS and not return_lse and not any(steps) and to is None
    without_extras = (*scalars, None, call.longest_q, None, None)

    def of_hopper() -> tuple[Any, ...]:
        if not hopper:
            return ()
        numbers = counter_and_workspace(index, 0, LATER_NUMBERS)[0] if chosen.later_v else None
        return tile_counter(index) if queued else None, numbers, max_ctas

    def run(tensors: tuple[Any, ...], extras: Extras, given: torch.Tensor | None) -> Any:
        tensors = tuple([x if step is None else step(x) for x, step in zip(tensors, steps)])
        q, k, v, *descales = tensors
        out, lse = make_out() if to is None else to.of(given), make_lse() if return_lse else None
        rest: tuple[Any, ...] = without_extras
        if extras is not NO_EXTRAS:
            rest = (*scalars, extras.seqlens, call.longest_q, *lists_and_sinks(call, extras))
        rest = (*rest, *of_hopper())
        launch(q, k, v, make_turned(), out, lse, *descales, *rest)
        if to is not None and given is not None:
            out = given.copy_(out) if to.copied else given
        elif simple and plan.bare is None:
            plan.bare = bare_of(launch.direct())
        return (out, lse) if return_lse else out

    def bare_of(kernel: Callable[..., Any] | None) -> Callable[..., torch.Tensor] | None:
        if kernel is None:
            return None

        fixed = (*without_extras, None, None, max_ctas)

        def alone(q: Any, k: Any, v: Any, *descales: Any) -> torch.Tensor:
            out = make_out()
            kernel(q, k, v, None, out, None, *descales, *fixed)
            return out

        def general(q: Any, k: Any, v: Any, *descales: Any) -> torch.Tensor:
            out = make_out()
            rest = (*without_extras, *of_hopper())
            kernel(q, k, v, make_turned(), out, None, *descales, *rest)
            return out

        return alone if make_turned is _nothing and not queued else general

    plan = _Plan(run)
    return plan
