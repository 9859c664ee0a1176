"""State of the emulated machine: launches, warps with their registers and frames, CTAs, clusters."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from . import suspects, taint
from .barrier_room import BarrierRoom
from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .clocks import NOTHING, Collected, Handover, Known, fenced, join_known
from .fast import opcodes as o
from .global_shadow import Access
from .history import BLOCK as BLOCK
from .history import Past
from .lanes import LaneLog
from .ordering import Orders
from .peers import Use
from .program import EXIT
from .ptx import Address, Imm, Instruction, Reg, Special, Symbol
from .register_file import RegisterFile
from .reports import Kind
from .shadow import AgentKind, Domain, Shadow
from .translate import CLASS_DTYPE, DTYPE, LANES
from .warpgroup import Accumulators, Warpgroup, address

if TYPE_CHECKING:
    from collections.abc import Callable

    from .machine import Machine

Array = np.ndarray
SHARED_BASE = 1024  # the driver keeps the first KiB of shared memory for itself, so address 0 is never valid
RANK_SHIFT = 24  # shared::cluster addresses: the CTA's rank above bit 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
_DTYPE = {name: np.dtype(dtype) for name, dtype in DTYPE.items()}
_CLASS_DTYPE = {name: np.dtype(dtype) for name, dtype in CLASS_DTYPE.items()}


@dataclass
class Launch:
    """A kernel launch: ``grid``, ``block``, ``cluster`` in CTAs or threads, ``smem`` dynamic bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem: int = 0
    params: bytes = b""
    attributes: dict[str, Any] = field(default_factory=dict)


class Frame:
    """Lanes that run together: their mask, the next step, and the step where they meet others."""

    __slots__ = ("full", "mask", "pc", "reconverge")

    def __init__(self, mask: Array, pc: int, reconverge: int, full: bool):
        self.mask, self.pc, self.reconverge, self.full = mask, pc, reconverge, full


