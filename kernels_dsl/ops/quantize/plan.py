"""From a `quantize` call's arguments to what serves calls like it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels_dsl.ops.quantize.arguments import FORMATS, Scheme, check_target
from kernels_dsl.ops.quantize.buffers import (
    Buffer,
    Made,
    assemble,
    buffers_of,
    finished,
    maker_of,
    new_ones,
)
from kernels_dsl.ops.quantize.kernels import Kernels, Place, Send
from kernels_dsl.ops.target import Target

Plan = Callable[[torch.Tensor, "torch.Tensor | None", "Made | None"], Made]
"""Serves calls (x, given scale, out): what the caller gets. `out` is right."""


def build(x: torch.Tensor, scheme: Scheme, target: Target) -> Plan:
    """The plan of calls like this one, whose arguments are right. ValueError where the GPU has no fp8."""
    check_target(target)
    if x.dim() == 1:
        return _of_one_mode(build(x[None], scheme, target))
    buffers = buffers_of(x.shape, scheme)
    if x.numel() == 0:
        return _of_nothing(buffers, scheme)
    prepare, swap = _preparation(x)
    kernels = Kernels(FORMATS[scheme.dtype], target, prepare(x) if prepare else x)
    send = kernels.sends(scheme.scaling, scheme.has_scale, _places(scheme, swap), maker_of(buffers, x.device))
    if prepare is None and all(b.result is None for b in buffers):
        # The shortest way: a caller gets the tensors as the kernels have them.
        return _with_one_scale(send, scheme.has_scale) if scheme.scaling == "tensor" else send

    def run(x: torch.Tensor, scale: torch.Tensor | None, out: Made | None) -> Made:
        x = x if prepare is None else prepare(x)
        if out is None:
            return assemble(finished(buffers, send(x, scale, None)), scheme, scale)
        own = new_ones(out, scheme)
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


def _of_nothing(buffers: list[Buffer], scheme: Scheme) -> Plan:
    """Of an empty tensor: scales, if there are any, are 1."""

    def run(x: torch.Tensor, scale: torch.Tensor | None, out: Made | None) -> Made:
        if out is None:
            made = finished(buffers, [b.on(x.device) for b in buffers])
            out = assemble(made, scheme, scale)
        for t in new_ones(out, scheme):
            t.fill_(1.0)
        return out

    return run


def _with_one_scale(send: Send, has_scale: bool) -> Plan:
    """The plan of calls with a scale of all, where callers get the tensors as the kernels have them."""

    def run(x: torch.Tensor, scale: torch.Tensor | None, out: Made | None) -> Made:
        made = None
        if out is not None:
            made = (*out[::2], *(() if has_scale else out[1:2]))
        made = send(x, scale, made)
        one = made[-1] if scale is None else scale
        both = len(made) == (2 if has_scale else 3)
        return (made[0], one, made[1], one) if both else (made[0], one)

    return run


def _places(scheme: Scheme, swap: bool) -> tuple[Place, ...]:
    """Positions among the buffers of the kernels' outputs of x and of its transpose. With `swap` the kernels
    read the transpose of x."""
    count = sum(scheme.outputs)
    whole = scheme.scaling == "tensor"
    pairs = iter([(n, count) if whole else (2 * n, 2 * n + 1) for n in range(count)])
    places = [next(pairs) if wanted else None for wanted in scheme.outputs]
    return tuple(reversed(places)) if swap else tuple(places)


def _preparation(x: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, bool]:
    """(function that makes a tensor that the kernels read, or None; True where that is the transpose)."""
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
