"""Each warp's history of synchronising, latest last: where to look when some of it is missing or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .machine import Machine
    from .program import Program
    from .ptx import Instruction
    from .state import Array, Warp

BLOCK = object()  # result of a handler: the warp waits, the instruction runs again when it is woken
HISTORY = 256  # synchronising instructions that are remembered of a warp, at least
ACQUIRE, RELEASE, FENCE, ISSUE, COMMIT, DRAIN = "acquire", "release", "fence", "issue", "commit", "drain"
"""A wait; an arrival; a fence; asynchronous work begun, put in a group, and its group waited for."""
_SYNCHRONISES = frozenset((ACQUIRE, RELEASE, FENCE, COMMIT, DRAIN))


class Past(NamedTuple):
    """An instruction that a warp executed at its clock."""

    ins: Instruction
    clock: int


@lru_cache(maxsize=1024)
def what_of(parts: tuple[str, ...]) -> frozenset[str]:
    """Kinds of what an opcode does for the order of accesses; none for most."""
    root, second = parts[0], parts[1] if len(parts) > 1 else ""
    if root in ("bar", "barrier") and "cluster" not in parts:
        return frozenset((RELEASE,) if "arrive" in parts else () if "warp" in parts else (ACQUIRE, RELEASE))
    if root == "barrier":
        return frozenset((ACQUIRE if "wait" in parts else RELEASE,))
    if root == "mbarrier":
        kind = {"try_wait": ACQUIRE, "test_wait": ACQUIRE, "arrive": RELEASE, "arrive_drop": RELEASE}
        return frozenset((kind.get(second, FENCE),))
    if any(part in ("commit_group", "wait_group", "wait_all") for part in parts):
        return frozenset((COMMIT,) if "commit_group" in parts else (ACQUIRE, DRAIN))
    if root == "cp" and second in ("async", "reduce"):
        return frozenset((RELEASE,) if parts[2:4] == ("mbarrier", "arrive") else (ISSUE,))
    if root in ("fence", "membar") or parts[:2] == ("wgmma", "fence"):
        return frozenset((FENCE,))
    if root == "wgmma":
        return frozenset((ISSUE,))
    if root == "griddepcontrol":
        return frozenset((ACQUIRE,) if second == "wait" else (RELEASE,))
    if root in ("ld", "st", "atom", "red"):
        strong = root in ("atom", "red") or any(
            p in parts for p in ("relaxed", "acquire", "release", "async")
        )
        kinds = (ACQUIRE,) if root == "ld" else (RELEASE,) if root in ("st", "red") else (ACQUIRE, RELEASE)
        return frozenset(kinds if strong else ())
    return frozenset()


def does(ins: Instruction, kind: str) -> bool:
    """True for an instruction of this kind."""
    return kind in what_of(ins.parts)


def synchronises(ins: Instruction) -> bool:
    """True for what orders accesses, which the mere issue of asynchronous work does not."""
    return not _SYNCHRONISES.isdisjoint(what_of(ins.parts))


def keep(program: Program) -> None:
    """Let the steps of `program` that synchronise write each warp's history."""
    for step in program.steps:
        if step.kind == "op" and step.handler is not None and what_of(step.first.parts):
            step.handler = _keeping(step.handler)


def _keeping(handler: Callable) -> Callable:
    def run(m: Machine, w: Warp, ins: Instruction, mask: Array) -> object:
        clock = w.clock if w.began is None else w.began
        result = handler(m, w, ins, mask)
        w.began = clock if result is BLOCK else None
        if result is not BLOCK:
            remember(w, ins, clock)
        return result

    return run


def remember(w: Warp, ins: Instruction, clock: int) -> None:
    """Write an instruction that began at this clock into the warp's history."""
    if w.row is not None:
        w.row.remember(w.frames[-1].pc, clock)
        return
    past = w.past
    if not past or past[-1].ins is not ins:
        past.append(Past(ins, clock))
        if len(past) > 2 * HISTORY:
            del past[:HISTORY]


def last(w: Warp, *kinds: str, family: str = "") -> Instruction | None:
    """The latest instruction of one of these kinds. ``family``: how its opcode begins."""
    return next(
        (
            past.ins
            for past in reversed(w.past)
            if not what_of(past.ins.parts).isdisjoint(kinds) and past.ins.opcode.startswith(family)
        ),
        None,
    )


def since(w: Warp, clock: int) -> Iterator[Instruction]:
    """Instructions from the release on that ended this clock: accesses at the clock came before."""
    known = iter(w.past)
    for past in known:
        if past.clock > clock or (past.clock == clock and does(past.ins, RELEASE)):
            yield past.ins
            break
    for past in known:
        yield past.ins


def after(w: Warp, ins: Instruction) -> list[Instruction]:
    """Instructions after the latest ``ins``; none where the warp did not execute that."""
    found: list[Instruction] = []
    for past in reversed(w.past):
        if past.ins is ins:
            return found[::-1]
        found.append(past.ins)
    return []
