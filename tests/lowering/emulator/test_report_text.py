"""The parts of a report: both sides, call stacks, names, tables, indices. Each kernel has one planted bug."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import report_kernels  # noqa: E402

from lowering import emulator  # noqa: E402
from lowering.emulator import EmulatorError, Kind, Report  # noqa: E402
from lowering.emulator.hints import HINTS  # noqa: E402
from lowering.emulator.views import view_of  # noqa: E402

SOURCE = Path(report_kernels.__file__)


def line_of(comment: str) -> int:
    """The line of the kernels' file that ends with a comment."""
    lines = SOURCE.read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith(f"# {comment}"))


def reports_of(function: object, *args: object, **constants: object) -> list[Report]:
    with emulator.run(raise_on_report=False) as session:
        try:
            function(*args, **constants)  # type: ignore[operator]
        except EmulatorError as error:
            assert error.reports
    return session.reports


@pytest.fixture(scope="module")
def race() -> Report:
    found = reports_of(report_kernels.run_exchange, torch.randn(128), torch.empty(128))
    return next(r for r in found if r.kind is Kind.RACE and not r.warning)


def test_a_race_has_both_sides_with_their_call_stacks(race: Report) -> None:
    store = ["the helper's store", "the middle", "the kernel's own line"]
    load = ["the helper's load", "the kernel's own line"]
    stacks = [[(line.line, line.function) for line in place.stack] for place in race.places]
    functions = ["put", "exchange", "exchange_kernel"]
    expected = [
        [(line_of(comment), name) for comment, name in zip(store, functions)],
        [(line_of(comment), name) for comment, name in zip(load, functions[1:])],
    ]
    assert sorted(stacks) == sorted(expected)
    assert {place.ptx_text.split()[0] for place in race.places} == {"st.shared.b32", "ld.shared.b32"}
    assert all(place.ptx_line > 0 for place in race.places) and "of CTA (0, 0, 0)" in race.places[1].who


def test_the_text_has_the_kind_both_sides_and_what_usually_mends_it(race: Report) -> None:
    lines = str(race).splitlines()
    assert lines[0].startswith("RACE: ")
    own = f"{SOURCE}:{line_of('the kernel' + chr(39) + 's own line')} in exchange_kernel"
    assert sum(own in line for line in lines) == 2
    assert any(line.startswith("  other side: ") for line in lines)
    assert lines[-1].endswith(HINTS[Kind.RACE])


def test_every_kind_but_the_two_that_need_none_has_a_hint() -> None:
    assert set(Kind) - set(HINTS) <= {Kind.UNKNOWN_OPCODE, Kind.TRAP}


def test_a_buffer_is_named_after_its_variable(race: Report) -> None:
    assert race.buffer.startswith("sX, byte ")


def test_two_writes_of_one_value_are_a_warning() -> None:
    found = reports_of(report_kernels.run_exchange, torch.randn(128), torch.empty(128))
    same = [r for r in found if "same value" in r.message]
    assert [r.severity.value for r in same] == ["warning"]
    assert same[0].source.endswith(f":{line_of('all write zero')}")


def test_a_report_is_json(race: Report) -> None:
    read = json.loads(json.dumps(race.as_dict()))
    assert read["kind"] == "RACE" and read["severity"] == "error" and "exchange_kernel" in read["kernel"]
    assert len(read["places"]) == 2 and read["stack"] == read["places"][0]["stack"]
    assert read["places"][1]["stack"][-1] == {
        "path": str(SOURCE), "line": line_of("the kernel's own line"), "function": "exchange_kernel",
    }  # fmt: skip


def _ring(arriving: int, waits: bool) -> Report:
    found = reports_of(report_kernels.run_ring, torch.zeros(32), arriving=arriving, waits=waits)
    assert len(found) == 1, found
    return found[0]


def test_a_deadlock_names_the_barrier_who_waits_who_arrived_and_who_did_not() -> None:
    report = _ring(1, True)
    assert report.kind is Kind.DEADLOCK
    message = report.message
    assert "warps [0]: mbarrier full[1] (0x408)" in message and "1 of 2 arrivals" in message
    assert f"initialised at {SOURCE}:{line_of('the initialisation')}" in message
    assert f"at {SOURCE}:{line_of('the wait')}" in message
    assert "CTA (0, 0, 0) warp 1               arrived 1 times in this phase, 1 in all; ended" in message
    assert "never arrived: warps [2, 3], ended" in message
    assert f"never arrived: warps [0], waits at {SOURCE}" in message


@pytest.mark.parametrize("arriving, phase, counts", [(1, 0, [1]), (3, 1, [0, 0, 1])])
def test_a_phase_left_half_arrived_has_the_table_too(arriving: int, phase: int, counts: list[int]) -> None:
    report = _ring(arriving, False)
    assert report.kind is Kind.ARRIVE_COUNT and report.buffer == "full[1]"
    assert f"phase {phase}, 1 of 2 arrivals" in report.message
    rows = [line for line in report.message.splitlines() if "times in this phase" in line]
    assert sorted(int(row.split(" times")[0].split()[-1]) for row in rows) == counts
    assert all(" 1 in all; ended" in row for row in rows)


