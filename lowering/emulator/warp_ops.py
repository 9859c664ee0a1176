"""Handlers of operations across the lanes of a warp, and of small things: mapa, fences, printf."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import ordering, register_file, sync, taint
from .machine import Machine
from .ptx import Instruction, Pair, Reg, Vector
from .reports import EmulatorError, Kind
from .state import OFFSET_MASK, RANK_SHIFT, Warp

Array = np.ndarray
_LANE = np.arange(32)
_ORDERING_FENCES = {("fence", p) for p in ("acq_rel", "sc", "acquire", "release")}


def check_members(m: Machine, w: Warp, ins: Instruction, members: Array, mask: Array) -> None:
    """The lanes come together; report member masks that name live lanes on another path."""
    w.converge()
    if mask is w.live:
        return
    named = (int(members[np.argmax(mask)]) >> _LANE) & 1 == 1
    missing = named & w.live & ~mask
    if missing.any():
        m.report(
            Kind.BARRIER_DIVERGENCE,
            f"the member mask names lanes {np.flatnonzero(missing).tolist()}, which are on another path",
            w,
            ins,
            lanes=mask,
        )


def shuffle(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``shfl.sync`` idx, up, down, bfly with the clamp and segment mask of operand c."""
    target, source, b, c, members = ins.operands
    check_members(m, w, ins, w.value(members, "b32"), mask)
    value = w.value(source, "b32")
    amount, control = w.value(b, "b32").astype(np.int64) & 31, w.value(c, "b32").astype(np.int64)
    segment, clamp = (control >> 8) & 31, control & 31
    high = (_LANE & segment) | (clamp & ~segment)
    low = _LANE & segment
    mode = ins.parts[2]
    if mode == "up":
        from_lane = _LANE - amount
        inside = from_lane >= high
    elif mode == "down":
        from_lane = _LANE + amount
        inside = from_lane <= high
    elif mode == "bfly":
        from_lane = _LANE ^ amount
        inside = from_lane <= high
    else:
        from_lane = low | (amount & ~segment)
        inside = from_lane <= high
    from_lane = np.where(inside, from_lane, _LANE)
    first = target.first if isinstance(target, Pair) else target
    if w.taint and isinstance(first, Reg):
        taint.moved(w, first.index, source, from_lane, mask)
    w.set(first, value[from_lane], mask)
    if isinstance(target, Pair):
        w.set(target.second, inside, mask)


