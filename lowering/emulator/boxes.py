"""Boxes of TMA copies: their bytes of shared memory, and those of the tensor."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .machine import Machine
from .ptx import Instruction
from .reports import Kind
from .semantics import tma
from .shadow import Index, Pieces, byte_index, pieces_of
from .spans import Spans, of_elements
from .state import SHARED_BASE, Warp


@dataclass(frozen=True)
class Box:
    """A box of a tensor copy: its bytes of shared memory, those of the tensor that exist, what it counts."""

    tensor: tma.TensorMap
    index: Index
    spans: Spans | None
    transaction_bytes: int
    whole: tma.WholeBox | None = None  # of memory that anything may be done to
    elements: tma.BoxMap | None = None  # otherwise

    @functools.cached_property
    def pieces(self) -> tuple[np.ndarray, int]:
        """The bytes of shared memory as pieces."""
        return pieces_of(self.index)


def box_at(
    m: Machine, w: Warp, ins: Instruction, tensor: tma.TensorMap, coords: list[int], offset: int,
    store: bool = False,
) -> Box | None:  # fmt: skip
    """The box at these coordinates and this offset in shared memory; None, and a report, for a bad one."""
    box, end = _whole(tensor, tuple(coords), offset)
    if box is not None and box.spans is not None and offset >= SHARED_BASE and end <= m.shared_bytes:
        if m.memory.plain(box.spans.low, box.spans.high) is not None:
            return box
    elements = _box(m, w, ins, tensor, coords, offset, store)
    if elements is None:
        return None
    valid, size = elements.valid, elements.element_bytes
    spans: Spans | None = of_elements(elements.global_address[valid], size) if valid.any() else None
    reached = elements.shared_address[valid] if store else elements.shared_address
    index = byte_index(reached, size) if len(reached) else slice(0, 0)
    return Box(tensor, index, spans, elements.transaction_bytes, elements=elements)


@functools.lru_cache(maxsize=4096)
def _whole(tensor: tma.TensorMap, coords: tuple[int, ...], offset: int) -> tuple[Box | None, int]:
    """A box within its tensor, and the end of its shared memory; None for others."""
    whole = tma.whole_box(tensor, coords, offset)
    if whole is None:
        return None, 0
    low, high = _reach(tensor)
    base = int(whole.rows[0]) - int(tma.rows_of(tensor)[0][0])
    rows = Spans(whole.rows, whole.row_bytes, base + low, base + high)
    index, end = _index_of(tensor, offset)
    return Box(tensor, index, rows, tensor.transaction_bytes, whole=whole), end


@functools.lru_cache(maxsize=256)
def _reach(tensor: tma.TensorMap) -> tuple[int, int]:
    """The first byte of a whole box in global memory and the one after its last, from its origin."""
    rows, row_bytes = tma.rows_of(tensor)
    return int(rows.min()), int(rows.max()) + row_bytes


@functools.lru_cache(maxsize=512)
def _index_of(tensor: tma.TensorMap, offset: int) -> tuple[Index, int]:
    """The bytes of shared memory of a whole box, a run where they are one, and their end."""
    chunks = tma.chunks_of(tensor, offset)
    low, high = int(chunks.min()), int(chunks.max()) + 1
    if len(np.unique(chunks)) == high - low:
        return slice(low * tma.CHUNK, high * tma.CHUNK), high * tma.CHUNK
    return Pieces(chunks * tma.CHUNK, tma.CHUNK), high * tma.CHUNK


def _box(
    m: Machine, w: Warp, ins: Instruction, tensor: tma.TensorMap, coords: list[int], offset: int,
    store: bool = False,
) -> tma.BoxMap | None:  # fmt: skip
    try:
        box = tma.box_map(tensor, coords, offset, store=store)
    except tma.TensorMapError as error:
        m.report(Kind.DESCRIPTOR, str(error), w, ins, address=offset)
        return None
    low, high = int(box.shared_address.min()), int(box.shared_address.max()) + box.element_bytes
    if low < SHARED_BASE or high > m.shared_bytes:
        m.report(
            Kind.OUT_OF_BOUNDS,
            f"a box of shared bytes {low:#x} to {high:#x}; this launch has {SHARED_BASE:#x} to "
            f"{m.shared_bytes:#x}",
            w,
            ins,
            address=low,
        )
        return None
    return box
