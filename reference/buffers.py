"""Strided views inside guarded memory: poisoned outputs, and operands with NaN all around them.

A view lies in the middle of a larger buffer. Everything in the buffer that is not an element of the view
(the guards before and after it, and the gap behind each row of a padded layout) is a guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Quiet NaNs whose payload no arithmetic produces, so that "never written" differs from "computed as NaN".
_POISON = {
    torch.float64: 0x7FF9_A5A5_A5A5_A5A5,
    torch.float32: 0x7FE5_A5A5,
    torch.float16: 0x7FA5,
    torch.bfloat16: 0x7FE5,
    torch.float8_e4m3fn: 0xFF,  # conversions make 0x7F
    torch.float8_e5m2: 0xFF,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGER_POISON = 0x5A


class GuardError(AssertionError):
    """Memory outside of an output was written, or part of the output was not."""


@dataclass(frozen=True)
class Guarded:
    """A view of `buffer` (one-dimensional), with everything else of it holding `pattern`."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    pattern: int

    def outside(self) -> torch.Tensor:
        """Boolean (len(buffer),): True where the buffer does not belong to the view."""
        mask = torch.ones(self.buffer.numel(), dtype=torch.bool, device=self.buffer.device)
        view = self.tensor
        if view.numel():
            mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        return mask


def strides_of(shape: Sequence[int], contiguous: int = -1, pad: int = 0) -> tuple[int, ...]:
    """Strides in elements of a layout whose mode `contiguous` has stride 1; the other of the last two modes
    comes next with `pad` elements of gap behind each row, then the leading modes from right to left."""
    rank = len(shape)
    if rank == 0:
        return ()
    first = contiguous % rank
    order = [first] + [mode for mode in reversed(range(rank)) if mode != first]
    strides = [0] * rank
    step = 1
    for position, mode in enumerate(order):
        strides[mode] = step
        step *= max(1, shape[mode])
        if position == 0:
            step += pad
    return tuple(strides)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory seen as integers, so that NaNs compare by their bits."""
    return tensor.view(_BITS[tensor.element_size()])


def poison_of(dtype: torch.dtype) -> int:
    """The bit pattern that stands for "never written" in an output of this dtype."""
    if dtype in _POISON:
        return _POISON[dtype]
    return _INTEGER_POISON


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    contiguous: int = -1,
    pad: int = 0,
    offset: int = 0,
    guard: int = 64,
    pattern: int | None = None,
) -> Guarded:
    """A view of `shape` in a buffer that holds `pattern` everywhere, the view included.

    contiguous: the mode with stride 1. pad: elements between rows. offset: elements by which the view's start
    is shifted from a 256-byte boundary (1 gives the least alignment that the dtype allows).
    guard: elements before and after the view, rounded up to 256 bytes. pattern: bits; default `poison_of`.
    """
    if offset < 0 or pad < 0 or guard < 0:
        raise ValueError(f"offset {offset}, pad {pad} and guard {guard} must not be negative")
    element = torch.empty((), dtype=dtype).element_size()
    line = 256 // element
    before = -(-guard // line) * line + offset
    strides = strides_of(shape, contiguous, pad)
    extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides))
    buffer = torch.empty(before + extent + -(-guard // line) * line, dtype=dtype, device=device)
    pattern = poison_of(dtype) if pattern is None else pattern
    bits(buffer).fill_(pattern)
    return Guarded(buffer.as_strided(tuple(shape), strides, before), buffer, pattern)


def poisoned(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    contiguous: int = -1,
    pad: int = 0,
    offset: int = 0,
    guard: int = 64,
) -> Guarded:
    """An output: a view full of NaN inside guarded memory. Pass `.tensor` as `out`, then `check_output`."""
    return guarded(shape, dtype, device=device, contiguous=contiguous, pad=pad, offset=offset, guard=guard)


def embed(
    values: torch.Tensor,
    *,
    contiguous: int = -1,
    pad: int = 0,
    offset: int = 0,
    guard: int = 64,
) -> torch.Tensor:
    """A copy of `values` that lies between NaNs (arguments as in `guarded`): a read past its ends shows.

    Integer dtypes have no NaN and get a constant pattern instead.
    """
    shape, dtype, device = values.shape, values.dtype, values.device
    place = guarded(shape, dtype, device=device, contiguous=contiguous, pad=pad, offset=offset, guard=guard)
    place.tensor.copy_(values)
    return place.tensor


def check_guards(output: Guarded) -> None:
    """Raise GuardError where memory outside of the view changed; names the first place."""
    changed = (bits(output.buffer) != output.pattern) & output.outside()
    if not bool(changed.any()):
        return
    places = changed.nonzero().flatten()
    first = int(places[0])
    start = output.tensor.storage_offset()
    raise GuardError(
        f"{len(places)} elements outside of the output {tuple(output.tensor.shape)} with strides "
        f"{output.tensor.stride()} were written; the first is {first - start} elements from its start, "
        f"value {output.buffer[first].item()}"
    )


def check_written(output: Guarded) -> None:
    """Raise GuardError where an element of the view still holds the poison; names the first place."""
    stale = bits(output.tensor) == output.pattern
    if not bool(stale.any()):
        return
    first = tuple(int(index) for index in stale.nonzero()[0])
    raise GuardError(
        f"{int(stale.sum())} of {stale.numel()} elements of the output were never written; "
        f"the first is at {first}"
    )


def check_output(output: Guarded) -> None:
    """Every element of the view written, and nothing outside of it."""
    check_guards(output)
    check_written(output)
