"""`attention_fp8` as an operation: from its arguments to launches.

V is transposed by a kernel of its own before the attention, since fp8 matrix instructions read operands along
the summed mode only; its time is part of the call. One host function launches both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lowering
from kernels_dsl.checks.eager_path import check_tensor, signature
from kernels_dsl.checks.options import instance
from kernels_dsl.config.attention import DESCALE_KEYS, LATER_NUMBERS, Extent, Sm90AttentionConfig
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig
from kernels_dsl.config.quantize import PITCH
from kernels_dsl.ops import allocate
from kernels_dsl.ops.attention.arguments import NO_EXTRAS, AttentionArguments, AttentionCall, Extras, describe
from kernels_dsl.ops.attention.fp8_choice import check_choice, choose
from kernels_dsl.ops.attention.outputs import (
    Step,
    check_addresses_and_values,
    check_out,
    destination,
    is_empty,
    lse_shape,
    out_shape,
    prepared_for_tma,
    repeated,
    without_kernel,
)
from kernels_dsl.ops.attention.plan import Plan, check_grid, lists_and_sinks
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.operation import Operation
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import counter_and_workspace, tile_counter
from kernels_dsl.sparse.block_lists import BlockLists
from lowering.records import NamedTuple, frozen

_FILE = "kernels_dsl.kernels.attention.fp8_with_transpose"
FUNCTIONS = {
    "sm90": lowering.jit(f"{_FILE}:attention_fp8_with_transpose", name="attention_sm90_fp8"),
    "sm80": lowering.jit(f"{_FILE}:attention_fp8_sm80_with_transpose", name="attention_sm80_fp8"),
}
DIM_STEP = 16
"""Head dimensions are multiples of this: 16 bytes, which TMA wants of every stride."""


@frozen
class AttentionFp8Arguments(AttentionArguments):
    """The arguments of `attention_fp8`, in one of its forms."""

    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    @property
    def descales(self) -> tuple[torch.Tensor | None, ...]:
        """Of q, k and v."""
        return self.q_descale, self.k_descale, self.v_descale

    def plan_key(self) -> Any:
        """All that a plan depends on."""
        return (*map(signature, self.descales), self.config, super().plan_key())

    def refuse_gradients(self) -> None:
        """TypeError for a `config`."""
        if self.config is not None:
            raise TypeError("config is given, must be None under torch.compile or a mode")


class _AttentionFp8(Operation[AttentionFp8Arguments, Plan]):
    def entry(self, plan: Plan, call: AttentionFp8Arguments, tensors: tuple[Any, ...]) -> Any:
        """The entry of the call cache: the bare launch, where no more than q, k, v and descales are given."""
        if call.extras is NO_EXTRAS and call.out is None and call.config is None and not call.return_lse:
            return plan.bare
        return repeated(plan, call.out, tensors)


def _describe(call: AttentionFp8Arguments) -> AttentionCall:
    """A checked call. TypeError and ValueError name what is wrong."""
    if call.extras.blocks is not None and not isinstance(call.extras.blocks, BlockLists):
        raise TypeError(f"blocks is a {type(call.extras.blocks).__name__}, must be BlockLists")
    found = describe(call, dtypes=(torch.float8_e4m3fn,))
    for name, size in (("q", found.dim), ("v", found.dim_v)):
        if size % DIM_STEP:
            raise ValueError(f"{name} has head dimension {size}, must be a multiple of {DIM_STEP} with fp8")
    heads = ((found.heads, found.kv_heads), (found.kv_heads,), (found.kv_heads,))
    blocks = None if found.packed else -(-found.k_len // DESCALE_KEYS)
    for name, x, allowed, parts in zip("qkv", call.descales, heads, (None, blocks, blocks)):
        _check_descale(f"{name}_descale", x, found.batch, allowed, call.q.device, parts)
    check_out(call.out, out_shape(found), torch.bfloat16, call.q.device)
    return found


def _follow(plan: Plan, call: AttentionFp8Arguments) -> Any:
    check_addresses_and_values(call)
    return plan.run((call.q, call.k, call.v, *call.descales), call.extras, call.out)


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
    """True if a descale has a factor for each block of keys."""
    return x is not None and x.dim() >= 3 and x.shape[2] != 1


def _descale_modes(x: torch.Tensor | None) -> int | None:
    """The number of a descale's modes that the kernel indexes; 0: it is one element."""
    if x is None:
        return None
    return 0 if x.numel() == 1 else 3 if _of_blocks(x) else 2


