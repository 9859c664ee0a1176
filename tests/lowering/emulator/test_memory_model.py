"""Order of shared memory across proxies and CTAs: each case with its bug, and without."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import INIT, run, wait  # noqa: E402

from lowering.emulator import EmulatorError, Kind, Report  # noqa: E402

LOAD = """
ld.param.u64 %rd1, [p0];
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+128], [%rd1], 128, [%r3];
"""
STORE = "st.shared.b32 [%r5+128], %r0;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
BARRIER = "bar.sync 0;\n"
INIT_FENCE = "fence.mbarrier_init.release.cluster;\n"
MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
RELAXED_MEET = MEET.replace("arrive", "arrive.relaxed")
OTHER = """
mov.u32 %r6, %cluster_ctarank;
xor.b32 %r7, %r6, 1;
mapa.shared::cluster.u32 %r8, %r3, %r7;
"""
PEER_READS = "ld.shared::cluster.b32 %r10, [%r8+128];\n"
HAND_OVER = (
    INIT
    + "@%p3 bra R;\n"
    + STORE
    + "@%p1 mbarrier.arrive.ORDER.cta.shared.b64 _, [%r3];\nbra END;\nR:\n"
    + wait()
    + "ld.shared.b32 %r10, [%r5];\nEND:\n"
)
PAIR = {"grid": 2, "cluster": 2}
TWO_WARPS = {"block": 64}
# A multicast load of rank 0 fills both CTAs of a pair; each counts its own 128 bytes.
MULTICAST = """
mov.b16 %rs1, 3;
ld.param.u64 %rd1, [p0];
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
setp.ne.u32 %p6, %r6, 0;
@%p6 bra SENT;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r3+128], [%rd1], 128, [%r3], %rs1;
SENT:
"""
# Rank 0 copies its shared memory to the peer, which counts the bytes; then rank 0 uses the source again.
PUSH = """
setp.ne.u32 %p6, %r6, 0;
@%p6 bra RECEIVER;
add.u32 %r9, %r8, 128;
@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r3+128], 128, [%r8];
bra SENT;
RECEIVER:
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
{receive}
SENT:
"""


def _push(after: str, receive: str = wait()) -> str:
    start = INIT + OTHER + STORE + FENCE + MEET
    return start + PUSH.format(receive=receive) + after


@dataclass(frozen=True)
class Case:
    """`right` differs from `wrong` by the one bug, which is of `kind`."""

    kind: Kind
    wrong: str
    right: str
    settings: dict = field(default_factory=dict)
    also: frozenset = frozenset()  # what the same bug leads to besides


PEER_ARRIVES = (
    OTHER + RELAXED_MEET + "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];\n" + wait()
)
INITIALISED = "@%p1 mbarrier.init.shared.b64 [%r3], 1;\n"

CASES = {
    "a load over ordinary stores": Case(
        Kind.MISSING_PROXY_FENCE,
        INIT + STORE + BARRIER + LOAD + wait(),
        INIT + STORE + FENCE + BARRIER + LOAD + wait(),
    ),
    "a multicast load over ordinary stores of the peer": Case(
        Kind.MISSING_PROXY_FENCE,
        INIT + OTHER + STORE + MEET + MULTICAST + wait() + MEET,
        INIT + OTHER + STORE + FENCE + MEET + MULTICAST + wait() + MEET,
        PAIR,
    ),
    "a load that counts on an mbarrier with no fence after its initialisation": Case(
        Kind.BARRIER_STATE,
        INITIALISED + BARRIER + LOAD + wait(),
        INITIALISED + INIT_FENCE + BARRIER + LOAD + wait(),
    ),
    "the fence of the initialisation in another warp": Case(
        Kind.BARRIER_STATE,
        INITIALISED + "@%p3 fence.mbarrier_init.release.cluster;" + BARRIER + LOAD + wait(),
        INITIALISED + "@%p2 fence.proxy.async;" + BARRIER + LOAD + wait(),
        TWO_WARPS,
    ),
    "a relaxed cluster barrier after an initialisation with no fence": Case(
        Kind.BARRIER_STATE,
        INITIALISED + PEER_ARRIVES,
        INITIALISED + INIT_FENCE + PEER_ARRIVES,
        PAIR,
    ),
    "a relaxed cluster barrier between a store and the peer's load": Case(
        Kind.RACE,
        STORE + OTHER + RELAXED_MEET + PEER_READS + MEET,
        STORE + OTHER + MEET + PEER_READS + RELAXED_MEET,
        PAIR,
    ),
    "a relaxed cluster barrier with a fence of the CTA's scope": Case(
        Kind.RACE,
        STORE + OTHER + "fence.acq_rel.cta;" + RELAXED_MEET + PEER_READS + MEET,
        STORE + OTHER + "fence.acq_rel.cluster;" + RELAXED_MEET + PEER_READS + MEET,
        PAIR,
    ),
    "a relaxed arrival on an mbarrier": Case(
        Kind.RACE,
        HAND_OVER.replace("ORDER", "relaxed"),
        HAND_OVER.replace("ORDER", "release"),
        TWO_WARPS,
    ),
    "a CTA that ends while its own load is under way": Case(
        Kind.PEER_ENDED, INIT + LOAD, INIT + LOAD + wait()
    ),
    "a CTA that ends while the peer's load writes it": Case(
        Kind.PEER_ENDED,
        INIT + OTHER + MEET + MULTICAST,
        INIT + OTHER + MEET + MULTICAST + wait(),
        PAIR,
    ),
    "a load into a peer that may not have begun": Case(
        Kind.BARRIER_STATE,
        INIT + OTHER + MULTICAST + wait() + MEET,
        INIT + OTHER + MEET + MULTICAST + wait() + MEET,
        PAIR,
        also=frozenset({Kind.PEER_ENDED, Kind.DEADLOCK, Kind.TRANSACTION_COUNT}),
    ),
    "a CTA that ends while its shared memory is copied to the peer": Case(
        Kind.PEER_ENDED, _push(""), _push(MEET), PAIR
    ),
    "a store over what is being copied to the peer": Case(
        Kind.OVERWRITE_IN_USE, _push(STORE.replace("%r0", "%r1") + MEET), _push(MEET + STORE), PAIR,
        also=frozenset({Kind.RACE}),
    ),
}  # fmt: skip


# Warp 0 writes its words and signals through a flag in shared memory; warp 1 waits for it and reads them.
FLAG = """
mov.b32 %r20, 0;
mov.b32 %r21, 1;
@%p1 st.shared.b32 [%r3+512], %r20;
bar.sync 0;
@%p3 bra READER;
st.shared.b32 [%r5], %r0;
bar.warp.sync -1;
@%p1 SIGNAL;
bra END;
READER:
LOOK %r22, [%r3+512];
setp.eq.u32 %p7, %r22, 0;
@%p7 bra READER;
AFTER
ld.shared.b32 %r23, [%r5+-128];
END:
"""
MP_STORE = "st.{}.shared.b32 [%r3+512], %r21"
MP_ADD = "red.{}.shared.add.u32 [%r3+512], %r21"
MP_FENCED = "fence.acq_rel.cta;\n@%p1 "
# How the flag is set, how it is looked at, and what follows: whether PTX orders the words.
FLAGS = [
    (MP_STORE.format("release.cta"), "ld.acquire.cta.shared.b32", "", True),
    (MP_STORE.format("relaxed.cta"), "ld.acquire.cta.shared.b32", "", False),
    (MP_STORE.format("release.cta"), "ld.relaxed.cta.shared.b32", "", False),
    (MP_STORE.format("release.cta"), "ld.relaxed.cta.shared.b32", "fence.acq_rel.cta;", True),
    (MP_STORE.format("volatile"), "ld.volatile.shared.b32", "membar.cta;", False),
    ("membar.cta;\n@%p1 " + MP_STORE.format("volatile"), "ld.volatile.shared.b32", "membar.cta;", True),
    (MP_ADD.format("relaxed.cta"), "ld.acquire.cta.shared.b32", "", False),
    (MP_ADD.format("release.cta"), "ld.acquire.cta.shared.b32", "", True),
    (MP_FENCED + MP_ADD.format("relaxed.cta"), "ld.relaxed.cta.shared.b32", "fence.acq_rel.cta;", True),
    ("st.shared.b32 [%r3+512], %r21", "ld.shared.b32", "", False),
]


@pytest.mark.parametrize(("signal", "look", "after", "ordered"), FLAGS)
@pytest.mark.parametrize("seed", range(3))
def test_flags_in_shared_memory_need_a_release_and_an_acquire(
    signal: str, look: str, after: str, ordered: bool, seed: int
) -> None:
    body = FLAG.replace("SIGNAL", signal).replace("LOOK", look).replace("AFTER", after)
    found = {r.kind for r in reports(body, TWO_WARPS, seed)}
    assert found == (set() if ordered else {Kind.RACE})


def test_a_release_in_shared_memory_hands_proxy_fences_on() -> None:
    body = FLAG.replace("SIGNAL", MP_STORE.format("release.cta")).replace("LOOK", "ld.acquire.cta.shared.b32")
    copy = "setp.eq.u32 %p8, %r1, 0;\nld.param.u64 %rd1, [p0];\n" + "".join(
        f"@%p8 cp.async.bulk.{what};\n"
        for what in ("global.shared::cta.bulk_group [%rd1], [%r3], 128", "commit_group", "wait_group 0")
    )
    body = body.replace("AFTER", copy)
    assert {r.kind for r in reports(body, TWO_WARPS, 0)} == {Kind.MISSING_PROXY_FENCE}
    fenced = body.replace("bar.warp.sync", "fence.proxy.async;\nbar.warp.sync")
    assert not reports(fenced, TWO_WARPS, 0)


def reports(body: str, settings: dict, seed: int) -> list[Report]:
    """The findings of a kernel with two tensors of 64 words, also where it stops."""
    tensors = [torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)]
    try:
        return run(body, tensors, seed=seed, **settings).reports
    except EmulatorError as error:
        return list(error.reports)


@pytest.mark.parametrize("name", CASES)
def test_the_bug_is_found(name: str) -> None:
    case = CASES[name]
    found = [{r.kind for r in reports(case.wrong, case.settings, seed)} for seed in range(6)]
    assert all(found), "every schedule must show something"
    assert case.kind in set.union(*found) and set.union(*found) <= {case.kind} | case.also


@pytest.mark.parametrize("name", CASES)
def test_its_correct_twin_is_silent(name: str) -> None:
    case = CASES[name]
    for seed in range(6):
        found = reports(case.right, case.settings, seed)
        assert not found, f"seed {seed}: {[str(r) for r in found]}"


def test_equal_values_in_shared_memory_are_a_warning_and_not_an_error() -> None:
    both = "shl.b32 %r7, %r1, 2;\nadd.u32 %r7, %r7, %r3;\nst.shared.b32 [%r7], {};"
    found = reports(both.format("%r1"), TWO_WARPS, 0)
    assert [(r.kind, r.warning) for r in found] == [(Kind.RACE, True)]
    found = reports(both.format("%r0"), TWO_WARPS, 0)
    assert [(r.kind, r.warning) for r in found] == [(Kind.RACE, False)]
