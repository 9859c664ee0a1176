"""Races through global memory: litmus tests of order between CTAs and warps, each with its correct twin."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run, wait  # noqa: E402

from lowering.emulator import Kind, Report  # noqa: E402

# Addresses: %rd10 data, %rd11 flag (the first of four words), %rd12 this thread's word of the result.
START = """
ld.param.u64 %rd10, [p0];
ld.param.u64 %rd11, [p1];
ld.param.u64 %rd12, [p2];
mov.u32 %r60, %ctaid.x;
setp.eq.u32 %p10, %r60, 0;
cvt.u64.u32 %rd13, %r4;
add.u64 %rd14, %rd10, %rd13;
"""


def spin(load: str = "ld.acquire.gpu.global.b32", value: int = 1) -> str:
    """Until the flag is `value`."""
    return f"""{{
.reg .pred Q; .reg .b32 V;
AGAIN:
{load} V, [%rd11];
setp.lt.u32 Q, V, {value};
@Q bra AGAIN;
}}
"""


def pass_on(signal: str, wait: str, write: str = "st.global.b32 [%rd14], %r0;") -> str:
    """CTA 0 writes and signals; CTA 1 waits, reads and stores what it read."""
    return f"""{START}
mov.b32 %r61, 1;
@!%p10 bra READER;
{write}
{signal}
bra END;
READER:
{wait}
ld.global.b32 %r62, [%rd14];
add.u64 %rd15, %rd12, %rd13;
st.global.b32 [%rd15], %r62;
END:
"""


FENCE = "fence.acq_rel.gpu;\n"
RELAXED = "@%p1 st.relaxed.gpu.global.b32 [%rd11], %r61;\n"
RELEASE = "@%p1 st.release.gpu.global.b32 [%rd11], %r61;\n"
ADD = "@%p1 red.{}.gpu.global.add.u32 [%rd11], %r61;\n"
SEEN = spin("ld.relaxed.gpu.global.b32")
TMA = """
st.shared.b32 [%r5], %r0;
fence.proxy.async;
bar.sync 0;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd10], [%r3], 128;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group{} 0;
"""
# Every CTA writes its part, all meet, every CTA reads the part of the other one.
GRID = """
mul.wide.u32 %rd15, %r60, 256;
add.u64 %rd16, %rd14, %rd15;
st.global.b32 [%rd16], %r0;
bar.sync 0;
mov.b32 %r61, 1;
FENCE
@%p1 red.ORDER.gpu.global.add.u32 [%rd11], %r61;
SPIN
bar.sync 0;
xor.b32 %r64, %r60, 1;
mul.wide.u32 %rd15, %r64, 256;
add.u64 %rd16, %rd14, %rd15;
ld.global.b32 %r65, [%rd16];
"""


def grid_barrier(fence: str = "", order: str = "relaxed", load: str = "relaxed", after: str = "") -> str:
    """A barrier of two CTAs of two warps."""
    body = GRID.replace("FENCE", fence).replace("ORDER", order)
    return START + body.replace("SPIN", spin(f"ld.{load}.gpu.global.b32", 2) + after)


# The threads of each CTA write their part, the last CTA to count adds the parts up.
LAST = """
mul.wide.u32 %rd15, %r60, 256;
add.u64 %rd14, %rd14, %rd15;
st.global.b32 [%rd14], %r0;
{before}
mov.b32 %r61, 1;
{fence}
@%p1 atom.relaxed.gpu.global.add.u32 %r62, [%rd11], %r61;
{fence}
@%p1 st.shared.b32 [%r3], %r62;
bar.sync 0;
ld.shared.b32 %r63, [%r3];
setp.ne.u32 %p11, %r63, 1;
@%p11 bra END;
add.u64 %rd16, %rd10, %rd13;
ld.global.b32 %r64, [%rd16];
ld.global.b32 %r65, [%rd16+256];
add.u32 %r64, %r64, %r65;
add.u64 %rd17, %rd12, %rd13;
st.global.b32 [%rd17], %r64;
END:
"""


def last(before: str = "bar.sync 0;", fence: str = FENCE) -> str:
    """The last CTA adds up; two warps."""
    return START + LAST.format(before=before, fence=fence)


@dataclass(frozen=True)
class Litmus:
    """`wrong` races in every schedule that ends; `right` never does."""

    wrong: str
    right: str
    settings: dict = field(default_factory=dict)


HISTOGRAM = (
    START
    + "mov.b32 %r61, 1;\nand.b32 %r62, %r0, 3;\nmul.wide.u32 %rd15, %r62, 4;\nadd.u64 %rd16, %rd11, %rd15;\n"
)
BUFFERING = (
    START
    + """
