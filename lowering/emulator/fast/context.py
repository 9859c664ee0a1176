"""What compiled code knows of a launch, a CTA and a warp: rows of numbers, and of addresses of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..state import Frame
from . import opcodes as o
from .registers import Registers
from .touches import Touches

if TYPE_CHECKING:
    from ..shadow import Shadow
    from ..state import Cta, Warp

Array = np.ndarray
_BIT = 1 << np.arange(32, dtype=np.int64)


def address(array: Array) -> int:
    """Where the first element lies; the array must be kept."""
    return array.__array_interface__["data"][0]


def bits_of(mask: Array) -> int:
    """A mask of 32 lanes as bits."""
    return int(_BIT[mask].sum())


def lanes_of(bits: int) -> Array:
    """The mask of these bits."""
    return (_BIT & bits) != 0


class LaunchRow:
    """The tables of a launch."""

    def __init__(self, tables: Sequence[Array]) -> None:
        self.tables = tables
        self.row = np.array([x for one in tables for x in (address(one), len(one))], np.int64)


class CtaRow:
    """Shared memory of a CTA and its shadow."""

    def __init__(self, cta: Cta) -> None:
        self.row = np.zeros(o.CTA_COLUMNS, np.int64)
        self.numbers = memoryview(self.row)  # type: ignore[arg-type]
        self.shadow = shadow = cta.shadow
        self.notes: Array | None = None
        self.marks: Array | None = None
        self.row[: o.MARKS_AT] = (
            address(cta.smem), len(cta.smem), address(shadow.writer), address(shadow.written_at),
            address(shadow.ordinary), address(shadow.undefined),
        )  # fmt: skip

    def begin(self, left: int) -> None:
        """Before a run of at most so many steps."""
        shadow, numbers = self.shadow, self.numbers
        if shadow.used + left > len(shadow.notes):
            shadow.make_room()
        if shadow.notes is not self.notes or shadow.readers.marks is not self.marks:
            self._find(shadow)
        numbers[o.READERS_COUNT] = shadow.readers.count
        numbers[o.NOTES_COUNT] = shadow.used
        numbers[o.STRONG_THERE] = shadow.strong is not None

    def _find(self, shadow: Shadow) -> None:
        """Arrays that are replaced as they grow."""
        self.notes, self.marks = shadow.notes, shadow.readers.marks
        self.row[o.MARKS_AT : o.READERS_COUNT] = (
            address(self.marks), len(self.marks), address(shadow.readers.agents), address(self.notes),
            len(self.notes),
        )  # fmt: skip


class WarpRow:
    """A warp's registers, clocks, frames, and what its lanes touched."""

    def __init__(self, warp: Warp, cta: CtaRow, registers: Registers, touches: Touches) -> None:
        machine, vc = warp.machine, warp.cta.domain.clock()
        self.cta, self.registers, self.vc = cta, registers, vc
        self.known: Array | None = None  # the clocks that `vc` is a copy of
        self.live: Array | None = None
        self.row = np.zeros(o.WARP_COLUMNS, np.int64)
        self.numbers = memoryview(self.row)  # type: ignore[arg-type]
        file, away = registers.file[0], registers.file[4]
        self.row[: o.LEFT] = (
            address(cta.row), address(file), len(file), address(away), len(away), address(vc), len(vc),
            *map(address, touches.arrays), len(touches.arrays[1]), len(touches.arrays[3]), 0,
            int(np.prod(machine.launch.cluster)), warp.cta.rank, warp.agent, machine.check,
            machine.stats is not None,
        )  # fmt: skip

    def begin(self, warp: Warp) -> None:
        """Before a run: clocks and frames as they are now."""
        if warp.vc is not self.known:
            self.vc[:] = self.known = warp.vc
        if warp.live is not self.live:
            self.live, self.numbers[o.LIVE] = warp.live, bits_of(warp.live)
        numbers, frames = self.numbers, warp.frames
        numbers[o.DEPTH] = len(frames)
        at = o.FRAMES
        for frame in frames:
            numbers[at + o.FRAME_MASK] = numbers[o.LIVE] if frame.full else bits_of(frame.mask)
            numbers[at + o.FRAME_PC], numbers[at + o.FRAME_MEETING] = frame.pc, frame.reconverge
            at += o.FRAME

    def frames(self) -> list[Frame]:
        """The warp's frames after a run that changed them."""
        held = self.numbers[: o.FRAMES + o.FRAME * self.numbers[o.DEPTH]].tolist()
        return [
            Frame(lanes_of(mask), at, meeting, mask == held[o.LIVE])
            for mask, at, meeting in zip(
                *(held[o.FRAMES + i :: o.FRAME] for i in range(o.FRAME)), strict=True
            )
        ]
