"""From a `quantize` call's arguments to what serves calls like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.ops import allocate, call_cache
from kernels_dsl.ops.eager_path import signature
from kernels_dsl.ops.quantize.arguments import FORMATS, OUTPUTS, check, check_target
from kernels_dsl.ops.quantize.buffers import Buffer, Made, assemble, buffers_of, finished, new_ones
from kernels_dsl.ops.quantize.kernels import Kernels, Send
from kernels_dsl.ops.target import Target, target_of

Plan = Callable[[torch.Tensor, "torch.Tensor | None", "Made | None"], Made]
"""Serves calls (x, given scale, out): what the caller gets. `out` is right."""
_PLANS: dict[Any, Plan] = {}


def run_direct(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    transpose: bool | str,
    scale: torch.Tensor | None,
    out: Made | None = None,
) -> Made:
    """`quantize` past the dispatcher; `out` is right."""
    return plan_of(x, dtype, scaling, transpose, scale)(x, scale, out)


def plan_of(
    x: torch.Tensor, dtype: torch.dtype, scaling: str, transpose: bool | str, scale: torch.Tensor | None
) -> Plan:
    """What serves a call. TypeError and ValueError name what is wrong with an argument."""
    key = (signature(x), dtype, scaling, transpose, signature(scale))
    plan = _PLANS.get(key)
    if plan is None:
        check(x, dtype, scaling, transpose, scale)
        target = target_of(x, "x")
        check_target(target)
        plan = _plan(x, dtype, scaling, transpose, target, scale is not None)
        if not target.emulated:
            call_cache.put(_PLANS, key, plan)
    return plan


def _plan(
    x: torch.Tensor, dtype: torch.dtype, scaling: str, transpose: bool | str, target: Target, given: bool
) -> Plan:
    if x.dim() == 1:
        return _of_one_mode(_plan(x[None], dtype, scaling, transpose, target, given))
    buffers = buffers_of(x.shape, dtype, scaling, transpose, given)
    if x.numel() == 0:
        return _of_nothing(buffers, scaling, transpose)
    prepare, swap = _preparation(x)
    kernels = Kernels(FORMATS[dtype], target, prepare(x) if prepare else x)
    make = allocate.several([allocate.maker(b.shape, b.dtype, x.device, b.strides) for b in buffers])
    send = kernels.sends(scaling, given, _places(scaling, transpose, swap), make)
    if prepare is None and all(b.result is None for b in buffers):
        # The shortest way: a caller gets the tensors as the kernels have them.
        return _with_one_scale(send, given) if scaling == "tensor" else send

    def run(x: torch.Tensor, scale: torch.Tensor | None, out: Made | None) -> Made:
        x = x if prepare is None else prepare(x)
        if out is None:
            return assemble(finished(buffers, send(x, scale, None)), scaling, transpose, scale)
        own = new_ones(out, scaling, transpose, scale)
        send(x, scale, tuple(t if b.result is None else b.behind(t) for b, t in zip(buffers, own)))
        return out

    return run


def _of_one_mode(inner: Plan) -> Plan:
    """`inner` serves x[None]."""

    def run(x: torch.Tensor, scale: torch.Tensor | None, out: Made | None) -> Made:
        if out is None:
            return tuple(t[0] if t.dim() and t is not scale else t for t in inner(x[None], scale, None))
        inner(x[None], scale, tuple(t[None] if t.dim() and t is not scale else t for t in out))
        return out

    return run


def _of_nothing(buffers: list[Buffer], scaling: str, transpose: bool | str) -> Plan:
    """Of an empty tensor: scales, if there are any, are 1."""

    def run(x: torch.Tensor, scale: torch.Tensor | None, out: Made | None) -> Made:
        if out is None:
            made = finished(buffers, [b.on(x.device) for b in buffers])
            out = assemble(made, scaling, transpose, scale)
        for t in new_ones(out, scaling, transpose, scale):
            t.fill_(1.0)
        return out

    return run


def _with_one_scale(send: Send, given: bool) -> Plan:
    """What serves calls with a scale of all, where callers get the tensors as the kernels have them."""

    def run(x: torch.Tensor, scale: torch.Tensor | None, out: Made | None) -> Made:
        made = None
        if out is not None:
            made = (*out[::2], *(() if given else out[1:2]))
        made = send(x, scale, made)
        one = made[-1] if scale is None else scale
        both = len(made) == (2 if given else 3)
        return (made[0], one, made[1], one) if both else (made[0], one)

    return run


def _places(scaling: str, transpose: bool | str, swap: bool) -> tuple[tuple[int, int] | None, ...]:
    """Where among the buffers the kernels' plain and turned output are, (values, scales) or None. With `swap`
    the kernels read the transpose of x."""
    count = sum(OUTPUTS[transpose])
    pairs = iter([(n, count) if scaling == "tensor" else (2 * n, 2 * n + 1) for n in range(count)])
    places = [next(pairs) if wanted else None for wanted in OUTPUTS[transpose]]
    return tuple(reversed(places)) if swap else tuple(places)


def _preparation(x: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, bool]:
    """(what makes a tensor that the kernels read, or None, whether that is the transpose)."""
    rank = x.dim()
    contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
    if contiguous and rank <= 4:
        return None, False
    if contiguous or x.stride(-2) != 1:
        return (lambda x: _merged(x if contiguous else x.contiguous(), rank)), False
    return (lambda x: _merged(x.mT, rank)), True


def _merged(x: torch.Tensor, rank: int) -> torch.Tensor:
    """At most four modes: leading ones beyond two become one, by a copy if their strides demand it."""
    return x if rank <= 4 else x.flatten(0, rank - 4)
