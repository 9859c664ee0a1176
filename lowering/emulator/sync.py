"""Handlers of barriers: named barriers of a CTA, mbarriers, and the cluster barrier."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import access, arrivals, ordering, peers, suspects
from .barriers import MBarrier, NamedBarrier, SecondWait, describe
from .clocks import Handover
from .ptx import Address, Instruction, Sink
from .reports import Kind
from .shadow import AgentKind
from .state import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, Cta, Warp

if TYPE_CHECKING:
    from .machine import Machine

Array = np.ndarray


# Named barriers


def _aligned(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    if mask is not w.live and not np.array_equal(mask, w.live):
        missing = np.flatnonzero(w.live & ~mask).tolist()
        m.report(
            Kind.BARRIER_DIVERGENCE, f"lanes {missing} of the warp are on another path", w, ins, lanes=mask
        )


@functools.lru_cache(maxsize=64)
def _mode(parts: tuple[str, ...]) -> str:
    """The kind of operation that an opcode asks of a named barrier."""
    return next(p for p in parts[1:] if p in ("sync", "arrive", "red"))


def _expected(cta: Cta, barrier: NamedBarrier) -> int:
    if barrier.expected is not None:
        return barrier.expected
    return 32 * len([warp for warp in cta.warps if warp.frames])


def named_barrier(m: Machine, w: Warp, ins: Instruction, mask: Array) -> object:
    """``bar.sync``, ``bar.arrive``, ``bar.red`` and their ``barrier.`` and ``.cta`` spellings."""
    if w.passed:
        w.passed = False
        return None
    operands, mode = list(ins.operands), _mode(ins.parts)
    target = operands.pop(0) if mode == "red" else None
    predicate = operands.pop() if mode == "red" else None
    numbers = [int(w.value(x, "b32")[mask.argmax()]) for x in operands[:2]]
    number, count = numbers[0], numbers[1] if len(numbers) > 1 else None
    _aligned(m, w, ins, mask)
    barrier = w.cta.named_barrier(number)
    if barrier.arrived == 0:
        barrier.expected = count
    elif barrier.expected != count:
        m.report(
            Kind.BARRIER_DIVERGENCE,
            f"barrier {number} is used with {count or 'all'} threads here, and with "
            f"{barrier.expected or 'all'} by the warps that wait there",
            w,
            ins,
        )
    if count is not None and (count % 32 or count > 32 * w.cta.warp_count):
        m.report(
            Kind.BARRIER_DIVERGENCE,
            f"barrier {number} wants {count} threads; it must be a multiple of 32 up to "
            f"the {32 * w.cta.warp_count} of the CTA",
            w,
            ins,
        )
    barrier.arrived += 32
    barrier.who.append(w)
    barrier.clocks.add(w.release())
    if mode == "arrive":
        _settle_named(m, w.cta, barrier, None)
        return None
    if predicate is not None:
        barrier.reductions.append((w.value(predicate, "pred") & mask)[mask])
        w.state["reduction"] = (target, mask, ins.parts)
    if _settle_named(m, w.cta, barrier, w):
        return None
    expected = _expected(w.cta, barrier)
    w.passed = True  # once it is woken
    barrier.left = 1
    return await_named(m, w, number, expected - barrier.arrived, expected)


def join_named(m: Machine, w: Warp, number: int) -> None:
    """A warp has arrived at a named barrier, in compiled code."""
    w.cta.named_barrier(number).who.append(w)


def open_named(m: Machine, w: Warp, number: int) -> None:
    """A warp was the last to arrive at a named barrier, in compiled code, where the others went on."""
    m.wake(w.cta.named_barrier(number).open())


def await_named(m: Machine, w: Warp, number: int, missing: int, expected: int) -> object:
    """A warp waits at a named barrier that so many threads are missing at."""
    waiters = w.cta.named_barrier(number).waiters
    return m.block(w, f"barrier {number} ({missing} of {expected} threads missing)", waiters)


def _settle_named(m: Machine, cta: Cta, barrier: NamedBarrier, last: Warp | None) -> bool:
    """Open the barrier if everyone is there."""
    if barrier.arrived == 0 or barrier.arrived < _expected(cta, barrier):
        return False
    through = barrier.waiters + ([last] if last is not None else [])
    votes = np.concatenate(barrier.reductions) if barrier.reductions else None
    for warp in through:
        warp.acquire(barrier.clocks)
        warp.released = m.step
        reduction = warp.state.pop("reduction", None)
        if reduction is not None and votes is not None:
            target, mask, parts = reduction
            result = votes.sum() if "popc" in parts else votes.all() if "and" in parts else votes.any()
            dtype = np.uint32 if "popc" in parts else np.bool_
            warp.set(target, np.full(32, result, dtype), mask)
    waiters = barrier.waiters
    barrier.reset()
    m.wake(waiters)
    return True


def settle_after_exit(m: Machine, w: Warp) -> None:
    """A warp ended: barriers that wait for all threads wait for it no longer."""
    for barrier in list(w.cta.named.values()):
        _settle_named(m, w.cta, barrier, None)
    _settle_cluster(m, w)


# Cluster barrier


def cluster_arrive(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``barrier.cluster.arrive``: counted once a warp."""
    _aligned(m, w, ins, mask)
    w.cluster_target = w.cta.cluster.barrier.generation + 1
    reached = w.vc
    clocks = ordering.relaxed_release(w, ordering.CLUSTER) if ins.has("relaxed") else w.release()
    w.cta.cluster.barrier.arrive(clocks, reached)
    _settle_cluster(m, w)


