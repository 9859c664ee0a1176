"""Rows of numbers and addresses that tell compiled code of a launch, a CTA and a warp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clocks import known_of, number_of
from ..ordering import CLUSTER
from ..state import Frame
from ..warpgroup import Accumulators, Warpgroup, address
from . import opcodes as o
from . import touches
from .first_rows import FirstRows
from .registers import Layout, Registers
from .touches import Touches

if TYPE_CHECKING:
    from ..barriers import MBarrier
    from ..program import Step
    from ..shadow import Shadow
    from ..state import Cta, Warp

Array = np.ndarray
_BIT = 1 << np.arange(32, dtype=np.int64)


def bits_of(mask: Array) -> int:
    """A mask of 32 lanes as bits."""
    return _bits_of(mask.tobytes())


@functools.lru_cache(maxsize=4096)
def _bits_of(lanes: bytes) -> int:
    """The bits of a mask, from its bytes."""
    return int(_BIT[np.frombuffer(lanes, bool)].sum())


@functools.lru_cache(maxsize=4096)
def lanes_of(bits: int) -> Array:
    """The mask of these bits, not to be written to."""
    mask = (_BIT & bits) != 0
    mask.setflags(write=False)
    return mask


class LaunchRow:
    """The tables of a launch, and its source of random numbers."""

    def __init__(self, tables: Sequence[Array], random: tuple[int, ...]) -> None:
        self.tables = tables
        places = [x for one in tables for x in (address(one), len(one))]
        self.row = np.array([*places, 0, *random], np.int64)


class CtaRow:
    """Shared memory of a CTA and its shadow."""

    def __init__(self, cta: Cta, first_agent: int) -> None:
        self.row = np.zeros(o.CTA_COLUMNS, np.int64)
        self.numbers = memoryview(self.row)  # type: ignore[arg-type]
        shadow = cta.shadow
        cluster = cta.cluster
        if cluster.rows is None:
            cluster.rows = np.zeros(cta.machine.ranks, np.int64)
        self.address = cluster.rows[cta.rank] = address(self.row)
        self.barriers = np.zeros((32, 2), np.int64)
        self.offsets: dict[int, int] = {}  # of barriers, and their rows there
        self._find_barriers()
        self.row[o.BARRIER_ROOM_AT :] = (
            address(cta.barrier_room.state), address(cluster.rows), first_agent, cta.warp_count, 0,
            address(cta.named_rows), address(cluster.barrier.numbers), address(cta.registers.numbers),
            address(cta.domain.numbers),
        )  # fmt: skip
        self.row[: o.MARKS_AT] = (
            address(cta.smem), len(cta.smem), address(shadow.writer), address(shadow.written_at),
            address(shadow.ordinary), address(shadow.undefined),
        )  # fmt: skip
        shadow.keep_numbers(self.row[o.READERS_COUNT : o.STRONG_THERE + 1])
        shadow.on_growth = self._find
        self._find(shadow)

    def place(self, offset: int, barrier: MBarrier | None) -> None:
        """Tell which mbarrier is at an offset of shared memory, None for none."""
        at = self.offsets.setdefault(offset, len(self.offsets))
        if at == len(self.barriers):
            self.barriers = np.concatenate([self.barriers, np.zeros_like(self.barriers)])
            self._find_barriers()
        self.barriers[at] = offset, 0 if barrier is None else address(barrier.numbers)
        self.numbers[o.BARRIERS] = len(self.offsets)

    def _find_barriers(self) -> None:
        """Tell where the table of mbarriers is."""
        self.numbers[o.BARRIERS_AT] = address(self.barriers)
        self.numbers[o.BARRIERS_ROOM] = len(self.barriers)

    def _find(self, shadow: Shadow) -> None:
        """Tell where arrays are that are replaced as they grow."""
        marks, notes = shadow.readers.marks, shadow.notes
        self.row[o.MARKS_AT : o.READERS_COUNT] = (
            address(marks), len(marks), address(shadow.readers.agents), address(notes), len(notes),
        )  # fmt: skip


class WarpArrays:
    """Arrays of all warps of a CTA, a row each, and the rows of numbers that tell where theirs lie.

    ``first``: registers of warps that begin. ``words``: of shared memory, whose lanes' accesses are noted.
    """

    def __init__(self, cta: Cta, row: CtaRow, layout: Layout, first: FirstRows, words: int) -> None:
        count, machine = cta.warp_count, cta.machine
        self.layout = layout
        self.files = first.of_cta(count)
        self.away = np.zeros((count, len(layout.starts)), np.int32)
        self.clocks = cta.domain.clocks(3 * count).reshape(count, 3, -1)
        self.touches = touches.arrays_of(count, words)
        self.blocks = np.zeros((count, o.MOST_BLOCKS), np.int64)
        self.past = np.empty((count, o.PAST_ROOM, 2), np.int64)
        self.unfenced = np.zeros((count, 32), bool)
        self.numbers = np.zeros((count, o.WARP_COLUMNS), np.int64)
        at = self.numbers.T
        at[[o.FILE_SIZE, o.AWAY_SIZE, o.AGENTS]] = [
            [self.files.shape[1]],
            [len(layout.starts)],
            [self.clocks.shape[-1]],
        ]
        at[[o.TOUCHED_WORDS, o.TOUCHES_ROOM]] = [[x.shape[1]] for x in self.touches[2:]]
        at[[o.CTA, o.RANKS, o.RANK]] = [[address(row.row)], [machine.ranks], [cta.rank]]
        at[[o.CHECKS, o.COUNTS, o.COPIES]] = [[machine.check], [machine.stats is not None], [-1]]
        for column, array in (
            (o.FILE, self.files), (o.AWAY, self.away), (o.VC_AT, self.clocks), (o.BLOCKS_AT, self.blocks),
            (o.PAST_AT, self.past), (o.UNFENCED_AT, self.unfenced), (o.PLACE, self.numbers),
            *zip((o.TOUCHED, o.TOUCHED_READS, o.TOUCHED_WRITES, o.TOUCHED_LIST), self.touches, strict=True),
        ):  # fmt: skip
            at[column] = address(array) + array.strides[0] * np.arange(count)
        at[o.FC_AT] = at[o.VC_AT] + self.clocks.strides[1]
        at[o.REACHED_AT] = at[o.FC_AT] + self.clocks.strides[1]

    def registers(self, number: int) -> Registers:
        """The registers of a warp."""
        return Registers(self.layout, self.files[number], self.away[number])

    def touches_of(self, number: int, steps: list[Step]) -> Touches:
        """The touches of a warp's lanes."""
        return Touches(steps, tuple(array[number] for array in self.touches))


