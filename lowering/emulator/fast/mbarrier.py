"""mbarriers in compiled code: arrivals, and waits for phases that are complete.

Each operation does nothing and says so where anything is out of the ordinary: the Python code then does it.
"""

from __future__ import annotations

import numpy as np

from . import chance, places
from . import opcodes as o
from .jit import jit


@jit
def _find(warp, address):  # type: ignore[no-untyped-def]
    """The place of the mbarrier at a cluster-window address, and the row of its CTA; zeros for none."""
    rank, offset = address >> 24, address & 0xFFFFFF
    if rank < 0 or rank >= warp[o.RANKS]:
        return np.int64(0), np.int64(0)
    own = places.longs(warp[o.CTA], o.CTA_COLUMNS)
    place = places.longs(own[o.PEERS_AT], warp[o.RANKS])[rank]
    if place == 0:
        return np.int64(0), np.int64(0)
    cta = places.longs(place, o.CTA_COLUMNS)
    known = places.table(cta[o.BARRIERS_AT], cta[o.BARRIERS], 2)
    for i in range(cta[o.BARRIERS]):
        if known[i, 0] == offset:
            return known[i, 1], place
    return np.int64(0), np.int64(0)


@jit
def known_together(mine, others):  # type: ignore[no-untyped-def]
    """The number of what two know together; -1 where it has none."""
    if others == 0 or (mine == others and mine != 2):
        return mine
    return others if mine == 0 and others != 2 else -1


@jit
def usable(warp, barrier, vc):  # type: ignore[no-untyped-def]
    """True if the barrier's initialisation comes before this use, and there is room to note the use."""
    users = places.table(barrier[o.M_USERS_AT], barrier[o.M_USERS_ROOM], 1 + barrier[o.M_WARPS])
    noted = barrier[o.M_USED] < barrier[o.M_USERS_ROOM]
    for i in range(barrier[o.M_USED]):
        noted |= users[i, 0] == warp[o.AT]
    if not noted or not warp[o.CHECKS] or vc[barrier[o.M_INIT_BY]] >= barrier[o.M_INIT_CLOCK]:
        return noted
    reached = places.words(warp[o.REACHED_AT], warp[o.AGENTS])
    reaches = warp[o.REACHED] and reached[barrier[o.M_INIT_BY]] >= barrier[o.M_INIT_CLOCK]
    return reaches and barrier[o.M_INIT_FENCED] != 0


@jit
def use(warp, barrier):  # type: ignore[no-untyped-def]
    """Note the use, for reports."""
    users = places.table(barrier[o.M_USERS_AT], barrier[o.M_USERS_ROOM], 1 + barrier[o.M_WARPS])
    for i in range(barrier[o.M_USED]):
        if users[i, 0] == warp[o.AT]:
            users[i, 1 + warp[o.IN_CLUSTER]] = 1
            return
    at = barrier[o.M_USED]
    users[at, 0] = warp[o.AT]
    users[at, 1 + warp[o.IN_CLUSTER]] = 1
    barrier[o.M_USED] += 1


@jit
def take_most(into, other):  # type: ignore[no-untyped-def]
    """Take the larger clocks."""
    for i in range(into.shape[0]):
        into[i] = max(into[i], other[i])


@jit
def address_of(file, row, lane):  # type: ignore[no-untyped-def]
    """The cluster-window address that a lane names."""
    at = row[o.A] + lane
    base = np.int64(file[3][at]) if row[o.A_WIDTH] == o.LONG else np.int64(file[2][at])
    return (base + row[o.OFFSET]) & ((1 << 60) - 1)


@jit
def one_address(file, row, lanes):  # type: ignore[no-untyped-def]
    """The first of these lanes, and the address that all of them name; -1 for the lane where they differ."""
    first = 0
    while not lanes >> first & 1:
        first += 1
    address = address_of(file, row, first)
    for lane in range(first + 1, 32):
        if lanes >> lane & 1 and address_of(file, row, lane) != address:
            return -1, address
    return first, address


@jit
def begun(warp, cta, vc):  # type: ignore[no-untyped-def]
    """True if a CTA has not ended, and the warp knows that it has begun."""
    reached, found = places.words(warp[o.REACHED_AT], warp[o.AGENTS]), False
    for agent in range(cta[o.FIRST_AGENT], cta[o.FIRST_AGENT] + cta[o.WARPS]):
        found |= vc[agent] > 0 or (warp[o.REACHED] and reached[agent] > 0)
    return found and not cta[o.ENDED]