def _settle_cluster(m: Machine, w: Warp) -> None:
    cluster = w.cta.cluster
    if cluster.barrier.arrived == 0:
        return
    if cluster.barrier.settle(cluster.barrier.alive):
        m.wake(cluster.barrier.waiters)


def cluster_wait(m: Machine, w: Warp, ins: Instruction, mask: Array) -> object:
    """``barrier.cluster.wait``."""
    barrier = w.cta.cluster.barrier
    if w.cluster_target < 0:
        m.report(
            Kind.BARRIER_DIVERGENCE, "barrier.cluster.wait with no barrier.cluster.arrive before it", w, ins
        )
        return None
    if barrier.generation < w.cluster_target:
        return await_cluster(m, w, barrier.arrived)
    w.acquire(barrier.done)
    w.reached = barrier.reached
    return None


def await_cluster(m: Machine, w: Warp, arrived: int) -> object:
    """A warp waits at the cluster barrier, where so many have arrived."""
    return m.block(w, f"the cluster barrier ({arrived} warps arrived)", w.cta.cluster.barrier.waiters)


# mbarriers


def find(m: Machine, w: Warp, ins: Instruction, address: int, copies: bool = False) -> MBarrier | None:
    """The mbarrier at a cluster-window address, or a finding and None.

    ``copies``: the async proxy uses it, so its initialisation needs a fence too.
    """
    rank, offset = address >> RANK_SHIFT, address & OFFSET_MASK
    ctas = w.cta.cluster.ctas
    barrier = ctas[rank].mbarriers.get(offset) if 0 <= rank < len(ctas) else None
    if barrier is None:
        m.report(
            Kind.BARRIER_STATE,
            f"no mbarrier was initialised at {offset:#x} of the cluster's CTA {rank}",
            w,
            ins,
            address=offset,
            look_at=suspects.uninitialised_barrier(m, w, ins, w.cta, offset),
        )
        return None
    barrier.note(w)
    if m.check:
        _check_initialised(m, w, ins, barrier, copies)
    return barrier


def _check_initialised(m: Machine, w: Warp, ins: Instruction, barrier: MBarrier, copies: bool) -> None:
    """Report a use that the initialisation is not ordered before."""
    by, clock = barrier.init_by, barrier.init_clock
    what = f"the initialisation of mbarrier {barrier.offset:#x} is not ordered before this use: "
    if w.vc[by] < clock:
        reached = w.reached is not None and w.reached[by] >= clock
        if not reached:
            text = "a CTA or cluster barrier is missing between them"
        elif not barrier.init_fenced:
            text = "before a relaxed arrival on the cluster barrier it needs fence.mbarrier_init"
        else:
            return
    elif copies and not barrier.init_fenced and w.fc[by] < clock:
        text = (
            "bulk copies count on it through the async proxy, and the thread that initialised it ran neither "
            "fence.mbarrier_init nor fence.proxy.async before the barrier"
        )
    else:
        return
    look_at = suspects.initialisation(m, w, ins, barrier)
    m.report(Kind.BARRIER_STATE, what + text, w, ins, address=barrier.offset, look_at=look_at)


def fence_init(w: Warp) -> None:
    """``fence.mbarrier_init``: the initialisations by this warp are visible to peers and bulk copies."""
    for barrier in w.cta.mbarriers.values():
        if barrier.init_by == w.agent:
            barrier.init_fenced = True


