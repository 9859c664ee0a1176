"""Memory of an emulated launch: the registered ranges of global memory and the windows of other spaces.

Global addresses are addresses of this process. Only the memory of registered tensors can be touched; an
access anywhere else is a finding that names the nearest tensor, never a crash.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import fast
from .views import View

Array = np.ndarray


@dataclass
class Region:
    """Bytes [start, end) of global memory. ``unwritten`` marks bytes that must not be read before a write."""

    start: int
    end: int
    name: str
    data: Array
    unwritten: Array | None = None
    views: tuple[View, ...] = ()  # the tensors that it holds
    gaps: bool = False  # some of its bytes are no element of them


class Fault(Exception):
    """An access outside every region: the first bad ``address`` and what is near it."""

    def __init__(self, address: int, text: str, lanes: Array):
        super().__init__(text)
        self.address, self.lanes = address, lanes


def extent(tensor: Any) -> tuple[int, int]:
    """First address of a strided tensor, and the bytes from it to the end of its last element."""
    if 0 in tensor.shape:
        return tensor.data_ptr(), 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


class GlobalMemory:
    """The registered ranges. Ranges that overlap (views of one storage) are merged."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.starts: list[int] = []
        self.gaps = False  # in any region

    def register(
        self, start: int, size: int, name: str, unwritten: bool = False, view: View | None = None
    ) -> None:
        """Allow accesses to ``size`` bytes at ``start``; ``view``: to the elements of this tensor."""
        if size == 0:
            return
        end = start + size
        overlapping = [r for r in self.regions if r.start < end and start < r.end]
        for region in overlapping:
            self.regions.remove(region)
        names = dict.fromkeys([r.name for r in overlapping] + [name])
        low, high = min([start] + [r.start for r in overlapping]), max([end] + [r.end for r in overlapping])
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
        region = Region(low, high, " / ".join(names), data)
        region.views = tuple(v for r in overlapping for v in r.views) + ((view,) if view is not None else ())
        whole = view is None or any(not r.views for r in overlapping)
        region.gaps = not whole and all(v.has_gaps() for v in region.views)
        self.gaps = self.gaps or region.gaps
        marks = [(r.start, r.unwritten) for r in overlapping if r.unwritten is not None]
        if unwritten:
            marks.append((start, np.ones(size, bool)))
        if marks:
            region.unwritten = np.zeros(high - low, bool)
            for at, mark in marks:
                region.unwritten[at - low : at - low + len(mark)] |= mark
        self.regions.append(region)
        self.regions.sort(key=lambda r: r.start)
        self.starts = [r.start for r in self.regions]

    def find(self, address: int) -> Region | None:
        """The region that holds ``address``."""
        i = bisect.bisect_right(self.starts, address) - 1
        return self.regions[i] if i >= 0 and address < self.regions[i].end else None

    def plain(self, low: int, high: int) -> Region | None:
        """The region that holds bytes [low, high), if all of it may be read and written; None otherwise."""
        region = None if self.gaps else self.find(low)
        return region if region is not None and high <= region.end and region.unwritten is None else None

    def between(self, addresses: Array, size: int) -> Fault | None:
        """The first access to bytes inside of a region that are no element of its tensors."""
        for region in self.regions:
            inside = (addresses >= region.start) & (addresses + size <= region.end)
            if not region.gaps or not inside.any():
                continue
            bad = inside & np.logical_and.reduce([view.outside(addresses, size) for view in region.views])
            if bad.any():
                first = int(addresses[bad][0])
                view = region.views[0]
                return Fault(first, f"between the rows of {view.describe(first) or region.name}", bad)
        return None

    def nearest(self, address: int) -> str:
        """Words that place an address outside every region."""
        if not self.regions:
            return "no tensor is registered"
        region = min(self.regions, key=lambda r: max(r.start - address, address - r.end + 1))
        if address >= region.end:
            where = f"{address - region.end} bytes past the end of"
        else:
            where = f"{region.start - address} bytes before"
        texts = [text for view in region.views[:1] if (text := view.describe(address))]
        return f"{where} {region.name} ({region.end - region.start} bytes)" + "".join(f", {t}" for t in texts)

    def _split(self, addresses: Array, size: int) -> list[tuple[Region, Array | slice]]:
        """Groups of positions in ``addresses`` by region. Raises :class:`Fault` for any outside."""
        low, high = int(addresses.min()), int(addresses.max())
        region = self.find(low)
        if region is not None and high + size <= region.end:
            return [(region, slice(None))]
        out: list[tuple[Region, Array | slice]] = []
        bad = np.ones(len(addresses), bool)
        for region in self.regions:
            inside = (addresses >= region.start) & (addresses + size <= region.end)
            if inside.any():
                out.append((region, inside))
                bad &= ~inside
        if bad.any():
            first = int(addresses[bad][0])
            raise Fault(first, self.nearest(first), bad)
        return out

    def load(self, addresses: Array, size: int) -> tuple[Array, bool]:
        """``size`` bytes at each of int64 ``addresses`` as uint8 (n, size), and whether any was unwritten."""
        compiled, parts = fast.kernels(), self._split(addresses, size)
        if compiled is not None and len(parts) == 1 and parts[0][0].unwritten is None:
            region = parts[0][0]
            return compiled.rows(region.data, addresses - region.start, size), False
        out = np.empty((len(addresses), size), np.uint8)
        unwritten = False
        for region, where in parts:
            if compiled is not None and region.unwritten is None:
                out[where] = compiled.rows(region.data, addresses[where] - region.start, size)
                continue
            index = (addresses[where] - region.start)[:, None] + np.arange(size)
            out[where] = region.data[index]
            if region.unwritten is not None:
                unwritten |= bool(region.unwritten[index].any())
        return out, unwritten

    def differs(self, addresses: Array, data: Array) -> Array:
        """For each row of uint8 (n, size) ``data``, whether it is not what the memory there holds already."""
        try:
            return (self.load(addresses, data.shape[1])[0] != data).any(axis=1)
        except Fault:
            return np.ones(len(data), bool)

    def store(self, addresses: Array, data: Array) -> None:
        """Write uint8 (n, size) ``data``; where lanes hit the same byte the last lane wins."""
        compiled = fast.kernels()
        for region, where in self._split(addresses, data.shape[1]):
            if compiled is not None and region.unwritten is None:
                compiled.put_rows(region.data, addresses[where] - region.start, data[where])
                continue
            index = (addresses[where] - region.start)[:, None] + np.arange(data.shape[1])
            region.data[index] = data[where]
            if region.unwritten is not None:
                region.unwritten[index] = False