class Warp:
    """32 lanes: registers, frames of divergent control flow, clocks, and asynchronous groups."""

    def __init__(self, cta: Cta, number: int, threads: int, clocks: Array):
        self.cta, self.number = cta, number
        self.name = f"CTA {cta.index} warp {number}"  # for reports and the timeline
        self.machine = cta.machine
        self.live = np.arange(LANES) < threads
        kernel = cta.machine.kernel
        self.S = _special_registers(self)
        runner = cta.machine.runner
        self.R: Any = _zeros(kernel.reg_classes) if runner is None else None
        self.lane_touches: Any = None  # of the runner, as is the row
        self.row: Any = None
        self.frames = [Frame(self.live.copy(), 0, EXIT, True)]
        domain = cta.domain
        self.agent: int = domain.agent(AgentKind.WARP, f"warp {number} of CTA {cta.index}")
        self.vc, self.fc = clocks
        self.vc[self.agent] = 1
        self.reached: Array | None = None  # where others had come to at a cluster barrier, see peers.py
        self.known: Known = NOTHING  # of other clusters
        self.seen: Known = NOTHING  # the same, by relaxed accesses: see ordering.py
        self.orders = Orders()
        self.lanes: dict[str, LaneLog] = defaultdict(LaneLog)  # of shared and of global memory
        self._exported: tuple[Array, Array, Known, Known] | None = None
        self._accesses: dict[int, Access] = {}
        self.unfenced = np.zeros(LANES, bool)
        self.waiting = ""
        self.waiting_since = 0
        self.timed_out = -1
        self.group: Warpgroup | None = None
        self.accumulating: dict[int, Accumulators] = {}  # what its pending WGMMAs compute, by slots
        self.pending: dict[int, int] = {}  # the place in these, by the identity of a register's value
        self.pending_a: dict[int, int] = {}
        self.dirty: set[int] = set()  # registers of WGMMA that were written since its last fence
        self.read: set[int] = set()  # accumulators that were read since
        self.did: set[str] = set()  # what tells its role, see roles.py
        self._past: list[Past] = []  # see history.py
        self.began: int | None = None  # clock at which the instruction that it waits in began
        self.taint = taint.at_entry(self)  # registers that hold undefined values
        self.wgmma_fenced = False
        self.cluster_target = -1  # the phase of the cluster barrier that it has arrived for
        self.passed = False  # the named barrier that it waited at
        self.suspended = self.gave_up = False  # by mbarrier.try_wait, and what the next one does
        self.released = -1  # the step of its last arrival on a barrier
        self.in_cluster = cta.rank * cta.warp_count + number
        self.state: dict[str, Any] = {}  # of the handlers: groups of cp.async and of bulk stores, waits
        self.local = np.zeros((LANES, cta.machine.local_bytes), np.uint8) if cta.machine.local_bytes else None
        if runner is not None:
            runner.begin(self)

    @property
    def past(self) -> list[Past]:
        """Its synchronising so far, latest last."""
        if self.row is None:
            return self._past
        steps = self.machine.program.steps
        return [Past(steps[number].first, clock) for number, clock in self.row.past_rows()]

    @property
    def clock(self) -> int:
        """The warp's own clock."""
        return int(self.vc[self.agent])

    def release(self) -> Handover:
        """Clocks to hand over; what the warp does next is not covered by them."""
        handed = Handover(self.vc, self.fc, self.known)
        self.tick()
        return handed

    def acquire(self, clocks: Handover | Collected) -> None:
        """Take over the clocks of a barrier."""
        self.converge()
        if self.row is not None:
            self.machine.runner.stale.add(self)
        self.vc, self.fc = np.maximum(self.vc, clocks.vc), np.maximum(self.fc, clocks.fc)
        if clocks.known is not self.known:
            self.known = join_known(self.known, clocks.known)

    def converge(self) -> None:
        """The lanes came together: what each did before is ordered before what the others do next."""
        for log in self.lanes.values():
            if log.reads.touches or log.writes.touches:
                log.clear()
        if self.lane_touches is not None:
            self.lane_touches.clear()

    def tick(self) -> None:
        """Start a new interval: the clocks handed over so far do not cover what the warp does next."""
        self.vc = self.vc.copy()
        self.vc[self.agent] += 1

    def exported(self) -> Known:
        """All that the warp knows, in the form for other clusters."""
        last = self._exported
        if last is None or last[0] is not self.vc or last[1] is not self.fc or last[2] is not self.known:
            number = self.cta.domain.number
            known = {**self.known, number: self.vc, fenced(number): self.fc}
            last = self._exported = (self.vc, self.fc, self.known, known)
        return last[3]

    def acquire_known(self, known: Known) -> None:
        """Take over what came through memory."""
        number = self.cta.domain.number
        own = known.get(number)
        if own is not None and own is not self.vc:
            self.vc, self.fc = np.maximum(self.vc, own), np.maximum(self.fc, known[fenced(number)])
        self.known = join_known(self.known, known)

    def access(self, ins: Instruction, strong: bool) -> Access:
        """An access of this warp to global memory, now."""
        last = self._accesses.get(ins.line)
        if last is None or last.clock != self.vc[self.agent]:
            last = Access(self.cta.domain, self.agent, self.clock, strong, ins)
            self._accesses[ins.line] = last
        return last

    def learn(self, agent: int, clock: int) -> None:
        """Everything that ``agent`` did up to ``clock`` is complete for this warp."""
        if self.vc[agent] < clock:
            self.vc = self.vc.copy()
            self.vc[agent] = clock

    def value(self, operand: object, dtype: str) -> Array:
        """Value of an operand as 32 lanes of PTX type ``dtype``."""
        np_type = DTYPE[dtype]
        if isinstance(operand, Reg):
            array = self.R[operand.index]
            if operand.cls == "pred":
                return ~array if operand.negated else array
            wanted = _DTYPE[dtype]
            if array.dtype is wanted:
                return array
            return array.view(wanted) if array.itemsize == wanted.itemsize else array.astype(wanted)
        if isinstance(operand, Imm):
            return _immediate(operand.value, dtype)
        if isinstance(operand, Special):
            return self.S[operand.name].astype(np_type)
        if isinstance(operand, Symbol):
            return np.full(LANES, self.cta.machine.symbol_value(operand), np_type) + self.symbol_rank(
                operand, np_type
            )
        raise TypeError(f"operand {operand!r} has no value")

    def lane_value(self, operand: object, lane: int, dtype: str) -> int:
        """One lane's value of an operand."""
        if isinstance(operand, Reg) and operand.cls == dtype:
            return int(self.R[operand.index][lane])
        if isinstance(operand, Reg) and operand.cls == "b32" and dtype == "s32":
            value = int(self.R[operand.index][lane])
            return value - (value >> 31 << 32)
        return int(self.value(operand, dtype)[lane])

    def lane_address(self, operand: Address, lane: int) -> int:
        """One lane's address."""
        base = self.lane_value(operand.base, lane, "b64" if _is_wide(operand.base) else "b32")
        return base - (base >> 63 << 64) + operand.offset

    def symbol_rank(self, symbol: Symbol, np_type: type) -> Any:
        """Shared variables lie in this CTA's part of the cluster window."""
        variable = self.machine.kernel.variables.get(symbol.name)
        shared = variable is not None and variable.space == "shared"
        return np_type(self.cta.rank << RANK_SHIFT) if shared else np_type(0)

    def address(self, operand: Address) -> Array:
        """int64 address of ``[base + offset]`` in its state space."""
        base = self.value(operand.base, "b64" if _is_wide(operand.base) else "b32").astype(np.int64)
        return base + operand.offset if operand.offset else base

    def set(self, target: object, value: Array, mask: Array) -> None:
        """Assign to the lanes of ``mask``; the value has, or is widened to, the register's width."""
        if not isinstance(target, Reg):
            return
        dtype = _CLASS_DTYPE[target.cls]
        if value.dtype is not dtype and value.dtype != dtype:
            value = value.view(dtype) if value.itemsize == dtype.itemsize else value.astype(dtype)
        if mask is not self.live and not (mask == self.live).all():
            value = np.where(mask, value, self.R[target.index])
        self.R[target.index] = value

    def touched(self, position: int, register: int, write: bool) -> None:
        """A register of a pending WGMMA was used; called by checked steps."""
        step = self.machine.program.steps[self.frames[-1].pc]
        ins = step.instructions[min(position, len(step.instructions) - 1)]
        what = "operand A is overwritten" if write else "the accumulator is read"
        look_at = suspects.registers(self.machine, self, ins, register)
        self.machine.report(
            Kind.PENDING_REGISTER, f"{what} before wgmma.wait_group", self, ins, look_at=look_at
        )

    def exit_lanes(self, mask: Array) -> None:
        """End the lanes of ``mask``."""
        self.live = self.live & ~mask
        for frame in self.frames:
            frame.mask = frame.mask & ~mask
        self.frames = [f for f in self.frames if f.mask.any()]
        if self.frames:
            self.frames[-1].full = bool((self.frames[-1].mask == self.live).all())


