"""Registers: read before they were written, and given from warp to warp by setmaxnreg."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run, text  # noqa: E402

from lowering.emulator import EmulatorError, Kind, Report, ptx  # noqa: E402

OUT = """
ld.param.u64 %rd1, [p0];
cvt.u64.u32 %rd3, %r4;
add.u64 %rd4, %rd1, %rd3;
"""
STORE = OUT + "st.global.b32 [%rd4], %r50;\n"
UPPER = "setp.gt.u32 %p5, %r1, 15;\n"
NOWHERE = "setp.lt.u32 %p5, %r0, 99;\n@%p5 bra END;\nmov.b32 %r50, 1;\nEND:\n"
UNWRITTEN = {
    "stored to global memory": STORE,
    "after arithmetic": "add.u32 %r51, %r50, 1;\nmul.lo.u32 %r50, %r51, 2;\n" + STORE,
    "both halves of a register": "mov.b32 %r50, {%rs1, %rs2};\n" + STORE,
    "decides a branch": "setp.eq.u32 %p5, %r50, 3;\n@%p5 bra END;\nadd.u32 %r51, %r1, 1;\nEND:\n",
    "an address": OUT + "add.u64 %rd4, %rd1, %rd50;\n@%p1 st.global.b32 [%rd4], %r1;\n",
    "written by some lanes": UPPER + "@%p5 mov.b32 %r50, 1;\n" + STORE,
    "written on one path": UPPER + "@%p5 bra SKIP;\nmov.b32 %r50, 1;\nSKIP:\n" + STORE,
    "written where nobody comes": "setp.lt.u32 %p5, %r0, 99;\n@%p5 bra END;\nmov.b32 %r50, 1;\nEND:\n"
    + STORE,
    "through shared memory": "st.shared.b32 [%r5], %r50;\nld.shared.b32 %r50, [%r5];\n" + STORE,
}
WRITTEN = {
    "written": "mov.b32 %r50, 1;\n" + STORE,
    "thrown away": "add.u32 %r51, %r50, 1;\nst.shared.b32 [%r5], %r51;\n",
    "not chosen": "setp.lt.u32 %p5, %r1, 99;\nselp.b32 %r50, 1, %r50, %p5;\n" + STORE,
    "read by those that wrote": UPPER
    + "@%p5 mov.b32 %r50, 1;\n"
    + OUT
    + "@%p5 st.global.b32 [%rd4], %r50;\n",
    "the other half of a register": "mov.b32 %r50, {%rs1, %rs2};\nmov.b16 %rs3, 7;\n"
    "mov.b32 %r50, {%rs3, %rs2};\n" + "mov.b32 {%rs4, _}, %r50;\nmov.b32 %r50, {%rs4, %rs3};\n" + STORE,
    "in a loop": "mov.b32 %r50, 0;\nAGAIN:\n"
    "add.u32 %r50, %r50, 1;\nsetp.lt.u32 %p5, %r50, 3;\n@%p5 bra AGAIN;\n" + STORE,
    "a false predicate and an unknown one": "setp.lt.u32 %p5, %r1, 0;\n"
    "and.pred %p6, %p5, %p7;\n@%p6 bra END;\nmov.b32 %r50, 1;\n" + STORE + "END:\n",
}


def _reports(body: str, **settings: int) -> list[Report]:
    try:
        return run(body, [torch.zeros(64, dtype=torch.int32)], **settings).reports
    except EmulatorError as error:
        return list(error.reports)


@pytest.mark.parametrize("name", UNWRITTEN)
def test_a_register_that_nothing_wrote_is_found(name: str) -> None:
    found = _reports(UNWRITTEN[name])
    assert found and found[0].kind is Kind.UNINITIALISED
    assert name == "through shared memory" or "register that nothing has written" in found[0].message


@pytest.mark.parametrize("name", WRITTEN)
def test_registers_that_decide_nothing_are_no_finding(name: str) -> None:
    assert not _reports(WRITTEN[name])


def test_only_lanes_that_did_not_write_are_named() -> None:
    assert _reports(UNWRITTEN["written by some lanes"])[0].lanes == "lanes " + ",".join(map(str, range(16)))


GROUPS = """
shr.u32 %r6, %r2, 2;
setp.eq.u32 %p5, %r6, 0;
@!%p5 bra CONSUMER;
{producer}
bra END;
CONSUMER:
{consumer}
END:
"""


def _groups(producer: int, consumer: int) -> str:
    return GROUPS.format(
        producer=f"setmaxnreg.dec.sync.aligned.u32 {producer};",
        consumer=f"setmaxnreg.inc.sync.aligned.u32 {consumer};",
    )


@pytest.mark.parametrize("seed", range(3))
def test_registers_that_no_warp_gives_are_waited_for_in_vain(seed: int) -> None:
    assert not _reports(_groups(40, 232), block=384, seed=seed)
    assert not _reports(_groups(24, 240), block=384, seed=seed)
    found = _reports(_groups(56, 232), block=384, seed=seed)
    assert [r.kind for r in found] == [Kind.DEADLOCK]
    assert "setmaxnreg.inc to 232 registers a thread" in found[0].message


def test_ctas_that_share_an_sm_share_its_registers() -> None:
    def starts(directives: str) -> int:
        whole = text("", [torch.zeros(1)]).replace("\n)\n{", f"\n)\n{directives}\n{{", 1)
        return ptx.parse(whole).kernels["k"].min_ctas

    assert starts("") == 1 and starts(".maxntid 384, 1, 1\n.minnctapersm 2") == 2


def test_all_warps_of_a_warpgroup_execute_setmaxnreg() -> None:
    one = "@%p2 setmaxnreg.dec.sync.aligned.u32 40;"
    found = _reports(one, block=128)
    assert [r.kind for r in found] == [Kind.BARRIER_DIVERGENCE]
    assert "executed setmaxnreg [[40], [], [], []]" in found[0].message
    assert not _reports("setmaxnreg.dec.sync.aligned.u32 40;", block=128)