@jit
def _may_arrive(warp, address, count, memory):  # type: ignore[no-untyped-def]
    """The place of the mbarrier that arrivals may be counted on here; zero where not."""
    place, owner = _find(warp, address)
    if place == 0:
        return place
    barrier = places.longs(place, o.M_COLUMNS)
    known = known_together(barrier[o.M_ARRIVING_KNOWN], warp[o.KNOWN])
    if (
        known < 0
        or known_together(barrier[o.M_DONE_KNOWN], known) < 0
        or not usable(warp, barrier, memory[o.VC])
    ):
        return np.int64(0)
    full = barrier[o.M_ARRIVED] == barrier[o.M_ARRIVED_ROOM]
    if full or barrier[o.M_TWICE] or count > barrier[o.M_PENDING] or barrier[o.M_EXPECTED] == 0:
        return np.int64(0)
    if owner != warp[o.CTA] and warp[o.CHECKS]:
        if not begun(warp, places.longs(owner, o.CTA_COLUMNS), memory[o.VC]):
            return np.int64(0)
    return place


@jit
def _count(warp, barrier, count, memory):  # type: ignore[no-untyped-def]
    """Count arrivals of a warp."""
    number, phase = warp[o.IN_CLUSTER], barrier[o.M_PHASE]
    tally = places.table(barrier[o.M_TALLY_AT], barrier[o.M_WARPS], o.TALLY_COLUMNS)[number]
    tally[1] = count + (tally[1] if tally[0] == phase else 0)
    tally[0], tally[2], tally[3] = phase, tally[2] + count, 1
    arrived = places.table(barrier[o.M_ARRIVED_AT], barrier[o.M_ARRIVED_ROOM], 2)[barrier[o.M_ARRIVED]]
    arrived[0], arrived[1] = count, number
    barrier[o.M_ARRIVED] += 1
    clocks, agents = places.words(barrier[o.M_CLOCKS_AT], 4 * warp[o.AGENTS]), warp[o.AGENTS]
    take_most(clocks[:agents], memory[o.VC])
    take_most(clocks[agents : 2 * agents], places.words(warp[o.FC_AT], agents))
    barrier[o.M_ARRIVING_KNOWN] = known_together(barrier[o.M_ARRIVING_KNOWN], warp[o.KNOWN])
    barrier[o.M_PENDING] -= count


@jit
def _complete(barrier, agents):  # type: ignore[no-untyped-def]
    """Complete the phase if it is due; returns whether it was."""
    if barrier[o.M_PENDING] > 0 or barrier[o.M_TX] != 0:
        return False
    barrier[o.M_PHASE] += 1
    barrier[o.M_PENDING] += barrier[o.M_EXPECTED]
    clocks = places.words(barrier[o.M_CLOCKS_AT], 4 * agents)
    take_most(clocks[2 * agents :], clocks[: 2 * agents])
    barrier[o.M_DONE_KNOWN] = known_together(barrier[o.M_DONE_KNOWN], barrier[o.M_ARRIVING_KNOWN])
    for which in range(2):
        clocks[(2 + which) * agents + barrier[o.M_AGENT]] = barrier[o.M_PHASE]
        clocks[which * agents : (which + 1) * agents - 1] = 0
    barrier[o.M_ARRIVING_KNOWN], barrier[o.M_ARRIVED] = 0, 0
    return True


@jit
def settle(barrier, agents):  # type: ignore[no-untyped-def]
    """Complete the phase if it is due: 1 or 0, or -1 and nothing done where others' clusters are known of."""
    if known_together(barrier[o.M_DONE_KNOWN], barrier[o.M_ARRIVING_KNOWN]) < 0:
        return -1
    return 1 if _complete(barrier, agents) else 0


@jit
def arrive(file, row, lanes, warp, memory, log):  # type: ignore[no-untyped-def]
    """``mbarrier.arrive`` and its ``.expect_tx`` by these lanes.

    Returns the number of phases that it completes, which are so many entries of the log, before one that
    names the peers where it arrives; -1 and nothing done where it is left to the Python code.
    """
    found, counts, amounts = np.zeros(4, np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64)
    addresses, distinct = np.zeros(4, np.int64), 0
    expects = row[o.FLAGS] & 16
    for lane in range(32):
        if not lanes >> lane & 1:
            continue
        address, which = address_of(file, row, lane), 0
        while which < distinct and addresses[which] != address:
            which += 1
        if which == 4:
            return -1
        addresses[which] = address
        distinct = max(distinct, which + 1)
        amount = np.int64(file[2][row[o.B] + lane]) if row[o.B] >= 0 else 1
        amounts[which] += amount
        counts[which] += 1 if expects else amount
    if log.shape[0] < distinct + 1:
        return -1
    for i in range(distinct):
        found[i] = _may_arrive(warp, addresses[i], counts[i], memory)
        if found[i] == 0:
            return -1
    completed = 0
    for i in range(distinct):
        barrier = places.longs(found[i], o.M_COLUMNS)
        use(warp, barrier)
        if row[o.TARGET] >= 0:
            for lane in range(32):
                if lanes >> lane & 1 and address_of(file, row, lane) == addresses[i]:
                    file[3][row[o.TARGET] + lane] = barrier[o.M_PHASE]
        if expects:
            barrier[o.M_TX] += amounts[i]
        _count(warp, barrier, counts[i], memory)
        if _complete(barrier, warp[o.AGENTS]):
            log[completed, 0], log[completed, 2] = o.COMPLETED, addresses[i]
            log[completed, 3] = barrier[o.M_PHASE]
            completed += 1
    log[completed, 2], log[completed, 3] = warp[o.CLOCK], 0
    for i in range(distinct):
        if addresses[i] >> 24 != warp[o.RANK]:
            log[completed, 3] |= 1 << (addresses[i] >> 24)
    memory[o.VC][warp[o.AGENT]] += 1
    warp[o.CLOCK] += 1
    warp[o.RELEASED], warp[o.LEARNED] = warp[o.STEP], 1
    return completed