@lru_cache(maxsize=4096)
def _immediate(value: int, dtype: str) -> Array:
    """An immediate in every lane; not to be written to."""
    width = 8 * _DTYPE[dtype].itemsize
    out = np.full(LANES, value & ((1 << width) - 1), f"u{width // 8}").view(_DTYPE[dtype])
    out.setflags(write=False)
    return out


def _zeros(classes: list[str]) -> list[Array]:
    """Registers of these classes before anything is written to them."""
    zero: dict[str, Array] = {cls: np.zeros(LANES, dtype) for cls, dtype in CLASS_DTYPE.items()}
    zero["b128"] = np.zeros((LANES, 2), np.uint64)
    return [zero[cls] for cls in classes]


def _is_wide(base: object) -> bool:
    return (isinstance(base, Reg) and base.cls == "b64") or isinstance(base, (Imm, Symbol))


class _Specials(dict):
    """Special registers by name, each spread over the lanes when it is first read."""

    def __init__(self, values: dict[str, Any]):
        super().__init__()
        self.values_of = values

    def __contains__(self, name: object) -> bool:
        return name in self.values_of

    def __missing__(self, name: str) -> Array:
        value = np.asarray(self.values_of[name], np.int64).astype(np.uint32)
        found = self[name] = np.broadcast_to(value, LANES)
        return found


