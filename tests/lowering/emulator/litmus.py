"""Litmus tests of PTX's memory model: what threads of two CTAs may see, by the order they ask for."""

from __future__ import annotations

from dataclasses import dataclass

EVERYTHING = frozenset((a, b) for a in (0, 1) for b in (0, 1))


@dataclass(frozen=True)
class Litmus:
    """Code of the first and of the second thread, and the outcomes of the model.

    Words x (%rd10) and y (%rd10 + 128) are 0 and %r61 is 1; the outcome's two words go to %rd12.
    """

    first: str
    second: str
    allowed: frozenset


def _passing(write: str, between: str, look: str, after: str, weak: bool) -> Litmus:
    """x = 1, y = 1; the other thread reads y, then x. Weak: it sees y = 1 and x = 0."""
    return Litmus(
        f"st.relaxed.gpu.global.b32 [%rd10], %r61;\n{between}\n{write} [%rd10+128], %r61;",
        f"{look} %r62, [%rd10+128];\n{after}\nld.relaxed.gpu.global.b32 %r63, [%rd10];\n"
        "st.global.b32 [%rd12], %r62;\nst.global.b32 [%rd12+4], %r63;",
        EVERYTHING if weak else EVERYTHING - {(1, 0)},
    )


def _buffering(fence: str, weak: bool) -> Litmus:
    """x = 1, read y; y = 1, read x. Weak: both read 0."""
    side = "st.relaxed.gpu.global.b32 [%rd10+{0}], %r61;\n{2}\nld.relaxed.gpu.global.b32 %r62, [%rd10+{1}];\n"
    return Litmus(
        side.format(0, 128, fence) + "st.global.b32 [%rd12], %r62;",
        side.format(128, 0, fence) + "st.global.b32 [%rd12+4], %r62;",
        EVERYTHING if weak else EVERYTHING - {(0, 0)},
    )


WRITE, LOOK = "st.relaxed.gpu.global.b32", "ld.relaxed.gpu.global.b32"
RELEASE, ACQUIRE = "st.release.gpu.global.b32", "ld.acquire.gpu.global.b32"
FENCE = "fence.acq_rel.gpu;"
LITMUS = {
    "message passing, relaxed": _passing(WRITE, "", LOOK, "", True),
    "message passing, release and acquire": _passing(RELEASE, "", ACQUIRE, "", False),
    "message passing, release only": _passing(RELEASE, "", LOOK, "", True),
    "message passing, acquire only": _passing(WRITE, "", ACQUIRE, "", True),
    "message passing, two fences": _passing(WRITE, FENCE, LOOK, FENCE, False),
    "message passing, fences of the CTA": _passing(
        WRITE, "fence.acq_rel.cta;", LOOK, "fence.acq_rel.cta;", True
    ),
    "store buffering, relaxed": _buffering("", True),
    "store buffering, acq_rel fences": _buffering(FENCE, True),
    "store buffering, sc fences": _buffering("fence.sc.gpu;", False),
}