@jit
def _fail(file, row, lanes, warp, barrier, launch, entry):  # type: ignore[no-untyped-def]
    """A wait for a phase that is not complete: the warp is suspended, or learns that it is not."""
    blocks = row[o.FLAGS] & 16 and not warp[o.GAVE_UP]  # try_wait
    warp[o.GAVE_UP] = warp[o.SUSPENDED] = 0
    if blocks and chance.fraction(launch[o.RANDOM], launch[o.RANDOM_DOUBLE]) < 0.75:
        warp[o.BLOCKED] = warp[o.SUSPENDED] = 1
        entry[5], entry[6], entry[7] = barrier[o.M_PHASE] & 1, barrier[o.M_PHASE], barrier[o.M_PENDING]
        entry[8], entry[9] = barrier[o.M_EXPECTED], barrier[o.M_TX]
        return
    for lane in range(32):
        if lanes >> lane & 1:
            file[0][row[o.TARGET] + lane] = 0


@jit
def wait(file, row, lanes, warp, memory, launch, entry):  # type: ignore[no-untyped-def]
    """``mbarrier.try_wait.parity`` and ``test_wait`` of one barrier; False, and nothing done, for others."""
    first, address = one_address(file, row, lanes)
    if first < 0:
        return False
    parity = np.int64(file[2][row[o.B] + first]) & 1
    place, _ = _find(warp, address)
    if place == 0:
        return False
    barrier = places.longs(place, o.M_COLUMNS)
    known = known_together(warp[o.KNOWN], barrier[o.M_DONE_KNOWN])
    if known < 0 or not usable(warp, barrier, memory[o.VC]):
        return False
    if barrier[o.M_PHASE] & 1 == parity:
        use(warp, barrier)
        _fail(file, row, lanes, warp, barrier, launch, entry)
        entry[3] = address if warp[o.BLOCKED] else 0
        return True
    if row[o.FLAGS] & 16:  # try_wait
        last = places.table(barrier[o.M_WAITS_AT], barrier[o.M_WARPS], 2)[warp[o.IN_CLUSTER]]
        if last[0] == barrier[o.M_PHASE] and warp[o.RELEASED] > last[1]:
            return False
        last[0], last[1] = barrier[o.M_PHASE], warp[o.STEP]
    use(warp, barrier)
    agents = warp[o.AGENTS]
    done = places.words(barrier[o.M_CLOCKS_AT], 4 * agents)[2 * agents :]
    take_most(memory[o.VC], done[:agents])
    take_most(places.words(warp[o.FC_AT], agents), done[agents:])
    warp[o.KNOWN], warp[o.GAVE_UP], warp[o.SUSPENDED] = known, 0, 0
    warp[o.CONVERGED] = warp[o.LEARNED] = 1
    for lane in range(32):
        if lanes >> lane & 1:
            file[0][row[o.TARGET] + lane] = 1
    return True


@jit
def proxy_fence(lanes, warp, memory):  # type: ignore[no-untyped-def]
    """``fence.proxy.async`` of shared memory."""
    unfenced, left = places.flags(warp[o.UNFENCED_AT], 32), False
    for lane in range(32):
        if lanes >> lane & 1:
            unfenced[lane] = False
        left |= unfenced[lane]
    if left:
        return
    fc = places.words(warp[o.FC_AT], warp[o.AGENTS])
    fc[warp[o.AGENT]] = memory[o.VC][warp[o.AGENT]]
    if warp[o.COPIES] >= 0:
        fc[warp[o.COPIES]] = memory[o.VC][warp[o.COPIES]]
    warp[o.LEARNED] = 1


@jit
def init_fence(warp):  # type: ignore[no-untyped-def]
    """``fence.mbarrier_init``."""
    cta = places.longs(warp[o.CTA], o.CTA_COLUMNS)
    known = places.table(cta[o.BARRIERS_AT], cta[o.BARRIERS], 2)
    for i in range(cta[o.BARRIERS]):
        if known[i, 1]:
            barrier = places.longs(known[i, 1], o.M_COLUMNS)
            if barrier[o.M_INIT_BY] == warp[o.AGENT]:
                barrier[o.M_INIT_FENCED] = 1


@jit
def grid_wait(warp):  # type: ignore[no-untyped-def]
    """``griddepcontrol.wait``; False, and nothing done, where its warp knows of other clusters."""
    known = known_together(warp[o.KNOWN], 1)
    if known < 0:
        return False
    warp[o.KNOWN], warp[o.LEARNED] = known, 1
    return True
