"""The memory model of the emulator, by litmus tests: each is a kernel of two CTAs whose first threads write
what they saw to the result.

The emulator shows every store at once, so only strong outcomes; a GPU may show any that is allowed.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from litmus import LITMUS  # noqa: E402
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


@pytest.mark.parametrize("name", LITMUS)
def test_outcomes_are_among_those_allowed(name: str) -> None:
    """Strong accesses alone: no schedule has a finding, and none shows what the model forbids."""
    seen, body = set(), START.format(first=LITMUS[name].first, second=LITMUS[name].second)
    for seed in range(40):
        words, result = torch.zeros(64, dtype=torch.int32), torch.full((2,), -1, dtype=torch.int32)
        session = run(body, [words, result], grid=2, seed=seed)
        assert not session.reports
        seen.add(tuple(result.tolist()))
    assert seen <= LITMUS[name].allowed and len(seen) > 1
