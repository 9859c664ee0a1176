"""Tables of a barrier: which warps arrived, how often, and which did not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .barriers import MBarrier, NamedBarrier
    from .machine import Machine
    from .state import Cta, Warp


def of_mbarrier(m: Machine, barrier: MBarrier) -> str:
    """The table of an mbarrier in its current phase."""
    made = m.source(barrier.made) if barrier.made is not None else ""
    lines = [
        f"    mbarrier {barrier.offset:#x} of CTA {barrier.cta.index}: {barrier.describe()}"
        + (f"; initialised at {made}" if made else "")
    ]
    if barrier.tx > 0:
        lines.append(f"      {barrier.tx} bytes were announced by expect_tx and not copied")
    elif barrier.tx < 0:
        lines.append(f"      {-barrier.tx} bytes were copied and not announced by expect_tx")
    for warp, arrivals in sorted(
        barrier.tally.items(), key=lambda item: (item[0].cta.linear, item[0].number)
    ):
        now = arrivals.now if arrivals.phase == barrier.phase else 0
        lines.append(
            f"      {_name(m, warp):<34} arrived {now} times in this phase, {arrivals.total} in all; "
            + _state(m, warp)
        )
    return "\n".join(lines + _others(m, barrier.cta, set(barrier.tally)))


def of_named(m: Machine, cta: Cta, barrier: NamedBarrier) -> str:
    """The table of a named barrier."""
    expected = barrier.expected or 32 * sum(1 for warp in cta.warps if warp.frames)
    lines = [f"    barrier {barrier.number} of CTA {cta.index}: {barrier.arrived} of {expected} threads"]
    for warp in dict.fromkeys(barrier.who):
        times = 32 * barrier.who.count(warp)
        lines.append(f"      {_name(m, warp):<34} arrived with {times} threads; {_state(m, warp)}")
    return "\n".join(lines + _others(m, cta, set(barrier.who)))


def _others(m: Machine, cta: Cta, arrived: set[Warp]) -> list[str]:
    """Warps of the CTA that never arrived, those that do the same together."""
    by_state: dict[str, list[int]] = {}
    for warp in cta.warps:
        if warp not in arrived:
            role = m.role(warp)
            by_state.setdefault(_state(m, warp) + (f" ({role})" if role else ""), []).append(warp.number)
    return [f"      never arrived: warps {numbers}, {state}" for state, numbers in by_state.items()]


def _name(m: Machine, warp: Warp) -> str:
    role = m.role(warp)
    return warp.name + (f" ({role})" if role else "")


def _state(m: Machine, warp: Warp) -> str:
    if not warp.frames:
        return "ended"
    at = m.source(m.program.steps[warp.frames[-1].pc].first)
    return ("waits" if warp.waiting else "runs") + (f" at {at}" if at else "")
