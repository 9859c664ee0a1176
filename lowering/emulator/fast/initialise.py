"""``mbarrier.init`` in compiled code."""

from __future__ import annotations

import numpy as np

from . import memory as shared
from . import opcodes as o
from . import places
from .jit import jit
from .mbarrier import one_address


@jit
def mbarrier(file, row, lanes, warp, memory, entry):  # type: ignore[no-untyped-def]
    """An mbarrier where none has been; False, and nothing done, where it is left to the Python code."""
    first, address = one_address(file, row, lanes)
    if first < 0:
        return False
    offset, size = address & 0xFFFFFF, memory[0].shape[0]
    if offset % 8 or offset < 1024 or offset + 8 > size:
        return False
    cta = places.longs(warp[o.CTA], o.CTA_COLUMNS)
    known = places.table(cta[o.BARRIERS_AT], cta[o.BARRIERS_ROOM], 2)
    for i in range(cta[o.BARRIERS]):
        if known[i, 0] == offset:
            return False
    room, agents = places.longs(cta[o.BARRIER_ROOM_AT], 4), places.longs(cta[o.DOMAIN_AT], 2)
    full = cta[o.BARRIERS] == cta[o.BARRIERS_ROOM] or room[o.R_USED] == room[o.R_SIZE]
    if full or agents[o.D_AGENTS] == agents[o.D_CAPACITY]:
        return False
    offsets = np.empty(1, np.int64)
    offsets[0] = offset
    if not shared.may_write(memory, warp, offsets, 8):
        return False
    unfenced = places.flags(warp[o.UNFENCED_AT], 32)
    for lane in range(32):
        if lanes >> lane & 1:
            unfenced[lane] = True
    place = room[o.R_FIRST] + room[o.R_USED] * room[o.R_STEP]
    barrier = places.longs(place, o.M_COLUMNS)
    barrier[o.M_EXPECTED] = barrier[o.M_PENDING] = np.int64(file[2][row[o.B] + first])
    barrier[o.M_AGENT], barrier[o.M_INIT_BY] = agents[o.D_AGENTS], warp[o.AGENT]
    barrier[o.M_INIT_CLOCK] = warp[o.CLOCK]
    known[cta[o.BARRIERS], 0], known[cta[o.BARRIERS], 1] = offset, place
    entry[3], entry[5], entry[6], entry[7] = 1, offset, agents[o.D_AGENTS], room[o.R_USED]
    cta[o.BARRIERS] += 1
    room[o.R_USED] += 1
    agents[o.D_AGENTS] += 1
    return True