def test_a_correct_ring_is_silent() -> None:
    assert not reports_of(report_kernels.run_ring, torch.zeros(32), arriving=2, waits=True)


def _fill(tensor: torch.Tensor, row: int, column: int) -> list[Report]:
    return reports_of(report_kernels.fill, tensor, row=row, column=column)


def test_an_index_out_of_bounds_is_named_with_its_thread() -> None:
    (report,) = _fill(torch.zeros(100, 64), 100, 3)
    assert report.kind is Kind.OUT_OF_BOUNDS and report.severity.value == "error"
    assert "argument 'mX' (100, 64): row 100, column 3; row 100 is 1 past the last" in report.message
    assert "thread (5, 0, 0)" in report.message


def test_a_write_between_the_rows_of_a_view_is_an_error() -> None:
    storage = torch.zeros(8, 32)
    (report,) = _fill(storage[:, :16], 2, 20)
    assert report.kind is Kind.OUT_OF_BOUNDS and not report.warning
    assert "row 2, column 20; column 20 is 5 past the last" in report.message
    assert not _fill(storage[:, :16], 2, 15) and not _fill(storage, 2, 20)


def test_a_read_between_the_rows_of_a_view_is_a_warning() -> None:
    storage = torch.zeros(8, 32)
    found = reports_of(report_kernels.copy_element, storage[:, :16], torch.zeros(4), row=2, column=20)
    assert [(r.kind, r.warning) for r in found] == [(Kind.OUT_OF_BOUNDS, True)]
    assert "column 20 is 5 past the last" in found[0].message


@pytest.mark.parametrize(
    "shape, strides, gaps",
    [((4, 8), (8, 1), False), ((4, 8), (10, 1), True), ((8, 4), (1, 8), False), ((4, 8), (0, 1), False),
     ((3, 3), (1, 1), False), ((2, 3, 4), (16, 4, 1), True)],
)  # fmt: skip
def test_only_views_with_bytes_between_their_elements_have_gaps(shape, strides, gaps) -> None:
    assert view_of("x", torch.zeros(64).as_strided(shape, strides)).has_gaps() is gaps


def test_the_bytes_outside_of_a_view_are_those_of_no_element() -> None:
    tensor = torch.zeros(64, dtype=torch.float32).as_strided((2, 3, 4), (16, 5, 1))
    view = view_of("x", tensor)
    inside = {view.start + 4 * (16 * i + 5 * j + k) for i in range(2) for j in range(3) for k in range(4)}
    addresses = [view.start + 4 * i for i in range(32)]
    outside = view.outside(np.array(addresses), 4)
    assert [a for a, bad in zip(addresses, outside) if not bad] == sorted(inside)


@pytest.fixture(scope="module")
def product() -> emulator.Session:
    """A product of a producer warp and a consumer warpgroup, in clusters of two CTAs."""
    import kernels_dsl

    a, b = torch.ones(256, 128, dtype=torch.bfloat16), torch.ones(128, 64, dtype=torch.bfloat16)
    config = kernels_dsl.Sm90GemmConfig(tile_m=64, tile_n=64, cluster_m=2)
    with emulator.run(arch="sm_90a") as session:
        kernels_dsl.gemm(a, b, config=config)
    return session


def test_the_timeline_has_roles_cluster_peers_names_and_a_legend(product: emulator.Session) -> None:
    text = str(product.timeline)
    assert "CTA (0, 0, 0) warp 4, producer" in text and "consumer 0" in text
    assert "CTA (1, 0, 0)" in text and "CTAs of one cluster, by rank: (0, 0, 0), (1, 0, 0)" in text
    assert "mbarrier ring.full[1]" in text and "mbarrier ring.empty[0]" in text
    assert text.count("legend: ") == 1 and "L tma load" in text and "| an mbarrier's phase completes" in text


def test_the_trace_is_in_the_trace_event_format(product: emulator.Session, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    product.timeline.save(path)
    trace = json.loads(path.read_text())
    records = trace["traceEvents"]
    for record in records:
        assert {"name", "ph", "pid", "tid"} <= record.keys() and record["ph"] in "XiM"
        assert all(isinstance(record[key], int) for key in ("pid", "tid"))
        if record["ph"] == "M":
            assert record["name"] in ("process_name", "thread_name") and record["args"]["name"]
        else:
            assert record["ts"] >= 0 and record["cat"]
        assert record["ph"] != "X" or record["dur"] > 0
        assert record["ph"] != "i" or record["s"] in "gpt"
    assert len([r for r in records if r["ph"] != "M"]) == len(product.timeline.events)
    titles = {r["args"]["name"] for r in records if r["ph"] == "M"}
    assert "CTA (1, 0, 0), rank 1 of the cluster of CTA (0, 0, 0)" in titles
    assert {"warp 4, producer", "TMA", "mbarrier ring.full[0] (0x400)"} <= titles
    owners = {(r["pid"], r["tid"]) for r in records if r["ph"] == "M" and r["name"] == "thread_name"}
    assert {(r["pid"], r["tid"]) for r in records if r["ph"] != "M"} == owners
