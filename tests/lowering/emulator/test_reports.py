"""Every kind of finding: a kernel with that one bug, which must be found, beside its correct twin."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import INIT, TensorMap, run, wait  # noqa: E402

from lowering.emulator import EmulatorError, Kind  # noqa: E402

LOAD = """
ld.param.u64 %rd1, [p0];
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+128], [%rd1], 128, [%r3];
"""
# Warp 0 copies what it read from shared memory to the output, 4 bytes a lane.
OUT = """
ld.param.u64 %rd2, [p1];
cvt.u64.u32 %rd3, %r4;
add.u64 %rd4, %rd2, %rd3;
st.global.b32 [%rd4], %r10;
"""
READ = "ld.shared.b32 %r10, [%r5+128];" + OUT
STORE = "st.shared.b32 [%r5+128], %r0;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
BULK_STORE = """
ld.param.u64 %rd2, [p1];
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3+128], 128;
@%p1 cp.async.bulk.commit_group;
"""
DRAIN = "@%p1 cp.async.bulk.wait_group.read 0;\n"
OVERWRITE = "bar.sync 0;\n" + STORE


@dataclass(frozen=True)
class Case:
    """`right` differs from `wrong` by the one bug, which is of `kind`."""

    kind: Kind
    wrong: str
    right: str
    settings: dict = field(default_factory=dict)
    also: frozenset = frozenset()  # what the same bug leads to in other schedules


READ_AND_AGAIN = """
add.f32 %r30, %r20, %r21;
// fence
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, %rd12, %rd13, %p5, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""


def _wgmma(
    before: str = "wgmma.fence.sync.aligned;", fence: str = FENCE, between: str = "", after: str = ""
) -> str:
    """D = A B of 64x8x16 bf16 zeros written by ordinary stores; accumulators %r20 to %r23."""
    fill = "\n".join(f"st.shared.b32 [%r5+{1024 + 512 * i}], %r99;" for i in range(5))
    return f"""
mov.b32 %r99, 0;
{fill}
{fence}
bar.sync 0;
add.u32 %r90, %r3, 1024;
and.b32 %r91, %r90, 262143;
shr.u32 %r91, %r91, 4;
cvt.u64.u32 %rd10, %r91;
mov.b64 %rd11, {(128 >> 4) << 16 | (256 >> 4) << 32};
or.b64 %rd12, %rd10, %rd11;
add.u64 %rd13, %rd12, {2048 >> 4};
mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
{before}
setp.ne.b32 %p5, 1, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r20, %r21, %r22, %r23}}, %rd12, %rd13, %p5, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
{between}
wgmma.wait_group.sync.aligned 0;
{after}
"""


OF_N8 = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, "
    "%rd12, %rd13, %p5, 1, 1, 0, 0;"
)
OF_N16 = OF_N8.replace("n8", "n16").replace("%r23}", "%r23, %r24, %r25, %r26, %r27}")
UNLIKE = (
    f"setp.ne.b32 %p5, 1, 0;\n@%p2 bra NARROW;\n{OF_N16}\nbra.uni JOIN;\nNARROW:\n{OF_N8}\nJOIN:\n"
    "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
)
"""Warp 0 issues a WGMMA of another shape than the other three warps."""
WG = {"block": 128, "smem": 8192}
ADD = "add.f32 %r30, %r20, %r20;\n"
CLOBBER = "bar.sync 0;\nst.shared.b32 [%r5+1024], %r99;\n"
CP_ASYNC = """
ld.param.u64 %rd1, [p0];
cvt.u64.u32 %rd3, %r4;
add.u64 %rd5, %rd1, %rd3;
cp.async.ca.shared.global [%r5+128], [%rd5], 4;
cp.async.commit_group;
"""
TWO_COPIES = CP_ASYNC + CP_ASYNC.replace("+128]", "+256]").replace("[%rd5]", "[%rd5+128]")
TWO_STORES = (
    BULK_STORE.replace("128;", "64;") + "add.u64 %rd2, %rd2, 64;\n"
    "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3+256], 64;\n"
    "@%p1 cp.async.bulk.commit_group;\n"
)
FILLED = STORE + STORE.replace("+128", "+256") + FENCE + "bar.sync 0;"
TWO_WARPS = {"block": 64}
# Warp 0 arrives twice on one barrier, warp 1 waits for both phases and answers on a second barrier.
MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
OTHER = """
mov.u32 %r6, %cluster_ctarank;
xor.b32 %r7, %r6, 1;
mapa.shared::cluster.u32 %r8, %r3, %r7;
"""
# Each CTA of a pair reads, or arrives on a barrier of, the other one.
PEER = STORE + OTHER + MEET + "add.u32 %r9, %r8, 128;\nld.shared::cluster.b32 %r10, [%r9];\n"
PEER_ARRIVE = INIT + OTHER + MEET + "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];\n"
TWO_PHASES = """
@%p1 mbarrier.init.shared.b64 [%r3], 1;
add.u32 %r42, %r3, 8;
@%p1 mbarrier.init.shared.b64 [%r42], 1;
bar.sync 0;
@%p3 bra CONSUMER;
@%p1 mbarrier.arrive.shared.b64 _, [%r3];
{back0}
@%p1 mbarrier.arrive.shared.b64 _, [%r3];
{back1}
bra.uni END;
CONSUMER:
setp.eq.u32 %p7, %r1, 0;
{first}
@%p7 mbarrier.arrive.shared.b64 _, [%r42];
{second}
@%p7 mbarrier.arrive.shared.b64 _, [%r42];
END:
"""


