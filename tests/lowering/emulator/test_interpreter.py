"""The interpreter of steps in compiled code agrees with the Python code, instruction by instruction."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run  # noqa: E402
from test_arithmetic import _operands, evaluate  # noqa: E402

from lowering.emulator import fast  # noqa: E402

pytestmark = pytest.mark.skipif(fast.kernels() is None, reason="needs numba (the extra emulator-fast)")
LETTERS = {0: "p", 1: "s", 2: "w", 3: "d", 4: "s", 5: "w"}  # of widths, signed or not
DECLARED = ".reg .pred p<9>; .reg .b16 s<9>; .reg .b32 w<9>; .reg .b64 d<9>;"
SOURCES = (
    "mov.b64 d1, {%r10, %r11}; mov.b64 d2, {%r12, %r10}; mov.b64 d3, {%r11, %r12};"
    "mov.b32 {s1, s4}, %r10; mov.b32 {s2, s5}, %r11; mov.b32 {s3, s6}, %r12;"
    "mov.b32 w1, %r10; mov.b32 w2, %r11; mov.b32 w3, %r12;"
    "setp.lt.s32 p1, w1, w2; setp.gt.u32 p2, w2, w3; setp.ne.s32 p3, w1, 0;"
    "mov.b64 d7, {w3, w1}; mov.b16 s7, s6; mov.b32 w7, w2; mov.pred p7, p2;"
)
RESULTS = (
    "selp.b32 w8, 1, 0, p7; mov.b64 {w4, w5}, d7; mov.b32 w6, {s7, s1};"
    "xor.b32 w8, w8, w4; xor.b32 w5, w5, w6; shl.b32 w5, w5, 1; xor.b32 w8, w8, w5; xor.b32 %r20, w8, w7;"
)


def _forms() -> list[str]:
    from lowering.emulator.fast.encode import FORMS

    out = []
    for parts, form in FORMS.items():
        places = [f"{LETTERS[width]}{i + 1}" for i, width in enumerate(form.sources)]
        out.append(f"{'.'.join(parts)} {LETTERS[form.target]}7, {', '.join(places)};")
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for kind, letter in (("s32", "w"), ("u32", "w"), ("s64", "d"), ("u64", "d"), ("s16", "s")):
            out.append(f"setp.{name}.{kind} p7, {letter}1, {letter}2;")
        out.append(f"setp.{name}.and.s32 p7, w1, w2, !p3;")
    out += ["selp.b32 w7, w1, w2, !p3;", "selp.b32 w1, w2, w1, p1; mov.b32 w7, w1;", "mov.b64 d7, {w3, w2};"]
    for space in ("global", "shared", "local", "param"):
        out += [f"cvta.{space}.u64 d7, d1;", f"cvta.to.{space}.u64 d7, d1;"]
    return out


def _both(code: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    code = "{" + DECLARED + SOURCES + code + RESULTS + "}"
    operands = _operands(seed)
    quick = evaluate(code, operands)
    with fast.reference():
        return quick, evaluate(code, operands)


@pytest.mark.parametrize("guard", ["", "@p3 ", "@!p1 "])
def test_arithmetic(guard: str, seed: int) -> None:
    for instruction in _forms():
        quick, reference = _both(guard + instruction, seed % 1000)
        np.testing.assert_array_equal(quick, reference, err_msg=instruction)


@pytest.mark.parametrize("operand", ["0", "1", "31", "32", "63", "64", "65", "-1"])
def test_shifts_and_immediates(operand: str, seed: int) -> None:
    for name in ("shl.b32 w7, w1", "shr.u32 w7, w1", "shr.s32 w7, w1", "shl.b64 d7, d1", "shr.s64 d7, d1",
                 "shr.u64 d7, d1", "add.s32 w7, w1", "mul.wide.s32 d7, w1", "div.s32 w7, w1"):  # fmt: skip
        quick, reference = _both(f"{name}, {operand};", seed % 1000)
        np.testing.assert_array_equal(quick, reference, err_msg=name)


def test_shuffles_and_branches() -> None:
    code = (
        "shfl.sync.idx.b32 w7, w1, w2, 31, -1; shfl.sync.idx.b32 w8, w7, 3, 0x181f, -1;"
        "@p1 bra ONE; add.s32 w7, w8, 1; bra BOTH; ONE: sub.s32 w7, w8, w2; BOTH: add.s32 w7, w7, 5;"
    )
    for seed in range(3):
        np.testing.assert_array_equal(*_both(code, seed))


STAGE = """
.reg .b32 a<40>;
shl.b32 a0, %r0, 3; add.u32 a1, a0, %r3;
st.shared.v2.b32 [a1], {%r0, %r4};
SYNC
xor.b32 a2, a0, 64; add.u32 a2, a2, %r3;
ld.shared.v2.b32 {a3, a4}, [a2];
BETWEEN
st.shared.b32 [a2], a3;
bar.sync 0;
"""


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("sync", ["", "bar.warp.sync -1;", "bar.sync 0;"])
@pytest.mark.parametrize("between", ["", "bar.warp.sync -1;"])
def test_findings_of_shared_memory(block: int, sync: str, between: str) -> None:
    """Races between warps, and between lanes, are found and told alike."""
    body = STAGE.replace("SYNC", sync).replace("BETWEEN", between)

    def found() -> tuple[list[str], dict[str, int]]:
        session = run(body, [], block=block, seed=2)
        return [str(report) for report in session.reports], dict(session.stats.total)

    quick = found()
    with fast.reference():
        assert quick == found()