def _descale_step(x: torch.Tensor | None, heads: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The step from the caller's descale to the kernel's; None for nothing."""
    if x is None or (x.numel() > 1 and x.shape[1] == heads):
        return None
    if x.numel() == 1:
        return allocate.with_a_mode if x.dim() == 0 else None
    return lambda t: t.reshape(t.shape[:2]).repeat_interleave(heads // t.shape[1], dim=1)


def _build(call: AttentionCall, arguments: AttentionFp8Arguments, target: Target) -> Plan:
    """The plan of calls like this one. ValueError where no kernel does."""
    q, v, descales, config = arguments.q, arguments.v, arguments.descales, arguments.config
    instance("config", config, Sm90AttentionConfig, Sm80AttentionConfig, type(None))
    by_block = any(map(_of_blocks, descales[1:]))
    check_choice(call, target, by_block, config)
    if is_empty(call):
        zeros = without_kernel(call, arguments.return_lse, torch.bfloat16)

        def empty(tensors: tuple[Any, ...], extras: Extras, out: torch.Tensor | None) -> Any:
            found = zeros(*tensors[:3], out, extras)
            return found if arguments.return_lse else found[0]

        return Plan(empty, None)
    chosen, variant = choose(call, target.device, by_block, config)
    check_grid(call, chosen)
    constexprs = {
        "layout": call.layout, "config": chosen, "variant": variant,
        "descale_modes": tuple(map(_descale_modes, descales)),
    }  # fmt: skip
    heads = (call.heads, call.kv_heads, call.kv_heads)
    turns_v = chosen.turns_v
    by_tma = turns_v or chosen.later_v
    values_step = prepared_for_tma(v) if by_tma else _values_step(call, v)
    steps = (
        prepared_for_tma(q), prepared_for_tma(arguments.k), values_step, *map(_descale_step, descales, heads)
    )  # fmt: skip
    make = _Makers(
        _nothing if turns_v else allocate.maker(_transpose_shape(call), v.dtype, q.device),
        allocate.maker(out_shape(call), torch.bfloat16, q.device),
        allocate.maker(lse_shape(call), torch.float32, q.device),
    )
    return _launching(call, Launch(FUNCTIONS[chosen.family], target, constexprs), steps, make, arguments)


def _nothing() -> None:
    """In place of V's transpose, where the kernel makes it."""


def _values_step(call: AttentionCall, v: torch.Tensor) -> Step | None:
    """The step that prepares V for the kernels; None for nothing. The transpose takes any contiguous rows,
    that of packed sequences whole 16 bytes."""
    if call.packed:
        return prepared_for_tma(v)
    return None if v.stride(-1) == 1 else lambda t: t.contiguous()


def _transpose_shape(call: AttentionCall) -> tuple[int, ...]:
    """Of V's transpose: keys in the kernel's order, in whole 16 bytes."""
    keys = -(-call.k_len // PITCH)
    if call.packed:  # sequences at `blocks.seqlen.padded_start`
        return (call.kv_heads, call.dim_v, (keys + call.batch) * PITCH)
    return (call.batch, call.kv_heads, call.dim_v, keys * PITCH)


class _Makers(NamedTuple):
    """Make what the kernels write: V's transpose, output and log-sum-exp."""

    transpose: Callable[[], torch.Tensor | None]
    out: Callable[[], torch.Tensor]
    lse: Callable[[], torch.Tensor]


def _launching(
    call: AttentionCall,
    launch: Launch,
    steps: tuple[Step | None, ...],
    make: _Makers,
    arguments: AttentionFp8Arguments,
) -> Plan:
    """`steps`: what prepares q, k, v and descales."""
    make_transpose, make_out, make_lse = make
    extras, return_lse = arguments.extras, arguments.return_lse
    to = None if arguments.out is None else destination(call, arguments.out)
    scalars = (call.scale, call.softcap, call.left, call.right)
    max_ctas, index = launch.target.device.sm_count, launch.target.index
    chosen = launch.constexprs["config"]
    persistent = chosen.traits.is_persistent
    queued = persistent and (call.packed or call.block is not None or call.variant.uneven)
    if queued and not call.packed:
        extent = Extent(call.q_len, call.k_len, call.batch * call.heads, max_ctas)
        queued = chosen.several_tiles(extent)
    simple = extras is NO_EXTRAS and not return_lse and not any(steps) and to is None
    without_extras = (*scalars, None, call.longest_q, None, None)

    def of_persistent() -> tuple[Any, ...]:
        if not persistent:
            return ()
        numbers = counter_and_workspace(index, 0, LATER_NUMBERS)[0] if chosen.later_v else None
        return tile_counter(index) if queued else None, numbers, max_ctas

    def run(tensors: tuple[Any, ...], extras: Extras, out_given: torch.Tensor | None) -> Any:
        tensors = tuple([x if step is None else step(x) for x, step in zip(tensors, steps)])
        q, k, v, *descales = tensors
        out, lse = make_out() if to is None else to.of(out_given), make_lse() if return_lse else None
        last: tuple[Any, ...] = without_extras
        if extras is not NO_EXTRAS:
            seqlens = None if extras.seqlens is None else tuple(extras.seqlens[:3])
            last = (*scalars, seqlens, call.longest_q, *lists_and_sinks(call, extras))
        launch(q, k, v, make_transpose(), out, lse, *descales, *last, *of_persistent())
        if to is not None and out_given is not None:
            out = out_given.copy_(out) if to.copied else out_given
        elif simple and plan.bare is None:
            plan.bare = bare_of(launch.direct())
        return (out, lse) if return_lse else out

    def bare_of(kernel: Callable[..., Any] | None) -> Callable[..., torch.Tensor] | None:
        if kernel is None:
            return None

        fixed = (*without_extras, None, None, max_ctas)

        def alone(q: Any, k: Any, v: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> torch.Tensor:
            out = make_out()
            kernel(q, k, v, None, out, None, q_descale, k_descale, v_descale, *fixed)
            return out

        def general(q: Any, k: Any, v: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> torch.Tensor:
            out = make_out()
            descales = q_descale, k_descale, v_descale
            kernel(q, k, v, make_transpose(), out, None, *descales, *without_extras, *of_persistent())
            return out

        return alone if make_transpose is _nothing and not queued else general

    plan = Plan(run, chosen)
    return plan


ATTENTION_FP8 = _AttentionFp8("attention_fp8", AttentionFp8Arguments, _describe, _build, _follow)