def _two_phases(second: int) -> str:
    return TWO_PHASES.format(back0=wait(0, "%r42"), back1=wait(1, "%r42"), first=wait(0), second=wait(second))


TENSOR_LOAD = """
mov.b64 %rd6, p0;
cvta.param.u64 %rd7, %rd6;
mov.b32 %r50, 0;
mov.b32 %r51, {column};
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r3+{offset}], [%rd7, {{%r51, %r50}}], [%r3];
"""
TENSOR = {"map": True}
ADDRESS = "ld.param.u64 %rd2, [p1];\ncvt.u64.u32 %rd3, %r4;\nadd.u64 %rd4, %rd2, %rd3;\n"

CASES = {
    "bulk copy not waited for": Case(
        Kind.READ_BEFORE_ARRIVAL,
        INIT + LOAD + READ,
        INIT + LOAD + wait() + READ,
        also=frozenset({Kind.PEER_ENDED}),
    ),
    "cp.async not waited for": Case(
        Kind.READ_BEFORE_ARRIVAL, CP_ASYNC + READ, CP_ASYNC + "cp.async.wait_group 0;\n" + READ
    ),
    "cp.async of another warp, waited for but no barrier": Case(
        Kind.READ_BEFORE_ARRIVAL,
        CP_ASYNC + "cp.async.wait_all;\nxor.b32 %r6, %r5, 128;\nld.shared.b32 %r10, [%r6+128];" + OUT,
        CP_ASYNC
        + "cp.async.wait_all;\nbar.sync 0;\nxor.b32 %r6, %r5, 128;\nld.shared.b32 %r10, [%r6+128];"
        + OUT,
        TWO_WARPS,
        also=frozenset({Kind.RACE}),
    ),
    "cp.async with a wait for fewer groups than there are": Case(
        Kind.READ_BEFORE_ARRIVAL,
        TWO_COPIES + "cp.async.wait_group 3;\n" + READ,
        TWO_COPIES + "cp.async.wait_group 1;\n" + READ,
    ),
    "bulk stores with a wait for fewer groups than there are": Case(
        Kind.OVERWRITE_IN_USE,
        FILLED + TWO_STORES + "@%p1 cp.async.bulk.wait_group.read 3;\n" + OVERWRITE + DRAIN,
        FILLED + TWO_STORES + "@%p1 cp.async.bulk.wait_group.read 1;\n" + OVERWRITE + DRAIN,
    ),
    "WGMMA with a wait for fewer groups than there are": Case(
        Kind.OVERWRITE_IN_USE,
        _wgmma(between="wgmma.wait_group.sync.aligned 2;" + CLOBBER),
        _wgmma(between="wgmma.wait_group.sync.aligned 0;" + CLOBBER),
        WG,
    ),
    "stage refilled while a bulk store reads it": Case(
        Kind.OVERWRITE_IN_USE,
        STORE + FENCE + "bar.sync 0;" + BULK_STORE + OVERWRITE,
        STORE + FENCE + "bar.sync 0;" + BULK_STORE + DRAIN + OVERWRITE,
    ),
    "the kernel ends before a bulk store has read": Case(
        Kind.OVERWRITE_IN_USE,
        STORE + FENCE + "bar.sync 0;" + BULK_STORE,
        STORE + FENCE + "bar.sync 0;" + BULK_STORE + DRAIN,
    ),
    "operand overwritten before the WGMMA is waited for": Case(
        Kind.OVERWRITE_IN_USE, _wgmma(between=CLOBBER), _wgmma(after=CLOBBER), WG
    ),
    "no barrier between warps": Case(
        Kind.RACE,
        "@%p2 st.shared.b32 [%r5+128], %r0;\nxor.b32 %r6, %r5, 128;\n@%p3 ld.shared.b32 %r10, [%r6+128];\n",
        (
            "@%p2 st.shared.b32 [%r5+128], %r0;\nbar.sync 0;\nxor.b32 %r6, %r5, 128;\n"
            "@%p3 ld.shared.b32 %r10, [%r6+128];\n"
        ),
        {"block": 64, "race": True},
    ),
    "bulk store with no proxy fence": Case(
        Kind.MISSING_PROXY_FENCE,
        STORE + "bar.sync 0;" + BULK_STORE + DRAIN,
        STORE + FENCE + "bar.sync 0;" + BULK_STORE + DRAIN,
    ),
    "proxy fence of the reader instead of the writer": Case(
        Kind.MISSING_PROXY_FENCE,
        "@%p3 st.shared.b32 [%r5], %r0;\nbar.sync 0;\n@%p2 fence.proxy.async;" + BULK_STORE + DRAIN,
        "@%p3 st.shared.b32 [%r5], %r0;\n@%p3 fence.proxy.async;\nbar.sync 0;" + BULK_STORE + DRAIN,
        TWO_WARPS,
    ),
    "WGMMA operand with no proxy fence": Case(Kind.MISSING_PROXY_FENCE, _wgmma(fence=""), _wgmma(), WG),
    "accumulator read before the wait": Case(
        Kind.PENDING_REGISTER, _wgmma(between=ADD), _wgmma(after=ADD), WG
    ),
    "no wgmma.fence": Case(Kind.MISSING_WGMMA_FENCE, _wgmma(before=""), _wgmma(), WG),
    "accumulator changed after wgmma.fence": Case(
        Kind.MISSING_WGMMA_FENCE,
        _wgmma(before="wgmma.fence.sync.aligned;\nadd.f32 %r20, %r21, %r22;"),
        _wgmma(before="add.f32 %r20, %r21, %r22;\nwgmma.fence.sync.aligned;"),
        WG,
    ),
    "accumulator read, then overwritten with no wgmma.fence between": Case(
        Kind.MISSING_WGMMA_FENCE,
        _wgmma(after=READ_AND_AGAIN),
        _wgmma(after=READ_AND_AGAIN.replace("// fence", "wgmma.fence.sync.aligned;")),
        WG,
    ),
    "too many arrivals": Case(
        Kind.ARRIVE_COUNT,
        INIT + "setp.lt.u32 %p4, %r1, 2;\n@%p4 mbarrier.arrive.shared.b64 _, [%r3];",
        INIT + "setp.lt.u32 %p4, %r1, 1;\n@%p4 mbarrier.arrive.shared.b64 _, [%r3];",
    ),
    "too few arrivals": Case(
        Kind.ARRIVE_COUNT,
        INIT.replace("[%r3], 1", "[%r3], 3")
        + "setp.lt.u32 %p4, %r1, 2;\n@%p4 mbarrier.arrive.shared.b64 _, [%r3];",
        INIT.replace("[%r3], 1", "[%r3], 2")
        + "setp.lt.u32 %p4, %r1, 2;\n@%p4 mbarrier.arrive.shared.b64 _, [%r3];",
    ),
    "more bytes expected than copied": Case(
        Kind.TRANSACTION_COUNT,
        INIT + LOAD.replace("[%r3], 128;\n", "[%r3], 256;\n", 1),
        INIT + LOAD + wait(),
        also=frozenset({Kind.PEER_ENDED}),
    ),
    "parity not flipped": Case(
        Kind.PHASE_WAITED_TWICE, _two_phases(0), _two_phases(1), TWO_WARPS, also=frozenset({Kind.DEADLOCK})
    ),
    "mbarrier never initialised": Case(
        Kind.BARRIER_STATE,
        "@%p1 mbarrier.arrive.shared.b64 _, [%r3];",
        INIT + "@%p1 mbarrier.arrive.shared.b64 _, [%r3];",
    ),
    "the other CTA may end before this reads it": Case(
        Kind.PEER_ENDED, PEER, PEER + MEET, {"grid": 2, "cluster": 2}
    ),
    "the other CTA may end before this arrives there": Case(
        Kind.PEER_ENDED,
        PEER_ARRIVE,
        PEER_ARRIVE + wait(),
        {"grid": 2, "cluster": 2},
    ),
    "the other CTA may not have begun": Case(
        Kind.PEER_ENDED,
        PEER.replace(MEET, "") + MEET,
        PEER + MEET,
        {"grid": 2, "cluster": 2},
        also=frozenset({Kind.RACE, Kind.UNINITIALISED}),
    ),
    "deadlock on an mbarrier": Case(Kind.DEADLOCK, INIT + wait(0), INIT + wait(1)),
    "deadlock on a named barrier": Case(Kind.DEADLOCK, "@%p2 bar.sync 1, 64;", "bar.sync 1, 64;", TWO_WARPS),
    "deadlock on a short transaction": Case(
        Kind.DEADLOCK, INIT + LOAD.replace("[%r3], 128;\n", "[%r3], 256;\n", 1) + wait(), INIT + LOAD + wait()
    ),
    "global write past the end": Case(
        Kind.OUT_OF_BOUNDS, ADDRESS + "st.global.b32 [%rd4+4], %r0;", ADDRESS + "st.global.b32 [%rd4], %r0;"
    ),
    "shared write past the end": Case(
        Kind.OUT_OF_BOUNDS, "st.shared.b32 [%r5+4000], %r0;", "st.shared.b32 [%r5+3968], %r0;"
    ),
    "misaligned shared access": Case(
        Kind.MISALIGNED, "st.shared.v2.b32 [%r5+4], {%r0, %r0};", "@%p1 st.shared.v2.b32 [%r5+8], {%r0, %r0};"
    ),
    "misaligned global access": Case(
        Kind.MISALIGNED,
        ADDRESS + "@%p1 st.global.b32 [%rd4+2], %r0;",
        ADDRESS + "@%p1 st.global.b32 [%rd4+4], %r0;",
    ),
    "shared memory read before any write": Case(Kind.UNINITIALISED, READ, STORE + READ),
    "undefined value decides a branch": Case(
        Kind.UNINITIALISED,
        "ld.shared.b32 %r10, [%r5+128];\nadd.u32 %r10, %r10, 1;\nsetp.eq.u32 %p4, %r10, 0;\n@%p4 trap;",
        "ld.shared.b32 %r10, [%r5+128];\nadd.u32 %r10, %r10, 1;\nsetp.eq.u32 %p4, %r10, 0;",
    ),
    "undefined value passed on through shared memory": Case(
        Kind.UNINITIALISED,
        "ld.shared.b32 %r10, [%r5+256];\nst.shared.b32 [%r5+128], %r10;" + READ,
        "ld.shared.b32 %r10, [%r5+256];\nselp.b32 %r10, %r0, %r10, %p2;\nst.shared.b32 [%r5+128], %r10;"
        + READ,
    ),
    "global memory read before any write": Case(
        Kind.UNINITIALISED,
        ADDRESS + "ld.global.b32 %r10, [%rd4];\nst.global.b32 [%rd4], %r10;",
        ADDRESS + "st.global.b32 [%rd4], %r0;\nld.global.b32 %r10, [%rd4];",
        {"unwritten": True},
    ),
    "WGMMAs of different shapes": Case(
        Kind.BARRIER_DIVERGENCE,
        "".join(f"mov.b32 %r{n}, 0;\n" for n in range(24, 28)) + _wgmma(after=UNLIKE),
        _wgmma(after=UNLIKE.replace("@%p2 bra", "bra.uni")),
        WG,
    ),
    "barrier inside a divergent branch": Case(
        Kind.BARRIER_DIVERGENCE,
        "setp.lt.u32 %p4, %r1, 16;\n@%p4 bra SKIP;\nbar.sync 0;\nSKIP:\n",
        "setp.lt.u32 %p4, %r1, 16;\n@%p4 bra SKIP;\nadd.u32 %r10, %r1, 1;\nSKIP:\nbar.sync 0;\n",
    ),
    "shuffle that names lanes of another path": Case(
        Kind.BARRIER_DIVERGENCE,
        "setp.lt.u32 %p4, %r1, 16;\n@%p4 bra SKIP;\nshfl.sync.idx.b32 %r10, %r1, 0, 31, -1;\nSKIP:\n",
        (
            "setp.lt.u32 %p4, %r1, 16;\n@%p4 bra SKIP;\n"
            "shfl.sync.idx.b32 %r10, %r1, 16, 31, 0xffff0000;\nSKIP:\n"
        ),
    ),
    "tensor copy to an address that is not aligned": Case(
        Kind.DESCRIPTOR,
        INIT + TENSOR_LOAD.format(offset=80, column=0),
        INIT + TENSOR_LOAD.format(offset=128, column=0) + wait(),
        TENSOR,
        also=frozenset({Kind.TRANSACTION_COUNT}),
    ),
    "tensor copy that starts within 16 bytes of its row": Case(
        Kind.DESCRIPTOR,
        INIT + TENSOR_LOAD.format(offset=128, column=3),
        INIT + TENSOR_LOAD.format(offset=128, column=4) + wait(),
        TENSOR,
        also=frozenset({Kind.TRANSACTION_COUNT}),
    ),
    "unknown instruction": Case(
        Kind.UNKNOWN_OPCODE, "tcgen05.fence::before_thread_sync;", "fence.proxy.async;"
    ),
    "trap": Case(Kind.TRAP, "@%p1 trap;", "setp.gt.u32 %p4, %r1, 99;\n@%p4 trap;"),
}