class WarpRow:
    """A warp's clocks, frames, and places of its arrays."""

    def __init__(self, warp: Warp, arrays: WarpArrays) -> None:
        number = warp.number
        self.vc, self.fc, self.reached = arrays.clocks[number]
        self.of_vc: Array | None = None  # the warp's clocks that these are copies of
        self.of_fc: Array | None = None
        self.of_reached: Array | None = None
        self.blocks, self.past, self.row = arrays.blocks[number], arrays.past[number], arrays.numbers[number]
        self.live: Array | None = None
        self.numbers = memoryview(self.row)  # type: ignore[arg-type]
        self.past_entries: Any = memoryview(self.past)  # type: ignore[arg-type]
        self.address = self.numbers[o.PLACE]
        self.numbers[o.AGENT], self.numbers[o.NUMBER] = warp.agent, number % 4
        self.numbers[o.IN_CLUSTER] = warp.in_cluster

    def join(self, group: Warpgroup) -> None:
        """The warp is one of this group."""
        self.numbers[o.GROUP_AT] = address(group.numbers)

    def hold(self, block: Accumulators) -> None:
        """Accumulators that WGMMAs compute."""
        if block.slot < o.MOST_BLOCKS:
            self.blocks[block.slot] = address(block.numbers)
        else:
            self.numbers[o.BLOCKS_HIDDEN] = 1

    def let_go(self, block: Accumulators) -> None:
        """They are complete."""
        if block.slot < o.MOST_BLOCKS:
            self.blocks[block.slot] = 0

    def take_clocks(self, warp: Warp) -> None:
        """Bring the clocks to their rows as they are now."""
        if warp.vc is not self.of_vc:
            self.vc[:] = self.of_vc = warp.vc
        if warp.fc is not self.of_fc:
            self.fc[:] = self.of_fc = warp.fc
        if warp.reached is not self.of_reached:
            self.reached[:] = self.of_reached = warp.reached
            self.numbers[o.REACHED] = 1

    def begin(self, warp: Warp) -> None:
        """Bring clocks and frames to the row as they are now."""
        self.take_clocks(warp)
        if warp.live is not self.live:
            self.live, self.numbers[o.LIVE] = warp.live, bits_of(warp.live)
        numbers, frames = self.numbers, warp.frames
        numbers[o.KNOWN], numbers[o.RELEASED] = number_of(warp.known), warp.released
        numbers[o.GAVE_UP], numbers[o.SUSPENDED], numbers[o.PASSED] = (
            warp.gave_up,
            warp.suspended,
            warp.passed,
        )
        numbers[o.CLUSTER_TARGET] = warp.cluster_target
        numbers[o.FENCES] = warp.orders.fenced[CLUSTER] is not None  # what a relaxed arrival hands over
        numbers[o.BEGAN] = -1 if warp.began is None else warp.began
        numbers[o.DEPTH] = len(frames)
        if len(frames) == 1 and frames[0].full:
            numbers[o.FRAMES + o.FRAME_MASK] = numbers[o.LIVE]
            numbers[o.FRAMES + o.FRAME_PC] = frames[0].pc
            numbers[o.FRAMES + o.FRAME_MEETING] = frames[0].reconverge
            return
        at = o.FRAMES
        for frame in frames:
            numbers[at + o.FRAME_MASK] = numbers[o.LIVE] if frame.full else bits_of(frame.mask)
            numbers[at + o.FRAME_PC], numbers[at + o.FRAME_MEETING] = frame.pc, frame.reconverge
            at += o.FRAME

    def remember(self, step: int, clock: int) -> None:
        """Write a step that began at this clock into the history, as compiled code does."""
        past, used, entries = self.past, self.numbers[o.PAST_USED], self.past_entries
        if used and entries[used - 1, 0] == step:
            return
        entries[used, 0], entries[used, 1] = step, clock
        used += 1
        if used == o.PAST_ROOM:
            past[: used - used // 2] = past[used // 2 :].copy()
            used -= used // 2
        self.numbers[o.PAST_USED] = used

    def past_rows(self) -> list[list[int]]:
        """The steps and clocks of the history."""
        return list(self.past[: self.numbers[o.PAST_USED]].tolist())

    def learned(self, warp: Warp) -> None:
        """After a run that changed the warp's clocks."""
        warp.vc, warp.fc = self.of_vc, self.of_fc = self.vc.copy(), self.fc.copy()
        warp.known = known_of(self.numbers[o.KNOWN], warp.known)
        warp.released = self.numbers[o.RELEASED]

    def frames(self) -> list[Frame]:
        """The warp's frames after a run that changed them."""
        numbers, frames = self.numbers, []
        for at in range(o.FRAMES, o.FRAMES + o.FRAME * numbers[o.DEPTH], o.FRAME):
            mask, pc, meeting = numbers[at : at + o.FRAME]
            frames.append(Frame(lanes_of(mask), pc, meeting, mask == numbers[o.LIVE]))
        return frames