_LANE = np.arange(LANES, dtype=np.uint32)
_ONE = np.uint32(1)
_OF_LANES = {
    "%laneid": _LANE, "%lanemask_eq": _ONE << _LANE, "%lanemask_lt": (_ONE << _LANE) - _ONE,
    "%lanemask_le": (_ONE << _LANE) | ((_ONE << _LANE) - _ONE), "%lanemask_ge": ~((_ONE << _LANE) - _ONE),
    "%lanemask_gt": ~((_ONE << _LANE) | ((_ONE << _LANE) - _ONE)),
}  # fmt: skip
"""Special registers that are the same in all warps."""


@lru_cache(maxsize=256)
def _threads(block: tuple[int, int, int], number: int) -> tuple[Array, Array, Array]:
    """Coordinates of the threads of a warp."""
    linear = number * LANES + np.arange(LANES)
    return linear % block[0], linear // block[0] % block[1], linear // (block[0] * block[1])


def _of_cta(cta: Cta) -> dict[str, Any]:
    """Special registers that are the same in all warps of a CTA."""
    launch, sms = cta.machine.launch, cta.machine.sms
    values: dict[str, Any] = {
        **_OF_LANES, "%nwarpid": cta.warp_count, "%smid": cta.linear % sms,
        "%nsmid": sms, "%gridid": 0, "%clock": 0, "%clock64": 0, "%globaltimer": 0, "%ctarank": cta.rank,
        "%cluster_ctarank": cta.rank, "%cluster_nctarank": cta.machine.ranks,
        "%is_explicit_cluster": int(launch.cluster != (1, 1, 1)), "%dynamic_smem_size": launch.smem,
        "%total_smem_size": cta.machine.shared_bytes - SHARED_BASE,
        "window": cta.rank << RANK_SHIFT,  # where this CTA's shared memory lies in the cluster's
    }  # fmt: skip
    for axis, name in enumerate("xyz"):
        values[f"%ntid.{name}"] = launch.block[axis]
        values[f"%ctaid.{name}"] = cta.index[axis]
        values[f"%nctaid.{name}"] = launch.grid[axis]
        values[f"%cluster_ctaid.{name}"] = cta.index[axis] % launch.cluster[axis]
        values[f"%cluster_nctaid.{name}"] = launch.cluster[axis]
        values[f"%clusterid.{name}"] = cta.index[axis] // launch.cluster[axis]
        values[f"%nclusterid.{name}"] = launch.grid[axis] // launch.cluster[axis]
    return values


def _special_registers(warp: Warp) -> _Specials:
    x, y, z = _threads(warp.machine.launch.block, warp.number)
    own = {"%warpid": warp.number, "%tid.x": x, "%tid.y": y, "%tid.z": z}
    return _Specials({**warp.cta.specials, **own})


