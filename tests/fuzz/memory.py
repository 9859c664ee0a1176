"""Tensors of a case between poison, and the comparison of every byte around and in them after a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reference.buffers import bits, poison_of

_LINE = 256
_GUARD_BYTES = 512
_COMPARED_ELEMENTS = 1 << 26
"""Elements that are compared at a time: masks of tensors beyond 2^31 elements take gigabytes."""
# As an index or a length these reach outside of every tensor.
_INTEGER_POISON = {torch.bool: 1, torch.int32: 0x5A5A_5A5A, torch.int64: 0x5A5A_5A5A_5A5A_5A5A}


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor's elements.

    order: the modes from the slowest to the fastest. gap: elements of poison after each run of the fastest
    mode. offset: elements by which the start is off a 256-byte boundary. step: the fastest mode's stride.
    expanded: modes of stride 0. negated: the memory holds the negative values, and the view's negative bit is
    set.
    """

    order: tuple[int, ...] = ()
    gap: int = 0
    offset: int = 0
    step: int = 1
    expanded: tuple[int, ...] = ()
    negated: bool = False

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides in elements for a tensor of `shape`."""
        order = self.order or tuple(range(len(shape)))
        strides, step = [0] * len(shape), self.step
        for place, mode in enumerate(reversed(order)):
            if mode in self.expanded:
                continue
            strides[mode] = step
            step = step * max(shape[mode], 1) + (self.gap if place == 0 else 0)
        return tuple(strides)

    def __str__(self) -> str:
        parts = ["".join(map(str, self.order))]
        parts += [f"+{self.gap}"] if self.gap else []
        parts += [f"@{self.offset}"] if self.offset else []
        parts += [f"x{self.step}"] if self.step != 1 else []
        parts += [f"e{''.join(map(str, self.expanded))}"] if self.expanded else []
        return "".join(parts) + ("-" if self.negated else "")


PLAIN = Layout()
"""Contiguous, on a 256-byte boundary."""


class MemoryFault(AssertionError):
    """Memory that a call must not write was written, or an element that it must write was not."""


@dataclass
class _Block:
    """A buffer with the one view that a call knows. `fill` makes an input's contents, by generation; None for
    an output. `written` says which elements of an output the call must write (bool, of the view's shape); the
    others must stay; with `fill`, of a tensor that it may change. `expected`: what `freeze` saw."""

    name: str
    buffer: torch.Tensor
    view: torch.Tensor
    layout: Layout
    fill: Callable[[int], torch.Tensor] | None = None
    written: Callable[[], torch.Tensor] | None = None
    expected: torch.Tensor | None = None

    @property
    def may_change(self) -> bool:
        """A call may write elements of it."""
        return self.fill is None or self.written is not None

    def store(self, generation: int) -> None:
        """Write the contents of `generation` into an input."""
        assert self.fill is not None
        values, view = self.fill(generation).to(self.view.device), self.view
        for mode in self.layout.expanded:
            if view.shape[mode]:
                values, view = values.narrow(mode, 0, 1), view.narrow(mode, 0, 1)
        view.copy_(-values if self.layout.negated else values)


class Arena:
    """The tensors of one case. Every tensor lies in a buffer of its own, poison all around."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._blocks: list[_Block] = []

    def input(self, name: str, fill: Callable[[int], torch.Tensor], layout: Layout = PLAIN) -> torch.Tensor:
        """A tensor that a call only reads.

        fill(generation): its values, for generation 0 and, after the contents changed, for 1; shape and dtype
        stay. Of an expanded mode the values of its first index count.
        """
        values = fill(0)
        buffer, view = self._place(values.shape, values.dtype, layout)
        block = _Block(name, buffer, view, layout, fill)
        self._blocks.append(block)
        block.store(0)
        return torch._neg_view(view) if layout.negated else view

    def output(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: Layout = PLAIN,
        written: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """A tensor full of poison that a call must write: all of it, or the elements of `written()`."""
        buffer, view = self._place(shape, dtype, layout)
        self._blocks.append(_Block(name, buffer, view, layout, None, written))
        return view

    def changed(
        self,
        name: str,
        fill: Callable[[int], torch.Tensor],
        written: Callable[[], torch.Tensor],
        layout: Layout = PLAIN,
    ) -> torch.Tensor:
        """A tensor that a call reads, and of which it may write the elements of `written()` alone."""
        view = self.input(name, fill, layout)
        self._blocks[-1].written = written
        return view

    def freeze(self) -> None:
        """Remember every byte, for `check`."""
        for block in self._blocks:
            block.expected = block.buffer.clone()

    def poison_outputs(self) -> None:
        """Fill all outputs with poison again, before the call is repeated, and what it changed as it was."""
        for block in self._blocks:
            if block.may_change:
                assert block.expected is not None
                block.buffer.copy_(block.expected)

    def refill(self, generation: int) -> None:
        """Change the contents of all inputs in place, and remember every byte again."""
        for block in self._blocks:
            if block.fill is not None:
                block.store(generation)
        self.freeze()

    def check_untouched(self) -> None:
        """Raise MemoryFault where any byte differs from what `freeze` saw: after a refused call."""
        for block in self._blocks:
            self._compare(block, torch.zeros_like(bits(block.buffer), dtype=torch.bool))

    def check(self) -> None:
        """Raise MemoryFault where a call wrote what is not its own, or left elements of outputs unwritten."""
        for block in self._blocks:
            mine = torch.zeros_like(bits(block.buffer), dtype=torch.bool)
            if block.may_change and block.view.numel():
                of_view = mine.as_strided(block.view.shape, block.view.stride(), block.view.storage_offset())
                of_view.copy_(True if block.written is None else block.written().to(self.device))
                if block.fill is None:
                    self._check_written(block, of_view)
            self._compare(block, mine)

    def _check_written(self, block: _Block, must: torch.Tensor) -> None:
        stale = (bits(block.view) == _poison(block.view.dtype)) & must
        if bool(stale.any()):
            first = tuple(int(i) for i in stale.nonzero()[0])
            raise MemoryFault(
                f"{int(stale.sum())} of {int(must.sum())} elements of {block.name} were not written; "
                f"the first is at {first}"
            )

    def _compare(self, block: _Block, mine: torch.Tensor) -> None:
        assert block.expected is not None
        tensors = bits(block.buffer), bits(block.expected), mine
        triples = zip(*(x.split(_COMPARED_ELEMENTS) for x in tensors))
        found = (((x != y) & ~own).nonzero().flatten() for x, y, own in triples)
        places = torch.cat([x + n * _COMPARED_ELEMENTS for n, x in enumerate(found)])
        if not len(places):
            return
        first = int(places[0]) - int(block.view.storage_offset())
        kind = "an input" if block.fill is not None else "an output"
        raise MemoryFault(
            f"{len(places)} elements of or around {block.name}, {kind} of shape {tuple(block.view.shape)} "
            f"and strides {block.view.stride()}, were written; the first is {first} elements from its start"
        )

    def _place(
        self, shape: Sequence[int], dtype: torch.dtype, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(buffer, view), all poison."""
        size = torch.empty((), dtype=dtype).element_size()
        line = _LINE // size
        strides = layout.strides(shape)
        before = -(-_GUARD_BYTES // size // line) * line + layout.offset
        reach = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))
        buffer = torch.empty(before + reach + _GUARD_BYTES // size, dtype=dtype, device=self.device)
        bits(buffer).fill_(_poison(dtype))
        return buffer, buffer.as_strided(tuple(shape), strides, before)


def _poison(dtype: torch.dtype) -> int:
    return _INTEGER_POISON[dtype] if dtype in _INTEGER_POISON else poison_of(dtype)


def fill_with_poison(tensor: torch.Tensor) -> None:
    """Fill a dense tensor with its dtype's poison."""
    if tensor.numel() and not tensor.is_complex():
        bits(tensor).fill_(_poison(tensor.dtype))


def same_bits(x: Any, y: Any) -> bool:
    """True if two tensors hold the same bits: NaNs compare by theirs."""
    x, y = x.contiguous(), y.contiguous()
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))
