"""The order of memory: what strong accesses and fences hand from warp to warp.

The model is that of PTX. A release (``.release``, ``.acq_rel``, or a fence before a relaxed store or atomic)
marks the address with the clocks of its warp; an acquire (``.acquire``, ``.acq_rel``, or a relaxed load or
atomic with a fence after it) that reads this value, or what atomics made of it, takes them over. Both count
within their scope only. What relaxed accesses alone have shown a warp is kept too: it orders nothing, but a
report can say that only the order was missing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import suspects
from .clocks import FINISHED, NOTHING, Handover, Known, fenced, join_known, through_proxy
from .global_shadow import Access, Clash
from .lanes import note_read, note_write
from .reports import Kind
from .spans import Spans, of_lanes

if TYPE_CHECKING:
    from .machine import Machine
    from .ptx import Instruction
    from .state import Warp

Array = np.ndarray
CTA, CLUSTER, GPU = range(3)
LEVELS = 3
Cell = int | tuple[int, int]
"""An address of global memory, or the number of a cluster and an address of its shared memory."""
_STRONG = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")


class Order(NamedTuple):
    """Order that an access imposes. ``level``: its scope; that of the system counts as the GPU's."""

    strong: bool
    acquire: bool
    release: bool
    level: int


@lru_cache(maxsize=1024)
def order_of(parts: tuple[str, ...]) -> Order:
    """The order that an opcode asks for; atomics are relaxed unless they say otherwise."""
    both = "acq_rel" in parts
    strong = parts[0] in ("atom", "red") or any(p in parts for p in _STRONG)
    level = CTA if "cta" in parts else CLUSTER if "cluster" in parts else GPU
    return Order(strong, both or "acquire" in parts, both or "release" in parts, level)


class Mark:
    """Meaning of the last value at an address: releases by scope, and the clocks of who wrote it."""

    __slots__ = ("released", "seen")

    def __init__(self) -> None:
        self.released: dict[tuple[int, int], Known] = {}
        self.seen: Known = NOTHING


class Orders:
    """A warp's side: what it saw by relaxed reads and what its fences released, by scope."""

    __slots__ = ("fenced", "observed")

    def __init__(self) -> None:
        self.observed: list[Known] = [NOTHING] * LEVELS
        self.fenced: list[Known | None] = [None] * LEVELS


def _groups(w: Warp) -> tuple[int, int, int]:
    """The number of the warp's CTA, of its cluster, and of the GPU."""
    return w.cta.linear, w.cta.domain.number, 0


def _observe(m: Machine, w: Warp, order: Order, addresses: list[Cell]) -> None:
    """A strong read of the values at these addresses."""
    for address in addresses:
        mark = m.marks.get(address)
        if mark is None:
            continue
        w.seen = join_known(w.seen, mark.seen)
        groups = _groups(w)
        for level in range(order.level + 1):
            known = mark.released.get((level, groups[level]))
            if known is None:
                continue
            if order.acquire:
                w.acquire_known(known)
            else:
                w.orders.observed[level] = join_known(w.orders.observed[level], known)


def _publish(m: Machine, w: Warp, order: Order, addresses: list[Cell], update: bool) -> None:
    """A strong write to these addresses; ``update``: an atomic, which keeps what was released before it."""
    clocks = w.exported()
    releases: list[Known | None] = [clocks] * LEVELS if order.release else w.orders.fenced
    groups = _groups(w)
    for address in addresses:
        mark = m.marks.get(address) if update else None
        if mark is None:
            mark = m.marks[address] = Mark()
        mark.seen = join_known(mark.seen, clocks)
        for level in range(order.level + 1):
            known = releases[level]
            if known is not None:
                key = (level, groups[level])
                mark.released[key] = join_known(mark.released.get(key, NOTHING), known)
    if order.release:
        w.tick()


def fence(w: Warp, ins: Instruction) -> None:
    """``fence.acq_rel``, ``fence.sc``, ``membar`` and the one-sided fences."""
    sides = ("acquire", "release")
    one = next((p for p in sides if p in ins.parts), None)
    level = CTA if ins.has("cta") else CLUSTER if ins.has("cluster") else GPU
    orders = w.orders
    if one != "release":
        for known in orders.observed[: level + 1]:
            if known:
                w.acquire_known(known)
    if one != "acquire":
        clocks = w.exported()
        w.tick()
        for below in range(level + 1):
            orders.fenced[below] = clocks


def relaxed_release(w: Warp, level: int) -> Handover:
    """The clocks that a relaxed arrival hands over: those of the warp's last fence of that scope."""
    known = w.orders.fenced[level] or NOTHING
    nothing, own = w.cta.domain.clock(), w.cta.domain.number
    w.tick()
    return Handover(known.get(own, nothing), known.get(fenced(own), nothing), known)


def proxy_fence(w: Warp, ins: Instruction) -> None:
    """``fence.proxy.async``: what the warp knows to have been written is there for later bulk copies."""
    if not any(p.startswith("shared") for p in ins.parts):
        w.known = join_known(w.known, through_proxy(w.exported()))