def _addresses(
    m: Machine, w: Warp, ins: Instruction, operand: Address, mask: Array
) -> list[tuple[int, Array]]:
    """Distinct barrier addresses with the lanes that name them."""
    values = w.address(operand) & ((1 << 60) - 1)
    first = int(values[np.argmax(mask)])
    if (values == first).all():
        return [(first, mask)]
    distinct = dict.fromkeys(int(v) for v in values[mask])
    return [(v, mask & (values == v)) for v in distinct]


def init(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``mbarrier.init``."""
    counts = w.value(ins.operands[1], "b32")
    for address, lanes in _addresses(m, w, ins, ins.operands[0], mask):
        offset = address & OFFSET_MASK
        if offset < SHARED_BASE or offset + 8 > m.shared_bytes or offset % 8:
            kind = Kind.MISALIGNED if offset % 8 else Kind.OUT_OF_BOUNDS
            m.report(kind, "an mbarrier needs 8 aligned bytes of shared memory", w, ins, address=offset)
            continue
        count = int(counts[np.argmax(lanes)])
        cta = w.cta
        old = cta.mbarriers.get(offset)
        if old is not None and old.waiters:
            m.report(
                Kind.BARRIER_STATE,
                "an mbarrier is initialised while warps wait on it",
                w,
                ins,
                address=offset,
            )
        agent = old.agent if old else _copier(cta, offset)
        cta.mbarrier(offset, cta.more_barriers().take(), ins).begin(count, agent, w)
        access.check_write(m, w, ins, cta, slice(offset, offset + 8), lanes)


def _copier(cta: Cta, offset: int) -> int:
    """The agent of bulk copies that complete on the mbarrier of this offset, a new one."""
    text = f"the bulk copy that completes on mbarrier {offset:#x} of CTA {cta.index}"
    return cta.domain.agent(AgentKind.BULK_LOAD, text)


def made(w: Warp, ins: Instruction, offset: int, agent: int, number: int) -> None:
    """A warp has initialised an mbarrier in compiled code, which took its agent and its tables."""
    found = _copier(w.cta, offset)
    assert found == agent
    w.cta.mbarrier(offset, number, ins)


def invalidate(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``mbarrier.inval``."""
    for address, _ in _addresses(m, w, ins, ins.operands[0], mask):
        w.cta.mbarriers.pop(address & OFFSET_MASK, None)
        if w.cta.row is not None:
            w.cta.row.place(address & OFFSET_MASK, None)


def complete(m: Machine, barrier: MBarrier) -> None:
    """Complete the phase if it is due and wake who waits; reports phases waited for twice."""
    while _settle(m, barrier):
        note_phase(m, barrier, barrier.phase)
        for wait in barrier.overtaken() if barrier.waited_twice else ():
            m.report(
                Kind.PHASE_WAITED_TWICE,
                f"mbarrier {barrier.offset:#x} went on to its next phase after a warp waited "
                "for the same phase twice: its parity was not flipped",
                wait.warp,
                wait.ins,
                address=barrier.offset,
            )
        m.wake(barrier.waiters)
        if barrier.expected == 0:
            break


def _settle(m: Machine, barrier: MBarrier) -> bool:
    """Complete the phase if it is due; returns whether it was."""
    done = m.runner.settle(barrier) if m.runner is not None else -1
    return done == 1 if done >= 0 else barrier.settle()


def note_phase(m: Machine, barrier: MBarrier, phase: int) -> None:
    """Tell of a phase that is complete."""
    if m.timeline is not None:
        m.timeline.point(f"CTA {barrier.cta.index} mbarrier {barrier.offset:#x}", "phase", str(phase), m.step)


def count_arrivals(
    m: Machine, w: Warp, ins: Instruction, barrier: MBarrier, count: int, clocks: Handover
) -> None:
    """Arrivals of a warp on a barrier; reports too many of them."""
    if barrier.arrive(clocks, count, w):
        m.report(
            Kind.ARRIVE_COUNT,
            f"mbarrier {barrier.offset:#x} expects {barrier.expected} arrivals a phase and gets "
            f"more: {', '.join(barrier.arrivals)}\n{arrivals.of_mbarrier(m, barrier)}",
            w,
            ins,
            address=barrier.offset,
            look_at=suspects.counts(m, barrier),
        )
    w.released = m.step
    complete(m, barrier)


def arrive(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``mbarrier.arrive``, ``.arrive_drop`` and their ``.expect_tx`` forms, local or remote.

    Each active lane arrives once; the state token is the phase before the arrival.
    """
    operands = list(ins.operands)
    target = None if isinstance(operands[0], Address) else operands.pop(0)
    amount = operands[1] if len(operands) > 1 else None
    expect = ins.has("expect_tx")
    values = w.value(amount, "b32").astype(np.int64) if amount is not None else np.ones(32, np.int64)
    tokens = np.zeros(32, np.uint64)
    if ins.has("relaxed"):
        clocks = ordering.relaxed_release(w, ordering.order_of(ins.parts).level)
    else:
        clocks = w.release()
    for address, lanes in _addresses(m, w, ins, operands[0], mask):
        barrier = find(m, w, ins, address)
        if barrier is None:
            continue
        if barrier.cta is not w.cta:
            peers.note_use(m, w, ins, barrier.cta, w.agent, w.clock - 1)
        tokens[lanes] = barrier.phase
        if expect:
            barrier.tx += int(values[lanes].sum())
        count = int(lanes.sum()) if expect else int(values[lanes].sum())
        if ins.has("arrive_drop"):
            barrier.expected -= count
        count_arrivals(m, w, ins, barrier, count, clocks)
    if target is not None and not isinstance(target, Sink):
        w.set(target, tokens, mask)


def expect_tx(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``mbarrier.expect_tx`` and ``mbarrier.complete_tx``."""
    values = w.value(ins.operands[1], "b32").astype(np.int64)
    sign = -1 if ins.has("complete_tx") else 1
    for address, lanes in _addresses(m, w, ins, ins.operands[0], mask):
        barrier = find(m, w, ins, address)
        if barrier is not None:
            barrier.tx += sign * int(values[lanes].sum())
            complete(m, barrier)


def try_wait(m: Machine, w: Warp, ins: Instruction, mask: Array) -> object:
    """``mbarrier.try_wait`` and ``.test_wait``, by parity or by state token.

    ``try_wait`` suspends the warp while the phase is not complete; now and then, by the seed, it gives up
    at once, as the hardware may. Who only asked, by ``test_wait``, may still wait for the same phase later.
    """
    predicate, where, argument = ins.operands[:3]
    by_parity = ins.has("parity")
    wanted = w.value(argument, "b32" if by_parity else "b64").astype(np.int64)
    result = np.zeros(32, np.bool_)
    first: MBarrier | None = None
    for address, lanes in _addresses(m, w, ins, where, mask):
        barrier = find(m, w, ins, address)
        if barrier is None:
            result |= lanes
            continue
        value = int(wanted[np.argmax(lanes)])
        done = barrier.passed(value) if by_parity else barrier.phase > value
        if done:
            result |= lanes
            if not ins.has("relaxed"):
                w.acquire(barrier.done)
            if by_parity and ins.has("try_wait"):
                _note_wait(m, w, ins, barrier)
        elif first is None:
            first = barrier
    gave_up, w.gave_up, w.suspended = w.gave_up, False, False
    if first is not None and ins.has("try_wait") and not gave_up and m.random.random() < 0.75:
        state = first.phase, first.pending, first.expected, first.tx
        w.suspended = True
        return await_phase(m, w, first, (int(wanted[np.argmax(mask)]) & 1, *state))
    w.set(predicate, result, mask)
    return None


def await_phase(m: Machine, w: Warp, barrier: MBarrier, numbers: Sequence[int]) -> object:
    """A warp waits for a parity of an mbarrier, whose phase, counts and bytes are the other ``numbers``."""
    text = f"mbarrier {barrier.offset:#x} of CTA {barrier.cta.index}, parity {numbers[0]}"
    return m.block(w, f"{text} ({describe(*numbers[1:])})", barrier.waiters)


def _note_wait(m: Machine, w: Warp, ins: Instruction, barrier: MBarrier) -> None:
    """Remember the phase; the same one again, after the warp released something, is suspicious."""
    phase, step = barrier.waits[w.in_cluster]
    if phase == barrier.phase and w.released > step:
        barrier.wait_again(w.agent, SecondWait(w, ins, w.clock))
    else:
        barrier.waits[w.in_cluster] = barrier.phase, m.step


def pending_count(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
    """``mbarrier.pending_count`` is not modelled: tokens hold the phase only."""
    raise access.stop(ins, "mbarrier.pending_count is not modelled")


HANDLERS: dict[str, Callable] = {
    "bar": named_barrier, "barrier": named_barrier,
    "barrier.cluster.arrive": cluster_arrive, "barrier.cluster.wait": cluster_wait,
    "mbarrier.init": init, "mbarrier.inval": invalidate, "mbarrier.arrive": arrive,
    "mbarrier.arrive_drop": arrive, "mbarrier.expect_tx": expect_tx, "mbarrier.complete_tx": expect_tx,
    "mbarrier.try_wait": try_wait, "mbarrier.test_wait": try_wait, "mbarrier.pending_count": pending_count,
}  # fmt: skip
