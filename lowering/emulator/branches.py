"""Branches: lanes that diverge get frames of their own, which end where the lanes meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .state import Frame

if TYPE_CHECKING:
    from .program import Step
    from .ptx import Instruction
    from .state import Warp

Array = np.ndarray


def guard_of(warp: Warp, ins: Instruction) -> Array:
    """Lanes that the guard of an instruction lets through."""
    assert ins.pred is not None
    value = warp.R[ins.pred.index]
    return ~value if ins.pred.negated else value


def branch(warp: Warp, frame: Frame, step: Step) -> None:
    """Take a branch, or part the lanes of the frame."""
    if step.first.pred is None:
        frame.pc = step.target
        return
    taken = frame.mask & guard_of(warp, step.first)
    if not taken.any():
        frame.pc += 1
        return
    if (taken == frame.mask).all():
        frame.pc = step.target
        return
    after, meet = frame.pc + 1, step.reconverge
    if meet == frame.reconverge and len(warp.frames) > 1:
        warp.frames.pop()
    else:
        frame.pc = meet
    warp.frames.append(Frame(frame.mask & ~taken, after, meet, False))
    warp.frames.append(Frame(taken, step.target, meet, False))
