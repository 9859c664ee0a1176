"""Litmus tests of PTX's memory model: what threads of two CTAs may see, by the order they ask for.

Each is a kernel of two CTAs whose first threads write what they saw to the result. `allowed` are the outcomes
of the model. The emulator shows every store at once, so only strong ones; a GPU may show any that is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run  # noqa: E402

START = """
ld.param.u64 %rd10, [p0];
ld.param.u64 %rd12, [p1];
mov.u32 %r60, %ctaid.x;
setp.eq.u32 %p10, %r60, 0;
mov.b32 %r61, 1;
@!%p1 bra END;
@!%p10 bra SECOND;
{first}
bra END;
SECOND:
{second}
END:
"""
EVERYTHING = frozenset((a, b) for a in (0, 1) for b in (0, 1))


@dataclass(frozen=True)
class Litmus:
    """Two words x (byte 0) and y (byte 128) are 0; %r62 and %r63 go to the result."""

    first: str
    second: str
    allowed: frozenset

    def body(self) -> str:
        """The kernel."""
        return START.format(first=self.first, second=self.second)


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


@pytest.mark.parametrize("name", LITMUS)
def test_outcomes_are_among_those_allowed(name: str) -> None:
    """Strong accesses alone: no schedule has a finding, and none shows what the model forbids."""
    seen = set()
    for seed in range(40):
        words, result = torch.zeros(64, dtype=torch.int32), torch.full((2,), -1, dtype=torch.int32)
        session = run(LITMUS[name].body(), [words, result], grid=2, seed=seed)
        assert not session.reports
        seen.add(tuple(result.tolist()))
    assert seen <= LITMUS[name].allowed and len(seen) > 1