@pytest.mark.parametrize(
    "box, swizzle, message", [((6, 4), 0, "24 bytes is not"), ((16, 2), 1, "over the 32")]
)
def test_a_tensor_map_that_the_hardware_refuses_is_reported(box, swizzle, message):
    columns = 16
    body = INIT + TENSOR_LOAD.format(offset=1024, column=0)
    target = torch.zeros(32, dtype=torch.int32)

    def reports(box, swizzle):
        source = torch.arange(128, dtype=torch.int32).view(8, columns)
        return run(body, [TensorMap(source, box, swizzle), target]).reports

    found = [r for r in reports(box, swizzle) if r.kind == Kind.DESCRIPTOR]
    assert len(found) == 1 and message in found[0].message
    assert not [r for r in reports((8, 4), swizzle) if r.kind == Kind.DESCRIPTOR]


def _findings(body: str, settings: dict, seed: int) -> set[Kind]:
    source = torch.arange(64, dtype=torch.int32)
    target = torch.zeros(32 if settings.get("block", 32) == 32 else settings["block"], dtype=torch.int32)
    first = TensorMap(source.view(8, 8), (8, 4)) if settings.get("map") else source
    try:
        session = run(
            body,
            [first, target],
            block=settings.get("block", 32),
            smem=settings.get("smem", 4096),
            grid=settings.get("grid", 1),
            cluster=settings.get("cluster", 1),
            seed=seed,
            unwritten=(target,) if settings.get("unwritten") else (),
        )
    except EmulatorError as error:
        return {r.kind for r in error.reports}
    return {r.kind for r in session.reports}


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_found(name: str) -> None:
    case = CASES[name]
    found = [_findings(case.wrong, case.settings, seed) for seed in range(6)]
    assert all(found), "every schedule must show something"
    assert case.kind in set.union(*found)
    assert set.union(*found) <= {case.kind} | case.also


