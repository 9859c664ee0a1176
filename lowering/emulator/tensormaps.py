"""Handlers that change tensor maps on the device: ``tensormap.replace`` and ``tensormap.cp_fenceproxy``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import access
from .machine import Machine
from .memory import Fault
from .ptx import Imm, Instruction
from .state import OFFSET_MASK, Warp
from .translate import WINDOWS

Array = np.ndarray
_FULL = (1 << 64) - 1


def _put(words: list[int], bit: int, width: int, value: int) -> None:
    """Set ``width`` bits of the descriptor from ``bit`` on (bit 64 is the first of word 1)."""
    whole = sum(w << 64 * i for i, w in enumerate(words))
    mask = ((1 << width) - 1) << bit
    whole = (whole & ~mask) | (value << bit & mask)
    words[:] = [whole >> 64 * i & _FULL for i in range(len(words))]


def edit(words: list[int], name: str, index: int, value: int) -> None:
    """Set a field of a descriptor given as 16 words of 64 bits; layout as in `semantics.tma`.

    :param name: field of ``tensormap.replace``; strides are in bytes, ``rank`` is one less than the rank.
    :raises KeyError: for a field that is not modelled.
    """
    if name == "global_address":
        words[0] = value
    elif name == "rank":
        _put(words, 64 + 4, 3, value)
    elif name == "global_dim":
        _put(words, 256 + 32 * index, 32, value - 1)
    elif name == "global_stride":
        _put(words, 96 + 32 * index, 32, value >> 4 & 0xFFFFFFFF)
        _put(words, 192 + 32 + 4 * index, 4, value >> 36)
    elif name == "box_dim":
        _put(words, 384 + 56 + 8 * index, 8, value - 1)
    elif name == "element_stride":
        _put(words, 384 + 32 + 3 * index, 3, value - 1)
    else:
        raise KeyError(name)


def _load(m: Machine, w: Warp, ins: Instruction, shared: bool, address: int) -> Array:
    if shared:
        offset = address & OFFSET_MASK
        for cta, _, _ in access.shared_target(m, w, ins, np.array([address]), 1, np.ones(32, bool)):
            return cta.smem[offset : offset + 128].copy()
        return np.zeros(128, np.uint8)
    try:
        return m.memory.load(np.array([address]), 128)[0][0]
    except Fault as fault:
        access.report_fault(m, w, ins, fault, 128, "read of a tensor map")
        return np.zeros(128, np.uint8)


def _store(
    m: Machine, w: Warp, ins: Instruction, shared: bool, address: int, data: Array, lanes: Array
) -> None:
    if shared:
        chunks = address + 16 * np.arange(8)
        access.store_shared(m, w, ins, chunks, data.reshape(8, 16), lanes)
    else:
        access.store_global(m, w, ins, address + 16 * np.arange(8), data.reshape(8, 16))


def replace(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``tensormap.replace.tile.FIELD`` in shared or global memory."""
    field = ins.parts[3]
    ordinal, value = (
        (ins.operands[1], ins.operands[2]) if len(ins.operands) == 3 else (Imm(0), ins.operands[1])
    )
    values = w.value(value, ins.parts[-1])
    for lane in np.flatnonzero(mask):
        address, shared = _place(w, ins, 0, int(lane))
        data = _load(m, w, ins, shared, address)
        words = [int(x) for x in data.view(np.uint64)]
        try:
            edit(words, field, int(getattr(ordinal, "value", 0)), int(values[lane]))
        except KeyError:
            raise access.stop(ins, f"replacing {field} of a tensor map is not modelled") from None
        one = np.zeros(32, bool)
        one[lane] = True
        _store(m, w, ins, shared, address, np.array(words, np.uint64).view(np.uint8), one)


def _place(w: Warp, ins: Instruction, operand: int, lane: int) -> tuple[int, bool]:
    address = int(w.address(ins.operands[operand])[lane])
    generic = address >> 60 == WINDOWS["shared"] >> 60
    named = ins.has("shared::cta") and not ins.has("global")
    return address & ((1 << 60) - 1), generic or named


def copy(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``tensormap.cp_fenceproxy``: 128 bytes from shared to global memory, once for the warp."""
    lane = int(np.argmax(mask))
    target = int(w.address(ins.operands[0])[lane]) & ((1 << 60) - 1)
    source = int(w.address(ins.operands[1])[lane]) & ((1 << 60) - 1)
    rows = access.load_shared(m, w, ins, source + 16 * np.arange(8), 16, mask)
    access.store_global(m, w, ins, target + 16 * np.arange(8), rows)


HANDLERS: dict[str, Callable] = {"tensormap.replace": replace, "tensormap.cp_fenceproxy": copy}
