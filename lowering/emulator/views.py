"""Tensors as kernels get them: which element an address is, and whether it is one at all.

A strided view leaves bytes between its rows out. They lie inside the range that a kernel may touch, but they
are another tensor's, or padding: a write there is an error, a read a warning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray


class View(NamedTuple):
    """A tensor's address, shape and strides in bytes, and the size of its elements."""

    name: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def _order(self) -> list[int]:
        """Dimensions that move in memory, from the largest stride to the smallest."""
        moving = [d for d, s in enumerate(self.strides) if s > 0 and self.shape[d] > 1]
        return sorted(moving, key=lambda d: -self.strides[d])

    def nested(self) -> bool:
        """True if an address belongs to one index at most: no stride is inside of another's extent."""
        inner = self.itemsize
        for d in reversed(self._order()):
            if self.strides[d] < inner:
                return False
            inner = self.strides[d] * self.shape[d]
        return True

    def has_gaps(self) -> bool:
        """True if bytes between the first and the last element belong to no element."""
        inner = self.itemsize
        for d in reversed(self._order()):
            if self.strides[d] != inner:
                return self.nested()
            inner *= self.shape[d]
        return False

    def outside(self, addresses: Array, size: int) -> Array:
        """Mask of the addresses with a byte, of the ``size`` at each, that is in no element."""
        at = (addresses[:, None] + np.arange(0, size, min(self.itemsize, size))) - self.start
        bad = at < 0
        for d in self._order():
            index = at // self.strides[d]
            bad |= index >= self.shape[d]
            at = at - index * self.strides[d]
        return np.asarray((bad | (at >= self.itemsize)).any(axis=1))

    def element(self, address: int) -> tuple[int, ...]:
        """The index of an address; beyond the shape where it lies outside."""
        at, found = address - self.start, [0] * len(self.shape)
        for d in self._order():
            found[d] = at // self.strides[d]
            at -= found[d] * self.strides[d]
        return tuple(found)

    def describe(self, address: int) -> str:
        """``argument 'c' (100, 64): row 100, column 3; row 100 is 1 past the last``."""
        if not self.nested() or not self.shape:
            return ""
        index = self.element(address)
        names = ["row", "column"] if len(index) == 2 else [f"index {d}" for d in range(len(index))]
        texts = [f"{n} {i}" for n, i in zip(names, index)]
        wrong = [
            f"{text} is {i - extent + 1} past the last" if i >= 0 else f"{text} is {-i} before the first"
            for text, i, extent in zip(texts, index, self.shape)
            if not 0 <= i < extent
        ]
        text = f"{self.name} {self.shape}: {', '.join(texts)}"
        return text + (f"; {', '.join(wrong)}" if wrong else "")


def view_of(name: str, tensor: Any) -> View:
    """The view of a torch tensor."""
    size = tensor.element_size()
    return View(name, tensor.data_ptr(), tuple(tensor.shape), tuple(s * size for s in tensor.stride()), size)


def by_extent(tensors: Iterable[tuple[tuple[int, int], View]]) -> dict[tuple[int, int], View]:
    """Views by (address, bytes); none where two tensors share these and differ in shape."""
    found: dict[tuple[int, int], View] = {}
    doubtful = set()
    for extent, view in tensors:
        if found.setdefault(extent, view)[2:] != view[2:]:
            doubtful.add(extent)
    return {extent: view for extent, view in found.items() if extent not in doubtful}
