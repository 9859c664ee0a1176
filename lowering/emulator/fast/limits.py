"""``setmaxnreg`` in compiled code."""

from __future__ import annotations

from . import opcodes as o
from . import places
from .jit import jit


@jit
def set_limit(row, warp, entry):  # type: ignore[no-untyped-def]
    """A warp's new count; False, and nothing done, where it would wait, or wake others."""
    cta = places.longs(warp[o.CTA], o.CTA_COLUMNS)
    limits = places.longs(cta[o.LIMITS_AT], o.L_HELD + cta[o.WARPS])
    at = o.L_HELD + warp[o.IN_CLUSTER] - warp[o.RANK] * cta[o.WARPS]
    more = row[o.OFFSET] - limits[at]
    if more > limits[o.L_FREE] or (more < 0 and limits[o.L_WAITING]):
        return False
    limits[at] += more
    limits[o.L_FREE] -= more
    entry[3] = 1
    return True
