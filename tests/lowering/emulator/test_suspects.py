"""The lines to look at that a report names: what is missing or wrong is among them, or next to them."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import INIT, run, wait  # noqa: E402

from lowering.emulator import EmulatorError, Kind, history, statements  # noqa: E402
from lowering.emulator.reports import (  # noqa: E402
    MOST_LINES,
    Place,
    Report,
    SourceLine,
    Suspect,
    first_lines,
    where_to_look,
)

COPY = """
ld.param.u64 %rd1, [p0]; cvta.to.global.u64 %rd2, %rd1;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], BYTES;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+512], [%rd2], 128, [%r3];
"""


def named(body: str, kind: Kind, block: int = 64) -> list[str]:
    """The instructions at the lines that the first finding of a kind names; `body` has no source lines."""
    data = torch.zeros(64, dtype=torch.int32)
    try:
        session = run(body, [data], block=block)
        reports = session.reports
    except EmulatorError as error:
        reports = list(error.reports)
    report = next(r for r in reports if r.kind is kind)
    assert 0 < len(report.suspects) <= MOST_LINES and str(report).count("look at:") == 1
    return [suspect.place.ptx_text for suspect in report.suspects]


def has(found: list[str], opcode: str) -> bool:
    return any(text.startswith(opcode) for text in found)


def test_too_many_bytes_announced_name_the_announcement_and_the_copy() -> None:
    found = named(INIT + COPY.replace("BYTES", "144") + wait(), Kind.DEADLOCK)
    assert has(found, "mbarrier.arrive.expect_tx") and has(found, "cp.async.bulk.shared")


def test_a_count_that_is_never_reached_names_the_initialisation() -> None:
    body = INIT.replace("[%r3], 1", "[%r3], 2") + COPY.replace("BYTES", "128") + wait()
    assert has(named(body, Kind.DEADLOCK)[:1], "mbarrier.init")


def test_a_missing_arrival_is_looked_for_after_the_wait_for_what_is_given_back() -> None:
    """The first warp fills a stage twice; the second reads it and does not give it back."""
    empty = "@%p1 mbarrier.init.shared.b64 [%r3+8], 1;\n"
    fill = COPY.replace("BYTES", "128") + wait(0, "%r10") + COPY.replace("BYTES", "128").split("\n", 2)[2]
    body = f"{empty}{INIT}add.u32 %r10, %r3, 8;\n@%p2 bra FILL;\n{wait()}\nbra END;\nFILL:\n{fill}\nEND:\n"
    found = named(body, Kind.DEADLOCK)
    assert sum(text.startswith("mbarrier.try_wait") for text in found) == 2


def test_a_read_before_a_copy_arrived_names_the_last_synchronisation_and_the_announcement() -> None:
    found = named(
        INIT + COPY.replace("BYTES", "128") + "ld.shared.b32 %r20, [%r5+512];", Kind.READ_BEFORE_ARRIVAL
    )
    assert has(found, "mbarrier.arrive.expect_tx") or has(found, "bar.sync")


def test_a_missing_proxy_fence_names_the_store_and_the_barrier_after_it() -> None:
    body = """
ld.param.u64 %rd1, [p0]; cvta.to.global.u64 %rd2, %rd1;
st.shared.b32 [%r5+512], %r0;
bar.sync 0;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3+512], 128;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read 0;
"""
    found = named(body, Kind.MISSING_PROXY_FENCE)
    assert has(found, "st.shared") and has(found, "bar.sync")


def test_bulk_stores_left_at_the_end_name_their_wait() -> None:
    body = """
ld.param.u64 %rd1, [p0]; cvta.to.global.u64 %rd2, %rd1;
st.shared.b32 [%r5+512], %r0;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3+512], 128;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read 1;
"""
    assert has(named(body, Kind.OVERWRITE_IN_USE)[:1], "cp.async.bulk.wait_group.read")


@pytest.mark.parametrize(
    ("opcode", "kinds"),
    [
        ("bar.sync", {history.ACQUIRE, history.RELEASE}),
        ("bar.arrive", {history.RELEASE}),
        ("bar.warp.sync", set()),
        ("barrier.cluster.wait", {history.ACQUIRE}),
        ("barrier.cluster.arrive.relaxed", {history.RELEASE}),
        ("mbarrier.try_wait.parity.shared.b64", {history.ACQUIRE}),
        ("mbarrier.arrive.expect_tx.shared.b64", {history.RELEASE}),
        ("cp.async.bulk.wait_group.read", {history.ACQUIRE, history.DRAIN}),
        ("wgmma.commit_group.sync.aligned", {history.COMMIT}),
        ("cp.async.mbarrier.arrive.noinc.shared.b64", {history.RELEASE}),
        ("fence.proxy.async", {history.FENCE}),
        ("ld.global.b32", set()),
        ("ld.acquire.gpu.global.b32", {history.ACQUIRE}),
        ("red.release.gpu.global.add.u32", {history.RELEASE}),
    ],
)
def test_what_an_opcode_does_for_the_order_of_accesses(opcode: str, kinds: set[str]) -> None:
    assert history.what_of(tuple(opcode.split("."))) == kinds


def test_lines_are_counted_in_statements(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text('def f():\n    """Text."""\n    # why\n    a(\n        1,\n    )\n\n    b()\n')
    path = str(source)
    assert statements.between(path, 4, 8) == [] and statements.between(path, 1, 8) == [4]
    assert statements.number(path, 4) == statements.number(path, 6) == statements.number(path, 8) - 1
    assert statements.function(path, 5) == (1, 8)
    assert statements.number(str(tmp_path / "none.py"), 7) == 7


def _at(line: int) -> Suspect:
    return Suspect("a reason", Place("", line, "", (SourceLine("/nowhere.py", line, "f"),)))


def test_a_launch_names_few_lines_and_each_once() -> None:
    reports = [
        Report(Kind.RACE, "", suspects=tuple(_at(line) for line in range(k, k + 5))) for k in (1, 4, 20)
    ]
    lines = [suspect.place.stack[0].line for suspect in where_to_look(reports)]
    assert lines[:4] == [1, 2, 3, 4] and len(lines) == len(set(lines)) == MOST_LINES
    assert first_lines([_at(1)._replace(until=MOST_LINES + 5), _at(2)]) == (_at(2),)
