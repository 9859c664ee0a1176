"""Lines that a finding makes suspect: the synchronisation around an access, not only the access.

A report names where something went wrong. What is missing or wrong stands elsewhere: a wait before a read, an
arrival that never came, a count at an initialisation. These functions name such lines, likeliest first, from
each warp's history and the uses of a barrier. What is missing has no line: then the statements are named that
it belongs next to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from . import history, statements
from .history import ACQUIRE, COMMIT, DRAIN, FENCE, ISSUE, RELEASE, does, synchronises
from .ptx import registers as operand_registers
from .reports import Place, SourceLine, Span, Suspect
from .shadow import AgentKind, Conflict

if TYPE_CHECKING:
    from .barriers import MBarrier
    from .global_shadow import Access
    from .machine import Machine
    from .ptx import Instruction
    from .state import Cta, Warp

NEAR = 24  # instructions of a history that are looked at after an access
Suspects = Iterator[Suspect]
Stack = tuple[SourceLine, ...]


def _at(m: Machine, what: str, ins: Instruction | None) -> Suspects:
    place = m.place(what, ins)
    if place is not None:
        yield Suspect(what, place)


class _Gap(NamedTuple):
    """Statements between two instructions, as call stacks, innermost first, in the order of execution.

    `both`: those of the function that both are in. `tails`, `heads`: those after the first in the functions
    that only it is in, innermost first; those before the second in the functions that only it is in.
    """

    tails: list[list[Stack]]
    both: list[Stack]
    heads: list[list[Stack]]


def _gap(m: Machine, first: Instruction, second: Instruction, late: bool) -> _Gap:
    one, two = m.stack(first)[::-1], m.stack(second)[::-1]
    same = 0
    while same < min(len(one), len(two)) - 1 and one[same] == two[same]:
        same += 1

    def part(frames: Stack, depth: int, low: int, high: int) -> list[Stack]:
        path, outer, name = frames[depth].path, frames[:depth][::-1], frames[depth].function
        return [(SourceLine(path, n, name), *outer) for n in statements.between(path, low, high)]

    both: list[Stack] = []
    if one and two and one[same].path == two[same].path:
        low, high = one[same].line, two[same].line
        inside = statements.function(one[same].path, low)
        if inside is not None and not low < high:  # a loop's next turn
            low, high = (inside.start, high) if late else (low, inside.end + 1)
        both = part(two, same, low, high)
    tails = [
        part(one, depth, one[depth].line, inside.end + 1)
        for depth in range(len(one) - 1, same, -1)
        if (inside := statements.function(one[depth].path, one[depth].line)) is not None
    ]
    heads = [
        part(two, depth, inside.start, two[depth].line)
        for depth in range(same + 1, len(two))
        if (inside := statements.function(two[depth].path, two[depth].line)) is not None
    ]
    return _Gap(tails, both, heads)


def _statements(m: Machine, what: str, first: Instruction, second: Instruction, late: bool) -> Suspects:
    """Statements between two instructions, a few of each function: ``late``: those next to the second."""
    gap = _gap(m, first, second, late)
    span = Span(first.line, second.line)
    if late:
        parts = [
            gap.both[-2:],
            *(head[-1:] for head in gap.heads[:-1]),
            *(head[-2:] for head in gap.heads[-1:]),
        ]
    else:
        parts = [*(tail[:2] for tail in gap.tails), gap.both[:2]]
    for part in parts:
        if part:
            until = part[-1][0].line if len(part) > 1 else 0
            yield Suspect(what, Place(what, 0, "", part[0]), until, span)


def _known(m: Machine, ins: Instruction, near: Instruction) -> bool:
    """False where the compiler merged the instruction with others and its line is not its own."""
    stack, other = m.stack(ins), m.stack(near)
    return not stack or not other or stack[-1][::2] == other[-1][::2]


def before(m: Machine, w: Warp, ins: Instruction) -> Suspects:
    """Places for what is missing just before ``ins``: statements since the last synchronisation."""
    past = [p.ins for p in w.past[-NEAR:] if synchronises(p.ins) and _known(m, p.ins, ins)][-2:]
    if past:
        yield from _statements(m, "between the last synchronisation and this side", past[-1], ins, True)
        yield from _at(m, "this warp's last synchronisation before it", past[-1])
    if len(past) > 1:
        yield from _statements(m, "before this warp's last synchronisation", past[0], past[1], True)
        yield from _at(m, "this warp's last synchronisation but one", past[0])
    yield from _at(m, "this warp's last wait before it", history.last(w, ACQUIRE))


def _ending(m: Machine, ins: Instruction, later: Iterable[Instruction]) -> Suspects:
    """Candidates for what should have ended an access by ``ins``, among what its warp did later."""
    found: list[Instruction] = []
    for other, _ in zip(later, range(NEAR), strict=False):
        if synchronises(other) and _known(m, other, ins):
            found.append(other)
            if does(other, RELEASE):
                break
    drain = next((i for i in found if does(i, DRAIN)), None)
    commit = next((i for i in found if does(i, COMMIT)), None)
    yield from _at(m, "the wait for the other side", drain)
    if found:
        yield from _statements(m, "between the other side and what synchronises next", ins, found[0], False)
        yield from _at(m, "what synchronises next after the other side", found[0])
    yield from _at(m, "the commit of the other side", commit)
    if len(found) > 1:
        what = "before what hands the other side over"
        yield from _statements(m, what, found[-2], found[-1], True)
        yield from _at(m, "what hands the other side over", found[-1])


def _all_warps(cta: Cta) -> Iterator[Warp]:
    return (w for c in cta.cluster.ctas for w in c.warps)


def _owner(cta: Cta, agent: int) -> Warp | None:
    """The warp that an agent acts for; of a warpgroup the first."""
    for w in _all_warps(cta):
        stores, group = w.state.get("stores"), w.group
        own = (w.agent, w.state.get("cp_async_agent"), group.agent if group is not None else None)
        if agent in own or (stores is not None and agent in (stores.agent, stores.writer)):
            return w
    return None


def _after_access(m: Machine, cta: Cta, agent: int, clock: int, ins: Instruction | None) -> Suspects:
    """Candidates for what should have ended an agent's access by ``ins`` at its clock."""
    owner = _owner(cta, agent)
    if owner is None or ins is None:
        return
    if owner.agent == agent:
        yield from _ending(m, ins, history.since(owner, clock))
        return
    yield from _ending(m, ins, history.after(owner, ins))


