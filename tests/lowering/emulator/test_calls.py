"""Calls of device functions and branches through a table."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ptx_kernels  # noqa: E402
from test_arithmetic import LOAD3, STORE  # noqa: E402

from lowering.emulator.reports import EmulatorError, Kind  # noqa: E402

FUNCTIONS = """
.visible .func (.param .b32 func_retval0) square_plus(
.param .b32 square_plus_param_0,
.param .align 8 .b8 square_plus_param_1[8]
)
{
.reg .pred %p<2>; .reg .b32 %r<5>;
ld.param.u32 %r1, [square_plus_param_0];
ld.param.u32 %r2, [square_plus_param_1+4];
setp.gt.u32 %p1, %r1, 20;
@%p1 bra $L_big;
mad.lo.u32 %r3, %r1, %r1, %r2;
st.param.b32 [func_retval0+0], %r3;
ret;
$L_big:
st.param.b32 [func_retval0+0], 7;
ret;
}
.func (.reg .b32 %out) twice(.reg .b32 %in)
{
add.u32 %out, %in, %in;
@!%never ret;
}
.func forward(.param .b32 a, .param .b32 b)
{ .reg .b32 %x; ld.param.u32 %x, [a]; st.param.b32 [b], %x; call.uni recursive, (a); ret; }
.func recursive(.param .b32 a) { call.uni recursive, (a); ret; }
"""
CALL = """
{
.param .b32 param0;
st.param.b32 [param0+0], %r10;
.param .align 8 .b8 param1[8];
st.param.v2.b32 [param1+0], {%r11, %r12};
.param .b32 retval0;
call.uni (retval0),
square_plus,
(
param0,
param1
);
ld.param.b32 %r20, [retval0+0];
}
"""


def _run(
    code: str, operands: np.ndarray, functions: str = FUNCTIONS, monkey: pytest.MonkeyPatch | None = None
):
    header = ptx_kernels.HEADER.replace(".visible .entry", functions + ".visible .entry")
    source = torch.from_numpy(operands.astype(np.uint32).view(np.int32).copy())
    target = torch.zeros(32, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx_kernels, "HEADER", header)
        session = ptx_kernels.run(LOAD3 + code + STORE, [source, target])
    return target.numpy().view(np.uint32), session


def _inputs() -> np.ndarray:
    return np.stack([np.arange(32), 100 + np.arange(32), 1000 + 3 * np.arange(32)]).astype(np.uint32)


def _square_plus(a: int, c: int) -> int:
    return 7 if a > 20 else a * a + c


FIXED = FUNCTIONS.replace("@!%never ret;", "ret;")


def test_a_function_returns_from_two_places() -> None:
    got, session = _run(CALL, _inputs(), FIXED)
    assert got.tolist() == [_square_plus(a, 1000 + 3 * a) for a in range(32)]
    assert not session.reports


def test_calls_have_parameters_of_their_own_and_guards() -> None:
    code = (
        CALL
        + "mov.b32 %r30, %r20; mov.b32 %r10, %r1; mov.b32 %r12, 5;"
        + CALL
        + "add.u32 %r20, %r20, %r30; setp.lt.u32 %p8, %r1, 4; @%p8 call (%r20), twice, (%r20);"
        + "shfl.sync.idx.b32 %r31, %r20, 3, 31, -1; xor.b32 %r20, %r20, %r31;"
    )
    got, session = _run(code, _inputs(), FIXED)
    sums = [_square_plus(a, 1000 + 3 * a) + _square_plus(a, 5) for a in range(32)]
    sums = [2 * s if a < 4 else s for a, s in enumerate(sums)]
    assert got.tolist() == [s ^ sums[3] for s in sums]
    assert not session.reports, "the shuffle needs all lanes together after the calls"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("{ .param .b32 q; call.uni recursive, (q); }", "recursive calls itself"),
        ("call.uni missing, (%r1);", "no body of missing"),
        ("call.uni (%r20), twice, (%r1, %r2);", "twice has 1 parameters; 2 were given"),
        ("call (%r20), %rd1, (%r1), proto;", "cannot read"),
        ("{ .param .b32 q; mov.b64 %rd9, q; }", "address of a parameter"),
        ("call.uni (%r20), twice, (%r1);", r"in|unknown predicate %never"),
    ],
)
def test_calls_that_cannot_be_made_say_why(code: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message) as caught:
        _run(code, _inputs())
    assert "kernel k: PTX line" in str(caught.value)


TABLE = """
$L_brx_0: .branchtargets
 $L_a,
 $L_b,
 $L_c;
mov.b32 %r20, 1;
@%p8 brx.idx %r10, $L_brx_0;
mov.b32 %r20, 99;
bra $L_end;
$L_a: add.u32 %r20, %r20, 10; bra $L_end;
$L_b: add.u32 %r20, %r20, 20;
$L_c: add.u32 %r20, %r20, 30;
$L_end:
shfl.sync.idx.b32 %r31, %r20, 0, 31, -1; xor.b32 %r20, %r20, %r31;
"""


def test_brx_idx_takes_each_lane_to_its_target() -> None:
    inputs = _inputs()
    inputs[0] %= 3
    got, session = _run("setp.lt.u32 %p8, %r1, 25;" + TABLE, inputs)
    plain = [[11, 51, 31][a % 3] if a < 25 else 99 for a in range(32)]
    assert got.tolist() == [v ^ plain[0] for v in plain]
    assert not session.reports


def test_brx_idx_beyond_its_table() -> None:
    with pytest.raises(EmulatorError, match="index 3; its table has 3 targets") as caught:
        _run("setp.lt.u32 %p8, %r1, 25;" + TABLE, _inputs())
    assert caught.value.reports[-1].kind is Kind.OUT_OF_BOUNDS
