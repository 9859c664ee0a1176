"""Warps whose state lies with compiled code: nobody sees it as it was before."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run  # noqa: E402

from lowering.emulator import EmulatorError, fast  # noqa: E402
from lowering.emulator.session import Session  # noqa: E402

pytestmark = pytest.mark.skipif(fast.kernels() is None, reason="needs numba (the extra emulator-fast)")
EXCHANGE = """
st.shared.b32 [%r5], %r0;
FIRST
xor.b32 %r6, %r4, 128; add.u32 %r6, %r6, %r3;
ld.shared.b32 %r7, [%r6];
SECOND
st.shared.b32 [%r6], %r7;
shr.u32 %r8, %r2, 1; add.u32 %r8, %r8, 3;
bar.sync %r8, 64;
ld.shared.b32 %r9, [%r5];
"""
NAMED = (
    "bar.sync 1, 128;",
    "bar.sync %r2, 32;",
    "@%p2 bar.arrive 1, 128; @!%p2 bar.sync 1, 128;",
    "@!%p2 bar.arrive 1, 128; @%p2 bar.sync 1, 128;",
    "bar.red.popc.u32 %r10, 1, 128, %p1; st.shared.b32 [%r5+1024], %r10;",
    "@%p2 bar.red.popc.u32 %r10, 1, 128, %p1; @!%p2 bar.sync 1, 128;",
    "@!%p2 bar.sync 1, 128;",
    "bar.sync 0;",
    "",
)


def changed(function: object) -> set[str]:
    """Attributes of `warp` that a function assigns, or calls something of that changes them."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "warp":
                    found.add(part.attr)
    return found


def test_all_that_comes_back_is_held() -> None:
    from lowering.emulator.away import HELD
    from lowering.emulator.fast.context import WarpRow
    from lowering.emulator.interpreted import Runner

    found = changed(Runner.pull) | changed(WarpRow.learned)
    assert {"vc", "fc", "known", "released", "frames", "began"} <= found <= set(HELD)
    assert {"did", "lanes", "lane_touches"} <= set(HELD)  # changed in place


@pytest.mark.parametrize("second", NAMED)
@pytest.mark.parametrize("first", NAMED)
def test_named_barriers(first: str, second: str) -> None:
    """Findings, counts and the whole schedule are those of the Python code, whoever arrives last."""
    body = EXCHANGE.replace("FIRST", first).replace("SECOND", second)

    def seen(seed: int) -> tuple[object, ...]:
        session = Session("sm_90a", seed, raise_on_report=False)
        with contextlib.suppress(EmulatorError):  # a deadlock
            run(body, [], block=128, session=session)
        return [str(r) for r in session.reports], dict(session.stats.total), session.timeline.events

    for seed in range(3):
        quick = seen(seed)
        with fast.reference():
            assert seen(seed) == quick