selp.b32 %r62, 0, 128, %p10;
selp.b32 %r63, 128, 0, %p10;
cvt.u64.u32 %rd15, %r62;
cvt.u64.u32 %rd16, %r63;
add.u64 %rd17, %rd10, %rd15;
add.u64 %rd18, %rd10, %rd16;
{store} [%rd17], %r0;
{between}
{load} %r64, [%rd18];
"""
)
CASES = {
    "a flag with relaxed order": Litmus(pass_on(RELAXED, SEEN), pass_on(RELEASE, spin())),
    "a flag written with no release": Litmus(pass_on(RELAXED, spin()), pass_on(FENCE + RELAXED, spin())),
    "a flag read with no acquire": Litmus(pass_on(RELEASE, SEEN), pass_on(RELEASE, SEEN + FENCE)),
    "fences on one side": Litmus(pass_on(RELAXED, SEEN + FENCE), pass_on(FENCE + RELAXED, SEEN + FENCE)),
    "a fence after the flag": Litmus(
        pass_on(RELAXED + FENCE, SEEN + FENCE), pass_on("membar.gl;" + RELAXED, SEEN + "fence.sc.gpu;")
    ),
    "a fence for the CTA only": Litmus(
        pass_on("fence.acq_rel.cta;" + RELAXED, SEEN + FENCE),
        pass_on("fence.acq_rel.sys;" + RELAXED, SEEN + FENCE),
    ),
    "a release for the CTA only": Litmus(
        pass_on(RELEASE.replace("gpu", "cta"), spin()), pass_on(RELEASE.replace("gpu", "sys"), spin())
    ),
    "an atomic flag": Litmus(pass_on(ADD.format("relaxed"), spin()), pass_on(ADD.format("release"), spin())),
    "a plain flag": Litmus(pass_on("@%p1 st.global.b32 [%rd11], %r61;", spin()), pass_on(RELEASE, spin())),
    "a volatile flag": Litmus(
        pass_on("@%p1 st.volatile.global.b32 [%rd11], %r61;", spin("ld.volatile.global.b32")),
        pass_on(
            "membar.gl;@%p1 st.volatile.global.b32 [%rd11], %r61;",
            spin("ld.volatile.global.b32") + "membar.gl;",
        ),
    ),
    "no flag at all": Litmus(pass_on("", ""), pass_on(RELEASE, spin())),
    "released by a warp that did not wait for the writers": Litmus(
        pass_on("@%p3 bra END;" + RELEASE, spin()),
        pass_on("bar.sync 0;@%p3 bra END;" + RELEASE, spin()),
        {"block": 64},
    ),
    "acquired by a warp that others did not wait for": Litmus(
        pass_on("bar.sync 0;" + RELEASE, "@%p3 bra JOIN;" + spin() + "JOIN:\n"),
        pass_on("bar.sync 0;" + RELEASE, "@%p3 bra JOIN;" + spin() + "JOIN:\nbar.sync 0;"),
        {"block": 64},
    ),
    "two warps of a CTA": Litmus(
        START + "@%p2 st.global.b32 [%rd14], %r0;\n@%p3 ld.global.b32 %r62, [%rd14+-128];",
        START + "@%p2 st.global.b32 [%rd14], %r0;\nbar.sync 0;\n@%p3 ld.global.b32 %r62, [%rd14+-128];",
        {"block": 64, "grid": 1},
    ),
    "store buffering": Litmus(
        BUFFERING.format(store="st.global.b32", between=FENCE, load="ld.global.b32"),
        BUFFERING.format(
            store="st.relaxed.gpu.global.b32", between="fence.sc.gpu;", load="ld.relaxed.gpu.global.b32"
        ),
    ),
    "a histogram with no atomics": Litmus(
        HISTOGRAM + "ld.global.b32 %r63, [%rd16];\nadd.u32 %r63, %r63, %r61;\nst.global.b32 [%rd16], %r63;",
        HISTOGRAM + "red.global.add.u32 [%rd16], %r61;",
    ),
    "an atomic and a plain access": Litmus(
        HISTOGRAM + "@%p10 red.global.add.u32 [%rd16], %r61;\n@!%p10 ld.global.b32 %r63, [%rd16];",
        HISTOGRAM
        + "@%p10 red.global.add.u32 [%rd16], %r61;\n@!%p10 ld.relaxed.gpu.global.b32 %r63, [%rd16];",
    ),
    "a grid barrier with no fences": Litmus(
        grid_barrier(), grid_barrier(order="release", load="acquire"), {"block": 64}
    ),
    "a grid barrier with a fence before it only": Litmus(
        grid_barrier(fence=FENCE), grid_barrier(fence=FENCE, after=FENCE), {"block": 64}
    ),
    "a grid barrier with a fence after it only": Litmus(
        grid_barrier(after=FENCE), grid_barrier(fence=FENCE, load="acquire"), {"block": 64}
    ),
    "the last CTA adds, no fence": Litmus(last(fence=""), last(), {"block": 64}),
    "the last CTA adds, no barrier": Litmus(last(before=""), last(), {"block": 64}),
    "a bulk store that was only read": Litmus(
        pass_on(TMA.format(".read") + RELEASE, spin(), ""), pass_on(TMA.format("") + RELEASE, spin(), "")
    ),
    "a bulk store read back": Litmus(
        START + TMA.format(".read") + "ld.global.b32 %r62, [%rd14];",
        START + TMA.format("") + "ld.global.b32 %r62, [%rd14];",
        {"grid": 1},
    ),
    "cp.async of what another CTA writes": Litmus(
        pass_on(RELEASE, SEEN + "cp.async.ca.shared.global [%r5], [%rd14], 4;\ncp.async.wait_all;" + FENCE),
        pass_on(RELEASE, spin() + "cp.async.ca.shared.global [%r5], [%rd14], 4;\ncp.async.wait_all;"),
    ),
    "a store over what a cp.async may still read": Litmus(
        START
        + "cp.async.ca.shared.global [%r5], [%rd14], 4;\nst.global.b32 [%rd14], %r0;\ncp.async.wait_all;",
        START
        + "cp.async.ca.shared.global [%r5], [%rd14], 4;\ncp.async.wait_all;\nst.global.b32 [%rd14], %r0;",
        {"grid": 1},
    ),
}


def _reports(body: str, settings: dict, seed: int) -> list[Report]:
    data, result = torch.full((256,), 7, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    flag = torch.zeros(64, dtype=torch.int32)
    chosen = {"grid": 2, "block": 32, **settings}
    return run(body, [data, flag, result], seed=seed, **chosen).reports


@pytest.mark.parametrize("name", CASES)
def test_a_race_is_found(name: str) -> None:
    case = CASES[name]
    for seed in range(4):
        reports = _reports(case.wrong, case.settings, seed)
        assert {r.kind for r in reports} == {Kind.RACE}, f"seed {seed}: {[str(r) for r in reports]}"


@pytest.mark.parametrize("name", CASES)
def test_its_correct_twin_is_silent(name: str) -> None:
    case = CASES[name]
    for seed in range(6):
        reports = _reports(case.right, case.settings, seed)
        assert not reports, f"seed {seed}: {[str(r) for r in reports]}"


def test_a_report_names_both_sides_and_the_tensor() -> None:
    report = _reports(pass_on(RELAXED, SEEN), {}, 0)[0]
    assert (
        "read of p0, byte 0, does not wait for the write by warp 0 of CTA (0, 0, 0) at PTX line"
        in report.message
    )
    assert report.message.endswith("this needs a release and an acquire")
    assert report.space == "global" and "ld.global.b32" in report.ptx_text


def test_equal_values_are_a_warning_and_not_an_error() -> None:
    reports = _reports(START + "st.global.b32 [%rd14], %r0;", {}, 0)
    assert [r.warning for r in reports] == [True] and "RACE (warning)" in str(reports[0])
    reports = _reports(START + "st.global.b32 [%rd14], %r60;", {}, 0)
    assert [r.warning for r in reports] == [False]


def test_neighbouring_bytes_are_no_race() -> None:
    body = START + "setp.eq.u32 %p11, %r1, 0;\ncvt.u64.u32 %rd15, %r60;\n"
    body += (
        "add.u64 %rd16, %rd10, %rd15;\n@%p11 st.global.b8 [%rd16], %r60;\n@%p11 ld.global.b8 %r61, [%rd16];"
    )
    assert not _reports(body, {"grid": 8}, 0)


WRITE = START + "st.global.b32 [%rd14], %r0;"
READ_PART = "ld.global.b32 %r62, [%rd14];"
COPY = "cp.async.ca.shared.global [%r5], [%rd14], 4;\ncp.async.wait_all;"
DEPENDENT = {
    "a read of what the launch before wrote": (WRITE, READ_PART, True),
    "a write over what it wrote": (WRITE, "st.global.b32 [%rd14], %r1;", True),
    "a write over what it read": (START + READ_PART, "st.global.b32 [%rd14], %r1;", True),
    "a copy of what it wrote": (WRITE, COPY, True),
    "a read of what it read": (START + READ_PART, READ_PART, False),
    "a read of something else": (WRITE, "ld.global.b32 %r62, [%rd12];", False),
}
WAITS = {
    "overlapping": "",
    "waiting": "griddepcontrol.wait;\n",
    "one after the other": "",
    "another warp waits": "@%p3 griddepcontrol.wait;\nbar.sync 0;\n",
}


@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.parametrize("how", WAITS)
def test_a_dependent_launch_waits_for_the_one_before(name: str, how: str) -> None:
    first, second, conflict = DEPENDENT[name]
    tensors = [torch.zeros(64, dtype=torch.int32) for _ in range(3)]
    session = run(first, tensors)
    body = START + WAITS[how] + "@%p3 bra END;\n" + second + "\nEND:\n"
    attributes = {} if how == "one after the other" else {"programmatic": 1}
    run(body, tensors, block=64, session=session, attributes=attributes)
    if conflict and how == "overlapping":
        assert {r.kind for r in session.reports} == {Kind.RACE}
        assert "griddepcontrol.wait is missing" in session.reports[0].message
    else:
        assert not session.reports


# Warp 1 writes what a bulk copy of warp 0 reads, or a bulk store of warp 0 overwrites.
BULK = """
st.shared.b32 [%r5+256], %r0;
fence.proxy.async.shared::cta;
@%p3 st.global.b32 [%rd14+-128], %r0;
{writer}
bar.sync 0;
{reader}
{copy}
"""
BULK_IN = f"""
@%p1 mbarrier.init.shared.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+128], [%rd10], 128, [%r3];
@!%p1 bra DONE_COPY;
{wait()}
DONE_COPY:
"""
BULK_OUT = """
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd10], [%r3+256], 128;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize("copy", [BULK_IN, BULK_OUT], ids=["into shared memory", "out of it"])
@pytest.mark.parametrize(
    ("writer", "reader", "found"),
    [
        ("", "", True),
        ("fence.proxy.async.shared::cta;", "", True),
        ("fence.proxy.async.global;", "", False),
        ("fence.proxy.async;", "", False),
        ("", "fence.proxy.async.global;", False),
    ],
)
def test_bulk_copies_of_ordinary_stores_need_a_proxy_fence(
    copy: str, writer: str, reader: str, found: bool
) -> None:
    body = START + BULK.format(writer=writer, reader=reader, copy=copy)
    reports = _reports(body, {"grid": 1, "block": 64}, 0)
    assert {r.kind for r in reports} == ({Kind.MISSING_PROXY_FENCE} if found else set())
