"""Races between the lanes of one warp: each case with its bug, and without."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import INIT, run, wait  # noqa: E402

from lowering.emulator import Kind, Report  # noqa: E402

SYNC = "bar.warp.sync -1;\n"
WRITE = "st.shared.b32 [%r5], %r0;\n"
NEIGHBOUR = "xor.b32 %r6, %r5, 4;\n"  # the word of the lane beside this one
READ = "ld.shared.b32 %r10, [%r6];\n"
READ_FIRST = NEIGHBOUR + "st.shared.b32 [%r5], %r1;\n" + SYNC + READ
ROWS = """
shl.b32 %r6, %r1, 4;
add.u32 %r6, %r6, %r3;
st.shared.v4.b32 [%r6], {%r0, %r0, %r0, %r0};
"""
GLOBAL = """
ld.param.u64 %rd1, [p0];
cvt.u64.u32 %rd3, %r4;
add.u64 %rd4, %rd1, %rd3;
xor.b64 %rd5, %rd4, 4;
"""
# All lanes count in four words.
COUNT = """
and.b32 %r6, %r1, 3;
mul.wide.u32 %rd6, %r6, 4;
ld.param.u64 %rd1, [p0];
add.u64 %rd7, %rd1, %rd6;
shl.b32 %r7, %r6, 2;
add.u32 %r7, %r7, %r3;
mov.b32 %r8, 0;
st.shared.b32 [%r5], %r8;
bar.warp.sync -1;
"""
CP_ASYNC = GLOBAL + "cp.async.ca.shared.global [%r5], [%rd4], 4;\ncp.async.commit_group;\n"


@dataclass(frozen=True)
class Case:
    """`wrong` races between lanes in every schedule; `right` does not."""

    wrong: str
    right: str
    settings: dict = field(default_factory=dict)


def _without_sync(body: str) -> Case:
    return Case(body.replace(SYNC, ""), body)


CASES = {
    "a neighbour's word": _without_sync(NEIGHBOUR + WRITE + SYNC + READ),
    "a neighbour's word, after a shuffle": Case(
        NEIGHBOUR + "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;\n" + WRITE + READ,
        NEIGHBOUR + WRITE + "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;\n" + READ,
    ),
    "a word read, then overwritten by a neighbour": Case(READ_FIRST + WRITE, READ_FIRST + SYNC + WRITE),
    "two stores of different lanes": Case(
        NEIGHBOUR + WRITE + "st.shared.b32 [%r6], %r0;\n",
        NEIGHBOUR + WRITE + SYNC + "st.shared.b32 [%r6], %r0;\n",
    ),
    "one store of many values": Case("st.shared.b32 [%r3], %r0;\n", "st.shared.b32 [%r3], %r2;\n"),
    "what one lane wrote": _without_sync(
        "@%p1 st.shared.b32 [%r3], %r0;\n" + SYNC + "ld.shared.b32 %r10, [%r3];\n"
    ),
    "words of a neighbour's vector": _without_sync(ROWS + SYNC + "ld.shared.b32 %r10, [%r5];\n"),
    "cp.async of a neighbour": Case(
        NEIGHBOUR + CP_ASYNC + SYNC + "cp.async.wait_group 0;\n" + READ,
        NEIGHBOUR + CP_ASYNC + "cp.async.wait_group 0;\n" + SYNC + READ,
    ),
    "a neighbour's word of global memory": _without_sync(
        GLOBAL + "st.global.b32 [%rd4], %r0;\n" + SYNC + "ld.global.b32 %r10, [%rd5];\n"
    ),
    "a histogram of one warp in global memory": Case(
        COUNT + "ld.global.b32 %r9, [%rd7];\nadd.u32 %r9, %r9, 1;\nst.global.b32 [%rd7], %r9;\n",
        COUNT + "red.global.add.u32 [%rd7], 1;\n",
    ),
    "a histogram of one warp in shared memory": Case(
        COUNT + "ld.shared.b32 %r9, [%r7];\nadd.u32 %r9, %r9, 1;\nst.shared.b32 [%r7], %r9;\n",
        COUNT + "mov.b32 %r9, 1;\nred.shared.add.u32 [%r7], %r9;\n",
    ),
}

ORDERED = {
    "its own word": WRITE + "ld.shared.b32 %r10, [%r5];\n" + WRITE,
    "equal values, read back": "st.shared.b32 [%r3], %r2;\nld.shared.b32 %r10, [%r3];\n",
    "equal values, written twice": "@%p1 st.shared.b32 [%r3], %r2;\nst.shared.b32 [%r3], %r2;\n",
    "ldmatrix": ROWS + "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r6];\n",
    "a CTA barrier": NEIGHBOUR + WRITE + "bar.sync 0;\n" + READ,
    "an mbarrier": INIT.replace("[%r3]", "[%r3+256]")
    + "add.u32 %r20, %r3, 256;\n@%p1 st.shared.b32 [%r3], %r0;\n@%p1 mbarrier.arrive.shared.b64 _, [%r20];\n"
    + wait(0, "%r20")
    + "ld.shared.b32 %r10, [%r3];\n",
    "different bytes of one word": "add.u32 %r6, %r3, %r1;\n"
    "st.shared.b8 [%r6], %rs0;\nld.shared.b8 %rs1, [%r6];\n",
}


def _reports(body: str, seed: int) -> list[Report]:
    return run(body, [torch.zeros(64, dtype=torch.int32)], seed=seed).reports


@pytest.mark.parametrize("name", CASES)
def test_a_race_is_found(name: str) -> None:
    for seed in range(3):
        found = _reports(CASES[name].wrong, seed)
        assert {r.kind for r in found} == {Kind.RACE} and not any(r.warning for r in found)
        assert "lane" in found[0].message


@pytest.mark.parametrize("name", CASES)
def test_its_correct_twin_is_silent(name: str) -> None:
    for seed in range(3):
        assert not _reports(CASES[name].right, seed)


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_accesses_are_no_race(name: str) -> None:
    assert not _reports(ORDERED[name], 0)


def test_a_report_names_both_lanes_and_the_other_line() -> None:
    report = _reports(CASES["a neighbour's word"].wrong, 0)[0]
    assert (
        "read by lane 0 does not wait for the write by lane 1 of the same warp at PTX line" in report.message
    )
    assert report.space == "shared" and report.address == 1028


def test_long_phases_of_a_warp_are_remembered_in_part() -> None:
    many = (WRITE + "ld.shared.b32 %r10, [%r5];\n") * 700
    assert not _reports(many, 0)
    assert _reports(NEIGHBOUR + many + READ, 0)
