"""Roles of warps: producer, consumer 0…, from what they have executed.

A warp that starts TMA loads and no matrix work is a producer, one that does the opposite a consumer; before
they have come so far, ``setmaxnreg`` tells: producers give registers away. Where a CTA has not both, its
warps have no roles. Consumers are numbered by warpgroup where the kernel uses WGMMA, and by warp elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ptx import Instruction
    from .state import Cta, Warp

LOAD, MATRIX, LESS, MORE = "load", "matrix", "fewer registers", "more registers"


def hint_of(ins: Instruction) -> str:
    """Hint that executing this instruction gives of a warp's role; mostly none."""
    if ins.root in ("wgmma", "mma") and (ins.root == "mma" or ins.has("mma_async")):
        return MATRIX
    if (
        ins.root == "cp"
        and ins.has("bulk")
        and ins.parts[1] == "async"
        and "complete_tx::bytes" in ins.opcode
    ):
        return LOAD
    if ins.root == "setmaxnreg":
        return LESS if ins.has("dec") else MORE
    return ""


def _kind(did: set[str]) -> str:
    for produces, consumes in ((LOAD, MATRIX), (LESS, MORE)):
        if (produces in did) != (consumes in did):
            return "producer" if produces in did else "consumer"
    return ""


def role(warp: Warp) -> str:
    """``producer``, ``consumer 0``… or nothing."""
    return of_cta(warp.cta).get(warp, "")


def of_cta(cta: Cta) -> dict[Warp, str]:
    """The roles of a CTA's warps, of those that have one."""
    kinds = {w: kind for w in cta.warps if (kind := _kind(w.did))}
    if len(set(kinds.values())) < 2:
        return {}
    unit = 4 if cta.machine.uses_wgmma else 1
    groups = sorted({w.number // unit for w, kind in kinds.items() if kind == "consumer"})
    return {
        w: kind if kind == "producer" else f"consumer {groups.index(w.number // unit)}"
        for w, kind in kinds.items()
    }
