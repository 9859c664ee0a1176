"""`quantize(out=…)`: into tensors that the caller has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.config.quantize import PITCH
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.eager_path import (
    PLAIN_TYPES,
    check_output,
    check_tensor,
    needs_dispatcher,
    watched,
    written_out,
)
from kernels_dsl.ops.overlap import byte_extent, check_alone
from kernels_dsl.ops.quantize.arguments import check
from kernels_dsl.ops.quantize.buffers import Made, assemble, new_results
from kernels_dsl.ops.quantize.plan import plan_of
from kernels_dsl.ops.target import target_of

_KEPT: dict[Any, Any] = {}


def quantize_into(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    transpose: bool | str,
    scale: torch.Tensor | None,
    out: Made,
) -> Made:
    """`kernels_dsl.quantize` with an `out`."""
    key: Any = None
    if type(x) in PLAIN_TYPES and type(out) is tuple and len(out) > 1 and (scale is None or scale is out[1]):
        distinct = out[:3] if len(out) == 4 and out[3] is out[1] else out
        usual = (x, *distinct)
        try:
            key = (x.shape, scale is None, dtype, scaling, transpose, len(out), len(distinct))
        except RuntimeError:  # of a nested tensor, which has no shape
            check_tensor("x", x)
            raise
        found = call_cache.find(_KEPT, key, usual)
        if found is not None:
            plan, alone = found
            if alone(usual):
                try:
                    plan(x, scale, out)
                    return out
                except ValueError:
                    call_cache.look_at_addresses(_KEPT, key)
    check(x, dtype, scaling, transpose, scale)
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out is a {type(out).__name__}, must be a tuple of tensors")
    check_out(out, x, dtype, scaling, transpose, scale)
    tensors = None if watched() else written_out((x, scale))
    if tensors is not None:
        into = [tensors[1] if t is scale else t for t in out]
        quantize_into(tensors[0], dtype, scaling, transpose, tensors[1], tuple(into))
        return out
    if needs_dispatcher((x, scale, *out)) or key is None:
        from kernels_dsl.ops.quantize import register

        return register.call_into(x, dtype, scaling, transpose, scale, tuple(out))
    plan = plan_of(x, dtype, scaling, transpose, scale)
    check_memory(out, x, scale)
    plan(x, scale, out)
    exact = all(t.is_contiguous() or t.dtype == torch.float32 for t in out)  # no room behind rows to look at
    if exact and not target_of(x, "x").emulated:
        call_cache.keep(_KEPT, key, usual, (plan, _apart(usual)))
    return out


def check_out(
    out: Sequence[Any],
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    transpose: bool | str,
    scale: torch.Tensor | None,
    strides: bool = True,
) -> None:
    """TypeError or ValueError where `out` is not like what a call without it returns; without `strides` those
    may be others."""
    like = new_results(x.shape, dtype, scaling, transpose, scale is not None, torch.device("meta"))
    results = assemble(like, scaling, transpose, scale)
    if len(out) != len(results):
        raise ValueError(f"out has {len(out)} tensors, must have {len(results)}")
    for n, (given, wanted) in enumerate(zip(out, results)):
        if wanted is scale:
            if given is not scale:
                raise ValueError(f"out[{n}] is not scale, must be: it is returned as it is")
            continue
        check_output(f"out[{n}]", given)
        if given.dtype != wanted.dtype:
            raise TypeError(f"out[{n}] has dtype {given.dtype}, must be {wanted.dtype}")
        if given.device != x.device:
            raise ValueError(f"out[{n}] is on {given.device}, must be on {x.device}")
        if given.shape != wanted.shape:
            raise ValueError(f"out[{n}] has shape {tuple(given.shape)}, must be {tuple(wanted.shape)}")
        steps = zip(given.stride(), wanted.stride(), given.shape)
        if strides and wanted.numel() and any(size > 1 and a != b for a, b, size in steps):
            raise ValueError(f"out[{n}] has strides {given.stride()}, must be {wanted.stride()}")
    if scaling == "tensor" and len(out) == 4 and out[1] is not out[3]:
        raise ValueError("out[3] is not out[1], must be: both outputs have the same scale")


def check_memory(out: Sequence[torch.Tensor], x: torch.Tensor, scale: torch.Tensor | None) -> None:
    """ValueError where the memory of `out`, which is otherwise right, is not what kernels may write."""
    for n, t in enumerate(out):
        if t is scale or t.numel() == 0:
            continue
        if t.element_size() == 1:
            if t.data_ptr() % PITCH:
                raise ValueError(
                    f"out[{n}] begins at address {t.data_ptr():#x}, must at a multiple of {PITCH}"
                )
            pitch = t.stride(-2) if t.dim() > 1 and t.shape[-2] > 1 else -(-t.shape[-1] // PITCH) * PITCH
            room = t.untyped_storage().nbytes() - t.storage_offset()
            needed = byte_extent(t) + pitch - t.shape[-1]
            if room < needed:
                raise ValueError(
                    f"out[{n}] has {room} bytes of memory from its first element on, must have {needed}: "
                    f"rows are written up to a multiple of {PITCH} bytes"
                )
        others = {f"out[{m}]": other for m, other in enumerate(out) if m < n and other is not t}
        check_alone(f"out[{n}]", t, {"x": x, "scale": scale, **others})


def _apart(usual: Made) -> Callable[[Made], bool]:
    """Whether tensors like these share no memory."""
    extents = [byte_extent(t) for t in usual]
    address = torch.Tensor.data_ptr

    def apart(tensors: Made) -> bool:
        end = 0
        for first, extent in sorted(zip(map(address, tensors), extents)):
            if first < end:
                return False
            end = first + extent
        return True

    return apart