class Cta:
    """One CTA: shared memory with its shadow, warps, barriers."""

    def __init__(self, machine: Machine, cluster: Cluster, index: tuple[int, int, int], rank: int):
        self.machine, self.cluster, self.index, self.rank = machine, cluster, index, rank
        self.domain: Domain = cluster.domain
        grid = machine.launch.grid
        self.linear = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        threads = int(np.prod(machine.launch.block))
        self.warp_count: int = -(-threads // LANES)
        self.alive = self.warp_count  # warps that have not ended
        self.specials = _of_cta(self)
        self.smem = np.full(machine.shared_bytes, 0xCD, np.uint8)
        self.shadow = Shadow(machine.shared_bytes, self.domain)
        self.shadow.program = machine.program.steps
        self.row: Any = None  # of the runner
        self.mbarriers: dict[int, MBarrier] = {}
        self.uses: dict[int, Use] = {}  # from other CTAs, see peers.py
        self.exiting: Array | None = None  # clocks of the warps that have ended
        self.ended: Array | None = None
        self.barrier_room = BarrierRoom(self.domain, self.warp_count * machine.ranks)
        self.waits: dict[int, Array] = {}  # on mbarriers, by their offsets
        self.named: dict[int, NamedBarrier] = {}
        self.named_rows = np.zeros((o.NAMED, o.N_COLUMNS), np.int64)  # of these, and their clocks
        self.named_clocks = self.domain.clocks(2 * o.NAMED)
        step = self.named_clocks[:2].nbytes
        self.named_rows[:, o.N_CLOCKS_AT] = address(self.named_clocks) + step * np.arange(o.NAMED)
        self.registers = RegisterFile(self.warp_count, machine.kernel.min_ctas)
        # Reads of bytes that nothing had written: (PTX line, agent) -> first byte and what reports it.
        self.early_reads: dict[tuple[int, int], tuple[int, Callable[[], None]]] = {}
        clocks = self.domain.clocks(2 * self.warp_count).reshape(self.warp_count, 2, -1)
        self.warps = [Warp(self, n, min(LANES, threads - n * LANES), own) for n, own in enumerate(clocks)]
        self.warpgroups: list[Warpgroup] = []
        if machine.uses_wgmma:
            for n in range(self.warp_count // 4):
                group = Warpgroup(self, n)
                group.warps = self.warps[4 * n : 4 * n + 4]
                self.warpgroups.append(group)
                for warp in group.warps:
                    warp.group = group
                    if warp.row is not None:
                        warp.row.join(group)

    def named_barrier(self, number: int) -> NamedBarrier:
        """The named barrier of this number."""
        found = self.named.get(number)
        if found is None:
            rows, clocks = self.named_rows[number], self.named_clocks[2 * number : 2 * number + 2]
            found = self.named[number] = NamedBarrier(
                number, Collected(self.domain, clocks, rows[o.N_KNOWN :]), rows
            )
        return found

    def mbarrier(self, offset: int, number: int, made: Instruction) -> MBarrier:
        """A new mbarrier at this offset, of the number that was taken of the room for them."""
        barrier = self.mbarriers[offset] = MBarrier(self, offset, self.barrier_room.tables(number), made)
        if offset in self.waits:
            barrier.keep_waits(self.waits[offset])
        self.waits[offset] = barrier.waits
        if self.row is not None:
            self.row.place(offset, barrier)
        return barrier

    def more_barriers(self) -> BarrierRoom:
        """Room for another mbarrier at least."""
        if self.barrier_room.full():
            self.barrier_room = BarrierRoom(self.domain, self.warp_count * self.machine.ranks)
            if self.row is not None:
                self.row.numbers[o.BARRIER_ROOM_AT] = address(self.barrier_room.state)
        return self.barrier_room

    def release(self) -> None:
        """At the end let go of all, since CTAs, warps and barriers refer to one another."""
        del self.smem, self.shadow, self.row
        for warp in self.warps:
            if warp.row is not None:
                self.machine.runner.end(warp)
            del warp.R, warp.lane_touches, warp.group
        for group in self.warpgroups:
            group.warps.clear()
        self.warps.clear()
        self.warpgroups.clear()
        for held in (self.mbarriers, self.named, self.uses, self.early_reads):
            held.clear()


class Cluster:
    """CTAs that run together and see each other's shared memory."""

    def __init__(self, machine: Machine, number: tuple[int, int, int], linear: int):
        shape = machine.launch.cluster
        warps = -(-int(np.prod(machine.launch.block)) // LANES)
        self.domain = Domain(int(np.prod(shape)) * (4 * warps + warps // 4 + 160), linear)
        self.barrier = ClusterBarrier(self.domain)
        self.rows: Array | None = None  # of the runner
        self.ctas: list[Cta] = []
        for rank, (z, y, x) in enumerate(itertools.product(*(range(s) for s in reversed(shape)))):
            index = tuple(n * s + o for n, s, o in zip(number, shape, (x, y, z), strict=True))
            self.ctas.append(Cta(machine, self, index, rank))  # type: ignore[arg-type]
        self.barrier.alive = sum(len(c.warps) for c in self.ctas)

    def release(self) -> None:
        """At the end."""
        for cta in self.ctas:
            cta.release()
        self.ctas.clear()