def elect(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``elect.sync d|p``: the lowest lane that takes part is the leader."""
    target = ins.operands[0]
    check_members(m, w, ins, w.value(ins.operands[1], "b32"), mask)
    leader = int(np.argmax(mask))
    assert isinstance(target, Pair)
    w.set(target.first, np.full(32, leader, np.uint32), mask)
    w.set(target.second, _LANE == leader, mask)


def vote(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``vote.sync`` all, any, uni, ballot."""
    target, predicate, members = ins.operands
    check_members(m, w, ins, w.value(members, "b32"), mask)
    value = w.value(predicate, "pred") & mask
    mode = ins.parts[2]
    if mode == "ballot":
        bits = int((value.astype(np.int64) << _LANE).sum())
        w.set(target, np.full(32, bits, np.uint32), mask)
        return
    chosen = value[mask]
    result = {"all": chosen.all(), "any": chosen.any(), "uni": chosen.all() or not chosen.any()}[mode]
    w.set(target, np.full(32, result, np.bool_), mask)


def activemask(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``activemask``: the lanes that run here together."""
    w.set(ins.operands[0], np.full(32, int((mask.astype(np.int64) << _LANE).sum()), np.uint32), mask)


def match(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``match.any.sync`` and ``match.all.sync``."""
    target, value, members = ins.operands
    check_members(m, w, ins, w.value(members, "b32"), mask)
    values = w.value(value, ins.parts[-1])
    equal = (values[:, None] == values[None, :]) & mask[None, :]
    bits = (equal.astype(np.int64) << _LANE[None, :]).sum(axis=1).astype(np.uint32)
    if ins.parts[1] == "any":
        w.set(target, bits, mask)
        return
    same = bool((values[mask] == values[mask][0]).all())
    first = target.first if isinstance(target, Pair) else target
    w.set(first, bits if same else np.zeros(32, np.uint32), mask)
    if isinstance(target, Pair):
        w.set(target.second, np.full(32, same, np.bool_), mask)


def redux(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``redux.sync`` add, min, max, and, or, xor of integers."""
    target, value, members = ins.operands
    check_members(m, w, ins, w.value(members, "b32"), mask)
    values = w.value(value, ins.parts[-1])[mask]
    function: np.ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                          "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.parts[2]]  # fmt: skip
    result = function.reduce(values, dtype=values.dtype)
    w.set(target, np.full(32, result, values.dtype), mask)


def mapa(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``mapa``: the same offset in the shared memory of another CTA of the cluster."""
    target, source, rank = ins.operands
    wide = ins.parts[-1] == "u64"
    address = w.value(source, "b64" if wide else "b32").astype(np.int64)
    window = address & ~((1 << 60) - 1) if wide else 0
    ranks = w.value(rank, "b32").astype(np.int64)
    bad = mask & (ranks >= len(w.cta.cluster.ctas))
    if bad.any():
        m.report(
            Kind.OUT_OF_BOUNDS,
            f"mapa to CTA {int(ranks[bad][0])} of a cluster of {len(w.cta.cluster.ctas)}",
            w,
            ins,
        )
    result = (address & OFFSET_MASK) | (ranks << RANK_SHIFT) | window
    w.set(target, result.astype(np.uint64 if wide else np.uint32), mask)


def getctarank(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``getctarank``: which CTA of the cluster an address belongs to."""
    address = w.value(ins.operands[1], "b64" if ins.parts[-1] == "u64" else "b32").astype(np.int64)
    w.set(ins.operands[0], ((address & ((1 << 60) - 1)) >> RANK_SHIFT).astype(np.uint32), mask)


def trap(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``trap``: stops the launch."""
    m.report(Kind.TRAP, "trap", w, ins, lanes=mask)
    raise EmulatorError(f"kernel {m.kernel.name} executed trap", tuple(m.log.reports))


def createpolicy(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``createpolicy``: a cache hint, which has no effect here."""
    w.set(ins.operands[0], np.zeros(32, np.uint64), mask)


def call(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``call`` of ``vprintf``, lane by lane; the parser has replaced calls of all other functions."""
    names = [str(getattr(o, "name", "")) for o in ins.operands]
    arguments = ins.operands[names.index("vprintf") + 1]
    assert isinstance(arguments, Vector) and w.local is not None
    places = [m.kernel.variables[getattr(item, "name", "")].offset for item in arguments.items[:2]]
    formats, buffers = (np.ascontiguousarray(w.local[:, at : at + 8]).view(np.uint64)[:, 0] for at in places)
    for lane in np.flatnonzero(mask):
        text = _c_string(m, int(formats[lane]))
        print(_format(text, w, int(buffers[lane]), int(lane), m), end="")


def check_index(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """The index of ``brx.idx`` must be in its table."""
    index, count = w.value(ins.operands[0], "u32"), ins.operands[1].value
    beyond = mask & (index >= count)
    if beyond.any():
        text = f"brx.idx with index {int(index[np.argmax(beyond)])}; its table has {count} targets"
        m.report(Kind.OUT_OF_BOUNDS, text, w, ins, lanes=beyond)
        raise EmulatorError(text, tuple(m.log.reports))


def _c_string(m: Machine, address: int) -> str:
    region = m.memory.find(address)
    if region is None:
        raise EmulatorError("vprintf: the format string is not in known memory")
    data = region.data[address - region.start :].tobytes()
    return data[: data.index(0)].decode()


def _format(text: str, w: Warp, buffer: int, lane: int, m: Machine) -> str:
    """Format with the arguments in local memory: 4 or 8 bytes each, aligned to their size."""
    import re

    at = (buffer & ((1 << 60) - 1)) if buffer else 0

    def argument(match: re.Match) -> str:
        nonlocal at
        spec = match.group(0)
        if spec == "%%":
            return "%"
        wide = spec[-1] in "fegFEGsp" or "l" in spec
        size = 8 if wide else 4
        at = -(-at // size) * size
        raw = w.local[lane, at : at + size] if w.local is not None else np.zeros(size, np.uint8)
        at += size
        if spec[-1] in "fegFEG":
            return spec.replace("l", "") % np.ascontiguousarray(raw).view(np.float64)[0]
        if spec[-1] == "s":
            return _c_string(m, int(np.ascontiguousarray(raw).view(np.uint64)[0]))
        signed = spec[-1] in "di"
        value = int(np.ascontiguousarray(raw).view(f"{'i' if signed else 'u'}{size}")[0])
        if spec[-1] == "p":
            return hex(value)
        return spec.replace("l", "").replace("u", "d") % value

    return re.sub(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l)?[a-zA-Z%]", argument, text)


def fence(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """Fences and warp barriers.

    ``fence.proxy.async`` makes the earlier ordinary writes of the lanes that execute it visible to the async
    proxy; for those of memory order see `ordering`.
    """
    if ins.has("proxy") and any(p.startswith("async") for p in ins.parts):
        ordering.proxy_fence(w, ins)
        w.unfenced &= ~mask
        if not w.unfenced.any():
            fc = w.fc.copy()
            fc[w.agent] = w.clock
            copies = w.state.get("cp_async_agent")
            if copies is not None:
                fc[copies] = w.vc[copies]
            w.fc = fc
    elif ins.root == "membar" or ins.parts[:2] in _ORDERING_FENCES:
        ordering.fence(w, ins)
    elif ins.has("mbarrier_init"):
        sync.fence_init(w)
    elif ins.opcode.startswith("bar.warp.sync"):
        check_members(m, w, ins, w.value(ins.operands[0], "b32"), mask)


def prefetch_tensormap(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``prefetch.tensormap``: no effect on results."""


HANDLERS: dict[str, Callable] = {
    "shfl.sync": shuffle, "elect.sync": elect, "vote.sync": vote, "activemask": activemask, "match": match,
    "redux.sync": redux, "mapa": mapa, "getctarank": getctarank, "trap": trap, "createpolicy": createpolicy,
    "call": call, "brx.check": check_index, "fence": fence, "membar": fence, "bar.warp.sync": fence,
    "griddepcontrol": ordering.dependency_wait, "setmaxnreg": register_file.set_limit,
    "prefetch.tensormap": prefetch_tensormap,
}  # fmt: skip