def _waits(m: Machine, w: Warp, barrier: MBarrier) -> Suspects:
    """Places where this warp, or else any, waits for a barrier."""
    ring = list(_ring(m, barrier))
    lines = {use.ins.line for b in ring for use in b.uses.values() if does(use.ins, ACQUIRE)}
    mine = next((past.ins for past in reversed(w.past) if past.ins.line in lines), None)
    if mine is not None:
        yield from _at(m, "this warp's last wait for that barrier", mine)
    yield from _uses(m, ring, ACQUIRE, "where that barrier is waited for")


def race(m: Machine, w: Warp, ins: Instruction, cta: Cta, conflict: Conflict) -> Suspects:
    """Of two accesses to shared memory that nothing orders."""
    agent = cta.domain.agents.index(conflict.agent)
    if conflict.agent.kind is AgentKind.BULK_LOAD:
        barrier = next((b for c in cta.cluster.ctas for b in c.mbarriers.values() if b.agent == agent), None)
        yield from before(m, w, ins)
        if barrier is not None:
            yield from _waits(m, w, barrier)
            yield from _expects(m, [barrier])
        return
    yield from _alternating(before(m, w, ins), _after_access(m, cta, agent, conflict.clock, conflict.ins))
    yield from _at(m, "the other side", conflict.ins)
    yield from _at(m, "this side", ins)


def _alternating(*parts: Suspects) -> Suspects:
    """From each in turn."""
    left = list(parts)
    while left:
        for part in list(left):
            found = next(part, None)
            if found is None:
                left.remove(part)
            else:
                yield found


def unfenced(m: Machine, w: Warp, ins: Instruction, cta: Cta, conflict: Conflict) -> Suspects:
    """Of a store that the async proxy may not see."""
    agent = cta.domain.agents.index(conflict.agent)
    yield from _at(m, "the store", conflict.ins)
    yield from _after_access(m, cta, agent, conflict.clock, conflict.ins)
    yield from before(m, w, ins)


def global_race(m: Machine, w: Warp, ins: Instruction, other: Access | None) -> Suspects:
    """Of two accesses to global memory that nothing orders."""
    parts = [before(m, w, ins)]
    if other is not None:
        cta = next((c for c in m.ctas() if c.domain is other.domain), None)
        if cta is not None:
            parts.insert(0, _flags(m, cta))
            parts.append(_after_access(m, cta, other.agent, other.clock, other.ins))
    yield from _alternating(*parts)
    if other is not None:
        yield from _at(m, "the other side", other.ins)
    yield from _at(m, "this side", ins)


def _flags(m: Machine, cta: Cta) -> Suspects:
    """The flags with which a CTA hands on what it wrote to global memory."""
    for warp in cta.warps:
        flags = [
            p.ins for p in warp.past if p.ins.root in ("st", "red", "atom") and "async" not in p.ins.parts
        ]
        for flag in flags[:-3:-1]:
            yield from _at(m, "a flag that the other side's CTA sets", flag)


