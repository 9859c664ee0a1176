"""Turns of the scheduler in compiled code: a warp drawn from those that can run goes on for a few steps."""

from __future__ import annotations

from . import chance, interpreter, places
from . import opcodes as o
from .jit import jit


@jit
def _begin(turns, launch):  # type: ignore[no-untyped-def]
    """Draw a warp and its number of steps; or say why Python code comes first."""
    if turns[o.T_STEP] - turns[o.T_STARTED] > turns[o.T_MOST]:
        return o.LIMIT
    if turns[o.T_EVENT] <= turns[o.T_STEP] or turns[o.T_READY] == 0:
        return o.EVENTS
    if launch[o.LOGS + 1] - launch[o.LOGGED_ALL] < o.LOG or turns[o.T_RAN] == turns[o.T_RAN_ROOM]:
        return o.FULL
    state, word = launch[o.RANDOM], launch[o.RANDOM_WORD]
    at = chance.below(turns[o.T_READY], state, word)
    turns[o.T_WARP] = places.longs(turns[o.T_READY_AT], turns[o.T_READY])[at]
    turns[o.T_LEFT] = 1 + chance.below(o.MOST_STEPS - 1, state, word)
    return o.NOTHING


@jit
def _block(turns):  # type: ignore[no-untyped-def]
    """The turn of a warp ends, which can run no longer."""
    ready, last = places.longs(turns[o.T_READY_AT], turns[o.T_READY]), turns[o.T_READY] - 1
    at = 0
    while ready[at] != turns[o.T_WARP]:
        at += 1
    for i in range(at, last):
        ready[i] = ready[i + 1]
    turns[o.T_READY], turns[o.T_LEFT] = last, 0


@jit
def run(turns, launch):  # type: ignore[no-untyped-def]
    """Turns until Python code has something to do; returns what.

    A turn that is not over, with steps LEFT, goes on at the next call.
    """
    while True:
        if turns[o.T_LEFT] == 0:
            why = _begin(turns, launch)
            if why != o.NOTHING:
                return why
        warp = places.longs(turns[o.T_WARP], o.WARP_COLUMNS)
        if warp[o.HELD]:
            return o.STEP_OF_WARP
        cta = places.longs(warp[o.CTA], o.CTA_COLUMNS)
        if cta[o.NOTES_COUNT] + 2 * o.MOST_STEPS > cta[o.NOTES_ROOM]:  # a WGMMA takes two
            return o.ROOM
        if not warp[o.RAN]:
            places.longs(turns[o.T_RAN_AT], turns[o.T_RAN_ROOM])[turns[o.T_RAN]] = turns[o.T_WARP]
            turns[o.T_RAN] += 1
            warp[o.RAN] = 1
        warp[o.LEFT], warp[o.STEP] = turns[o.T_LEFT], turns[o.T_STEP]
        urgent = interpreter.run(launch, warp)
        turns[o.T_STEP] += warp[o.DONE]
        turns[o.T_LEFT] -= warp[o.SPENT]
        if warp[o.BLOCKED]:
            warp[o.BLOCKED] = 0
            _block(turns)
        if urgent:
            return o.WORK
        if turns[o.T_LEFT] > 0:
            return o.STEP_OF_WARP
