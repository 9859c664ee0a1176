"""Tensors of attention calls as kernels take them: steps that make inputs fit; outputs, their shapes, an
`out` of the caller's, results without any kernel.

Of an `out` a call writes the rows of its sequences, and nothing beside them: rows of packed tensors that
belong to no sequence keep what they held, and so do elements between the strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks import overlap
from kernels_dsl.checks.eager_path import check_output
from kernels_dsl.checks.overlap import byte_extent
from kernels_dsl.ops import checked
from kernels_dsl.ops.attention.arguments import MODES, NO_EXTRAS, AttentionArguments, AttentionCall, Extras
from kernels_dsl.ops.attention.pages import capacity_of
from lowering.records import NamedTuple, frozen

ROW_ALIGN = 16
Step = Callable[[torch.Tensor], torch.Tensor]


def is_aligned(x: torch.Tensor) -> bool:
    """Kernels reach its elements: contiguous head dimension, strides and base multiples of 16 bytes."""
    width = x.element_size()
    strides = [s for size, s in zip(x.shape[:-1], x.stride()[:-1]) if size > 1]
    return (
        (x.stride(-1) == 1 or x.shape[-1] == 1)
        and x.data_ptr() % ROW_ALIGN == 0
        and all(s > 0 and s * width % ROW_ALIGN == 0 for s in strides)
    )


def _plain_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """`strides` with those of modes of size 1, which may hold anything, replaced by the whole extent."""
    extent = 1 + sum(max(size - 1, 0) * s for size, s in zip(shape, strides))
    extent = -(-extent // ROW_ALIGN) * ROW_ALIGN
    rows = tuple(s if size > 1 else extent for size, s in zip(shape[:-1], strides))
    return (*rows, strides[-1])


def plain_view(x: torch.Tensor) -> Step | None:
    """The step that gives modes of size 1 of aligned tensors like this one strides that kernels take, in a
    view of the same elements; None for nothing."""
    strides = _plain_strides(tuple(x.shape), x.stride())
    return None if strides == x.stride() else lambda t: t.as_strided(t.shape, strides)


def prepared_for_tma(x: torch.Tensor) -> Step | None:
    """The step that makes tensors like this one fit for TMA and 16-byte copies; None for nothing."""
    if not is_aligned(x):
        return lambda t: t.clone(memory_format=torch.contiguous_format)
    return plain_view(x)


def out_shape(call: AttentionCall) -> tuple[int, ...]:
    """Shape of the output."""
    if call.packed:
        return (call.q_len, call.heads, call.dim_v)
    sizes = (call.batch, call.q_len, call.heads, call.dim_v)
    return tuple(sizes[MODES[call.layout].index(mode)] for mode in range(4))


def lse_shape(call: AttentionCall) -> tuple[int, ...]:
    """Shape of the log-sum-exp."""
    return (call.heads, call.q_len) if call.packed else (call.batch, call.heads, call.q_len)


def check_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """TypeError or ValueError for an `out`, if there is one, of another shape, dtype or device."""
    if out is None:
        return
    check_output("out", out)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, must be {dtype} {shape} on {device}"
        )


@frozen
class Destination:
    """The tensor that a kernel writes for an `out` of the caller's."""

    of: Step
    """Gives what the kernel writes, for an `out` like the one that was seen."""
    copied: bool
    """That is a tensor of its own, which is copied to `out` afterwards."""


def destination(call: AttentionCall, out: torch.Tensor) -> Destination:
    """For `out` and others like it. A copy of a packed `out` begins as what `out` holds, since a kernel
    writes the rows of sequences alone."""
    if is_aligned(out):
        return Destination(plain_view(out) or _itself, False)
    if call.packed:
        return Destination(lambda t: t.clone(memory_format=torch.contiguous_format), True)
    shape = out_shape(call)
    return Destination(lambda t: t.new_empty(shape), True)


def _itself(out: torch.Tensor) -> torch.Tensor:
    return out


def is_empty(call: AttentionCall) -> bool:
    """No query, or no key, or no page: no kernel is launched."""
    return 0 in (call.batch, call.heads, call.longest_q, call.longest_k)


def without_kernel(call: AttentionCall, want_lse: bool, dtype: torch.dtype) -> Callable[..., Any]:
    """`run(q, k, v, out, extras)` of an empty call: the output, of `dtype`, is 0, and the log-sum-exp -inf or
    the sink. Of a packed `out` rows of sequences alone are written."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, extras: Extras) -> Any:
        if out is None:
            out = torch.zeros(out_shape(call), dtype=dtype, device=q.device)
        elif call.packed:
            out.masked_fill_(rows_of_sequences(extras, call.q_len)[:, None, None], 0)
        else:
            out.zero_()
        if not want_lse:
            return out, None
        lse = torch.full(lse_shape(call), -torch.inf, dtype=torch.float32, device=q.device)
        if extras.sinks is not None:
            lse.copy_(extras.sinks.float()[:, None].expand_as(lse))
        return out, lse

    return run


def rows_of_sequences(extras: Extras, rows: int) -> torch.Tensor:
    """bool (rows,): which of the packed queries belong to a sequence, as its first max_seqlen_q rows do."""
    assert extras.seqlens is not None and extras.max_seqlens is not None
    starts, longest = extras.seqlens.q, extras.max_seqlens.q
    row = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    sequence = torch.searchsorted(starts, row, right=True) - 1
    place = row - starts[sequence.clamp(min=0)]
    return (sequence >= 0) & (sequence < starts.numel() - 1) & (place < longest)


def copy_rows(out: torch.Tensor, result: torch.Tensor, extras: Extras) -> torch.Tensor:
    """`out` with `result`, which no kernel wrote there: of packed tensors the rows of sequences alone."""
    if extras.seqlens is not None:
        rows = rows_of_sequences(extras, result.shape[0])
        result = torch.where(rows[:, None, None], result, out)
    return out.copy_(result)


class Repeated(NamedTuple):
    """The entry of the call cache for a call with more than q, k and v. `extents`: bytes that its tensors
    span, `out` first; empty where that is not given."""

    plan: Any
    extents: tuple[int, ...]


def repeated(plan: Any, out: torch.Tensor | None, tensors: tuple[Any, ...]) -> Repeated:
    """That of a plan; `out` is the last of the tensors, if it is given."""
    extents = () if out is None else tuple(map(byte_extent, (out, *tensors[:-1])))
    return Repeated(plan, extents)


def check_addresses_and_values(call: AttentionArguments) -> None:
    """ValueError where `out` shares memory with what the call reads, and in checked mode for wrong values."""
    if call.out is not None:
        named = {name: x for name, x in call.read().items() if x is not None}
        overlap.check_overlap(call.out, named, tuple(named))
    if call.extras is not NO_EXTRAS and checked.is_checked():
        rows, seqlens, pages = MODES[call.layout][1], call.extras.seqlens, 0
        lengths = (call.q.shape[rows], call.k.shape[rows])
        if seqlens is not None and seqlens.table is not None:
            lengths, pages = (lengths[0], capacity_of(call.k, seqlens.table)), call.k.shape[0]
        checked.check_values(call.extras, lengths, call.out is None and not call.drops_rows, pages)