def registers(m: Machine, w: Warp, ins: Instruction, register: int) -> Suspects:
    """Of a register that a WGMMA still uses."""
    products = [p.ins for p in w.past if p.ins.root == "wgmma" and does(p.ins, ISSUE)]
    named = [i for i in products if register in operand_registers(i.operands[0])]
    issued = (named or products)[-1] if products else None
    if issued is not None:
        later = history.after(w, issued)
        drain = next((i for i in later if does(i, DRAIN)), None)
        commit = next((i for i in later if does(i, COMMIT) or i is drain), None)
        yield from _at(m, "the wait after this WGMMA", drain)
        yield from _at(m, "the WGMMA", issued)
        for start in (issued, commit, drain):
            if start is not None:
                next_ones = (i for i in history.after(w, start) if not does(i, ISSUE))
                yield from _statements(m, "after this WGMMA", start, next(next_ones, ins), False)
        yield from _at(m, "the commit after this WGMMA", commit)
    yield from _at(m, "the last wgmma.wait_group", history.last(w, DRAIN, family="wgmma"))
    yield from before(m, w, ins)


def stores_left(m: Machine, w: Warp, ins: Instruction | None) -> Suspects:
    """Of bulk stores that a warp does not wait for before it ends."""
    bulk = "cp.async.bulk."
    yield from _at(m, "the last wait for bulk stores", history.last(w, DRAIN, family=bulk))
    yield from _at(m, "the last commit of bulk stores", history.last(w, COMMIT, family=bulk))
    yield from _at(m, "the store", ins)
    if ins is not None:
        yield from _ending(m, ins, history.after(w, ins))
    if w.past:
        yield from _at(m, "this warp's last synchronisation", w.past[-1].ins)


# mbarriers


def _ring(m: Machine, barrier: MBarrier) -> Iterator[MBarrier]:
    """The barrier, then those that the same statement initialised."""
    yield barrier
    made = m.call_stack(barrier.made) if barrier.made is not None else None
    for other in barrier.cta.mbarriers.values():
        if other is not barrier and made is not None and other.made is not None:
            if m.call_stack(other.made) == made:
                yield other


def _uses(m: Machine, barriers: Iterable[MBarrier], kind: str, what: str, part: str = "") -> Suspects:
    """Places where barriers were used, ``part``: in the opcode."""
    for barrier in barriers:
        for use in barrier.uses.values():
            if does(use.ins, kind) and part in use.ins.opcode:
                yield from _at(m, what, use.ins)


def _expects(m: Machine, barriers: list[MBarrier]) -> Suspects:
    """Places where bytes are announced, and the copies that complete on the barrier."""
    yield from _uses(m, barriers, RELEASE, "where its bytes are announced", "expect_tx")
    yield from _uses(m, barriers, FENCE, "where its bytes are announced", "expect_tx")
    for barrier in barriers:
        for use in [use for use in barrier.uses.values() if "expect_tx" in use.ins.opcode]:
            for warp in use.warps:
                later = history.after(warp, use.ins)
                if later:
                    yield from _statements(m, "after its bytes are announced", use.ins, later[0], False)
                break
    yield from _uses(m, barriers, ISSUE, "a copy that completes on it")
    yield from _uses(m, barriers, RELEASE, "a copy that completes on it", "async")


def _initialised(m: Machine, barrier: MBarrier) -> Suspects:
    yield from _at(m, "where it is initialised", barrier.made)


def counts(m: Machine, barrier: MBarrier) -> Suspects:
    """Of a barrier whose arrivals or bytes do not add up."""
    ring = list(_ring(m, barrier))
    if barrier.tx:
        yield from _expects(m, ring)
    yield from _initialised(m, barrier)
    yield from _uses(m, ring, RELEASE, "an arrival on it")
    yield from _uses(m, ring, ACQUIRE, "where it is waited for")


def uninitialised_barrier(m: Machine, w: Warp, ins: Instruction, cta: Cta, offset: int) -> Suspects:
    """Of an mbarrier that no thread has initialised: the initialisations of its neighbours."""
    near = sorted(cta.mbarriers.values(), key=lambda b: abs(b.offset - offset))[:2]
    for barrier in near:
        yield from _at(m, "where its neighbour is initialised", barrier.made)
    if not near:
        for made, later in itertools.pairwise(_setup(m)):
            yield from _at(m, "where the kernel's mbarriers become visible", later)
            yield from _statements(m, "after the kernel's mbarriers are initialised", later, ins, False)
            yield from _at(m, "the kernel's last initialisation", made)
    yield from before(m, w, ins)


def _setup(m: Machine) -> list[Instruction]:
    """The kernel's last initialisation of an mbarrier, and what synchronises next in the text."""
    all_of = m.kernel.instructions
    at = max((n for n, i in enumerate(all_of) if i.parts[:2] == ("mbarrier", "init")), default=len(all_of))
    later = (i for i in all_of[at + 1 :] if synchronises(i))
    return [*all_of[at : at + 1], *itertools.islice(later, 1)]