@pytest.mark.parametrize("name", CASES)
def test_its_correct_twin_is_silent(name: str) -> None:
    case = CASES[name]
    for seed in range(4):
        assert _findings(case.right, case.settings, seed) == set(), f"seed {seed}"


def test_every_kind_has_a_case() -> None:
    of_several_runs = {Kind.SCHEDULE_DEPENDENT}
    assert {case.kind for case in CASES.values()} == set(Kind) - of_several_runs


def test_a_phase_may_be_waited_for_again_before_its_stage_is_given_back() -> None:
    twice = wait(0) + "bar.sync 2, 32;\n" + wait(0)
    body = TWO_PHASES.format(back0=wait(0, "%r42"), back1=wait(1, "%r42"), first=twice, second=wait(1))
    for seed in range(6):
        assert not run(body, [torch.zeros(1)], seed=seed, **TWO_WARPS).reports


def test_a_report_names_place_and_address() -> None:
    source, target = torch.arange(64, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    session = run(INIT + LOAD + READ, [source, target], grid=2)
    report = session.reports[0]
    assert report.kernel == "k"
    assert "ld.shared.b32" in report.ptx_text and report.ptx_line > 0
    assert report.warp == 0 and report.cta in ((0, 0, 0), (1, 0, 0))
    assert report.space == "shared" and report.address == 1024 + 128
    assert "bulk copy that completes on mbarrier 0x400" in str(report)


def test_an_out_of_bounds_access_names_the_nearest_tensor() -> None:
    session = run(ADDRESS + "st.global.b32 [%rd4+4], %r0;", [torch.zeros(64), torch.zeros(32)])
    assert "0 bytes past the end of p1 (128 bytes)" in session.reports[0].message
    assert session.reports[0].lanes == "lanes 31" or "p1" in str(session.reports[0])


def test_a_deadlock_says_what_each_warp_waits_for() -> None:
    with pytest.raises(EmulatorError, match="deadlock") as caught:
        run(INIT + wait(0), [torch.zeros(1), torch.zeros(1)], block=64)
    text = str(caught.value.reports[-1])
    assert "warps [0, 1]: mbarrier 0x400" in text and "0 of 1 arrivals" in text