def dependency_wait(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``griddepcontrol.wait``: the launch before this one has ended."""
    if ins.has("wait"):
        w.known = join_known(w.known, FINISHED)


# Accesses of a warp


def load(m: Machine, w: Warp, ins: Instruction, addresses: Array, size: int, mask: Array) -> None:
    """``ld`` of global memory by the lanes of ``mask``."""
    if not m.check:
        return
    order = order_of(ins.parts)
    if order.strong:
        if m.marks:
            _observe(m, w, order, np.unique(addresses).tolist())
    elif ins.root != "wmma":
        note_read(m, w, ins, "global", addresses, size, mask)
    spans = of_lanes(addresses, size)
    access = w.access(ins, order.strong)
    _report(m, w, access, "read", m.accesses.read(spans, access, w))


def store(m: Machine, w: Warp, ins: Instruction, addresses: Array, data: Array, mask: Array) -> None:
    """``st`` of uint8 (n, size) ``data`` to global memory by the lanes of ``mask``, before it is done."""
    if not m.check:
        return
    order = order_of(ins.parts)
    if not order.strong and ins.root == "st":
        differs = lambda: m.memory.differs(addresses, data)  # noqa: E731
        note_write(m, w, ins, "global", addresses, data, mask, differs)
    size = data.shape[1]
    access = w.access(ins, order.strong)
    clash = m.accesses.write(of_lanes(addresses, size), access, w)
    if clash is not None:
        same = clash.wrote and not m.memory.differs(addresses, data).any()
        _report(m, w, access, "write", clash, same)
    if order.strong:
        _publish(m, w, order, np.unique(addresses).tolist(), False)
    elif m.marks:
        for address in addresses.tolist():
            m.marks.pop(address, None)


def atomic(m: Machine, w: Warp, ins: Instruction, addresses: Array, size: int) -> None:
    """``atom`` and ``red`` of global memory."""
    if not m.check:
        return
    order = order_of(ins.parts)
    distinct = np.unique(addresses).tolist()
    if ins.root == "atom":
        _observe(m, w, order, distinct)
    access = w.access(ins, True)
    _report(m, w, access, "atomic access", m.accesses.write(of_lanes(addresses, size), access, w))
    _publish(m, w, order, distinct, True)


# Shared memory: strong accesses mark addresses likewise


def _places(w: Warp, addresses: Array) -> list[Cell]:
    number = w.cta.domain.number
    return [(number, address) for address in np.unique(addresses).tolist()]


def shared_load(m: Machine, w: Warp, ins: Instruction, addresses: Array) -> None:
    """``ld`` of shared memory."""
    order = order_of(ins.parts)
    if order.strong and m.check and m.marks:
        _observe(m, w, order, _places(w, addresses))


def shared_store(m: Machine, w: Warp, ins: Instruction, addresses: Array) -> None:
    """``st`` to shared memory, after it is done."""
    order = order_of(ins.parts)
    if order.strong and m.check:
        _publish(m, w, order, _places(w, addresses), False)


def shared_atomic(m: Machine, w: Warp, ins: Instruction, addresses: Array) -> None:
    """``atom`` and ``red`` of shared memory, after they are done."""
    if not m.check:
        return
    order, places = order_of(ins.parts), _places(w, addresses)
    if ins.root == "atom":
        _observe(m, w, order, places)
    _publish(m, w, order, places, True)


# Accesses of asynchronous units, with the clocks of the warp that issues them


def copy_from(m: Machine, w: Warp, ins: Instruction, spans: Spans, agent: int, clock: int) -> None:
    """A copy reads global memory until its agent comes to ``clock``."""
    if m.check:
        access = Access(w.cta.domain, agent, clock, False, ins)
        _report(m, w, access, "asynchronous read", m.accesses.read(spans, access, w))


def copy_to(
    m: Machine, w: Warp, ins: Instruction, spans: Spans, agent: int, clock: int, reduces: bool
) -> None:
    """A copy writes global memory, or adds to it atomically, until its agent comes to ``clock``."""
    if m.check:
        access = Access(w.cta.domain, agent, clock, reduces, ins)
        _report(m, w, access, "asynchronous write", m.accesses.write(spans, access, w))


def _report(m: Machine, w: Warp, access: Access, verb: str, clash: Clash | None, same: bool = False) -> None:
    if clash is None:
        return
    other, region = clash.other, clash.region
    place = f"{region.name}, byte {clash.address - region.start}"
    if other is None:
        text = (
            f"{verb} of {place}, which the launch before this one {'wrote' if clash.wrote else 'read'}: with "
            "programmatic dependent launch it may still run, and griddepcontrol.wait is missing"
        )
        look_at = suspects.global_race(m, w, access.ins, None)
        m.report(Kind.RACE, text, w, access.ins, address=clash.address, space="global", look_at=look_at)
        return
    kind = "atomic access" if other.strong and clash.wrote else "write" if clash.wrote else "read"
    where = m.source(other.ins) or f"PTX line {other.ins.line}"
    side = m.place(f"{kind} by {other.who.name}", other.ins)
    text = f"{verb} of {place}, does not wait for the {kind} by {other.who.name} at {where}"
    look_at = suspects.global_race(m, w, access.ins, other)
    if clash.proxy:
        text = f"{verb} of {place}, written by {other.who.name} at {where}, with no fence.proxy.async between"
        m.report(
            Kind.MISSING_PROXY_FENCE, text, w, access.ins, address=clash.address, space="global", other=side,
            look_at=look_at,
        )  # fmt: skip
        return
    if same:
        text += "; both write the same value"
    elif other.seen(w):
        text += "; a later value of it was seen, but with relaxed order: this needs a release and an acquire"
    m.report(
        Kind.RACE, text, w, access.ins, address=clash.address, space="global", warning=same, other=side,
        look_at=look_at,
    )  # fmt: skip