def initialisation(m: Machine, w: Warp, ins: Instruction, barrier: MBarrier) -> Suspects:
    """Of an mbarrier that is used before its initialisation is visible."""
    owner = _owner(barrier.cta, barrier.init_by)
    made = [p.ins for p in owner.past if p.ins.parts[:2] == ("mbarrier", "init")] if owner is not None else []
    if owner is not None and made:
        later = [i for i in history.after(owner, made[-1]) if synchronises(i)]
        if later:
            yield from _at(m, "what synchronises after the initialisations", later[0])
            yield from _statements(m, "before that, after the initialisations", made[-1], later[0], True)
            yield from _statements(m, "after the initialisations", made[-1], later[0], False)
        yield from _at(m, "the last initialisation of that warp", made[-1])
    yield from _initialised(m, barrier)
    yield from before(m, w, ins)


def unwritten(m: Machine, w: Warp, ins: Instruction, cta: Cta, offset: int | None) -> Suspects:
    """Of bytes that nothing has written: the copies into their buffer."""
    if offset is not None:
        for copy in m.names.copies_into(offset):
            yield from _at(m, "a copy into this buffer", copy)
    yield from before(m, w, ins)


def deadlock(m: Machine, waiting: list[Warp]) -> Suspects:
    """Of warps that wait for each other: what the barriers lack that they wait for."""
    barriers = [b for cta in m.ctas() for b in cta.mbarriers.values() if b.waiters]
    rings: dict[object, MBarrier] = {}
    # Missing bytes first, then phases some of whose arrivals came, then those that none has reached.
    for barrier in sorted(barriers, key=lambda b: (b.tx == 0, b.pending == b.expected)):
        stack = m.call_stack(barrier.made) if barrier.made is not None else None
        rings.setdefault(stack if stack is not None else barrier, barrier)
    yield from _alternating(*(_lacking(m, barrier) for barrier in rings.values()))
    for warp in waiting:
        ins = m.program.steps[warp.frames[-1].pc].first
        yield from _at(m, "a warp waits here", ins)
        yield from before(m, warp, ins)


def _lacking(m: Machine, barrier: MBarrier) -> Suspects:
    """Lines that should have completed a barrier's phase."""
    ring = list(_ring(m, barrier))
    if barrier.tx:
        yield from _expects(m, [barrier])
        yield from _expects(m, ring)
    if barrier.pending < barrier.expected:
        yield from _initialised(m, barrier)
    for warp in barrier.waiters:
        yield from _at(m, "where it is waited for", m.program.steps[warp.frames[-1].pc].first)
        break
    yield from _alternating(_uses(m, ring, RELEASE, "an arrival on it"), _partners(m, barrier))
    yield from _initialised(m, barrier)


def _partners(m: Machine, barrier: MBarrier) -> Suspects:
    """Places for the arrival that nobody made: after the waits for what the waiting warp completes.

    A producer waits for a stage to be empty, and fills it; who waits for it to be full gives it back.
    """
    filled = [
        other
        for other in barrier.cta.mbarriers.values()
        if other is not barrier
        and any(
            not use.warps.isdisjoint(barrier.waiters) and does(use.ins, RELEASE)
            for use in other.uses.values()
        )
    ]
    for other in filled:
        waits = {use.ins.line for use in other.uses.values() if does(use.ins, ACQUIRE)}
        seen: set[int] = set()
        missing = [w for w in _waiting_for(other) if not _arrived(barrier, w)]
        for warp in missing or _waiting_for(other):
            done = [p.ins for p in warp.past]
            at = next((i for i in range(len(done) - 1, -1, -1) if done[i].line in waits), None)
            if at is None or done[at].line in seen:
                continue
            seen.add(done[at].line)
            later = [i for i in done[at + 1 :] if synchronises(i)]
            drained = [n for n, i in enumerate(later) if does(i, DRAIN) and i.root == "wgmma"]
            start, rest = (done[at], later) if not drained else (later[drained[-1]], later[drained[-1] + 1 :])
            yield from _at(m, "after this wait an arrival belongs", start)
            yield from _at(m, "after this wait an arrival belongs", done[at])
            if rest:
                yield from _statements(m, "here an arrival belongs", start, rest[0], False)
                yield from _at(m, "before this an arrival belongs", rest[0])


def _waiting_for(barrier: MBarrier) -> list[Warp]:
    """The warps that waited for a barrier, in order."""
    found = {w for u in barrier.uses.values() if does(u.ins, ACQUIRE) for w in u.warps}
    return sorted(found, key=lambda w: (w.cta.linear, w.number))


def _arrived(barrier: MBarrier, w: Warp) -> bool:
    tally = barrier.tally.get(w)
    return tally is not None and tally.phase == barrier.phase and tally.now > 0
