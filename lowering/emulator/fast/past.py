"""A warp's history of synchronising, as rows of a step and a clock, in compiled code: see `history`."""

from __future__ import annotations

from . import opcodes as o
from . import places
from .jit import jit


@jit
def remember(warp, step, clock):  # type: ignore[no-untyped-def]
    """Write a step that began at this clock into the history, or when its wait began."""
    if warp[o.BEGAN] >= 0:
        clock, warp[o.BEGAN] = warp[o.BEGAN], -1
    past, used = places.table(warp[o.PAST_AT], o.PAST_ROOM, 2), warp[o.PAST_USED]
    if used and past[used - 1, 0] == step:
        return
    past[used, 0], past[used, 1] = step, clock
    used += 1
    if used == o.PAST_ROOM:
        for i in range(o.PAST_ROOM // 2, used):
            past[i - o.PAST_ROOM // 2] = past[i]
        used -= o.PAST_ROOM // 2
    warp[o.PAST_USED] = used
