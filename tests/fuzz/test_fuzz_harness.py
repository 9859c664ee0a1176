"""The fuzzer catches every planted fault, cries over nothing else, and outlives crashes and hangs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.fuzz import memory, pool
from tests.fuzz.case import Mode, Outcome, Settings, Status
from tests.fuzz.draw import Draw, cases_a_kernel
from tests.fuzz.families import FAMILIES, generate, module_of
from tests.fuzz.gemm_reduced import draw_reduced
from tests.fuzz.memory import Arena, Layout, MemoryFault
from tests.fuzz.planted import FAULTS
from tests.fuzz.ritual import run_case
from tests.fuzz.serving_append import draw_append
from tests.fuzz.serving_decode import draw_decode
from tests.fuzz.serving_merge import draw_merge
from tests.fuzz.worker import run_one

QUIET = Settings(device="cpu", small=True, plant="none")
PLANTED_FAMILIES = ("gemm", "attention")
IN_PROCESS = tuple(fault for fault in FAULTS if fault not in ("dropped_part", "crash", "hang"))
ENDS = {"crash": "ended with status -11", "hang": "hung"}

OPERATIONS = {
    "gemm_reduce": (
        draw_reduced, ("dropped_part", "write_beside", "unwritten", "unequal_repeats", "input_changed"),
    ),
    "merge_states": (draw_merge, ("dropped_part", "unequal_repeats", "input_changed")),
    "attention_decode": (
        draw_decode, ("dropped_k_tile", "write_beside", "unwritten", "unequal_repeats", "input_changed"),
    ),
    "append_kv": (draw_append, ("write_beside", "unwritten")),
}  # fmt: skip
"""An operation's cases, and the faults that `planted` has for it."""


def _run(operation: str, fault: str, count: int) -> list[Outcome]:
    settings, draw = _planted(fault), OPERATIONS[operation][0]
    cases = [draw(Draw(operation, number, settings)) for number in range(count)]
    return [run_case(number, case, settings) for number, case in enumerate(cases)]


def _planted(fault: str) -> Settings:
    return Settings(device="cpu", small=True, plant=fault)


@pytest.mark.parametrize("family", PLANTED_FAMILIES)
def test_right_operations_raise_no_alarm(family):
    outcomes = [run_one(family, number, QUIET) for number in range(60)]
    assert [x.detail for x in outcomes if x.status is Status.FAILED] == []
    assert sum(x.status is Status.PASSED for x in outcomes) > 50


@pytest.mark.parametrize("family", PLANTED_FAMILIES)
@pytest.mark.parametrize("fault", IN_PROCESS)
def test_a_planted_fault_is_caught(family, fault):
    outcomes = [run_one(family, number, _planted(fault)) for number in range(24)]
    caught = [x for x in outcomes if x.status is Status.FAILED]
    # Cases in which the fault has no effect pass: empty results, results without out=, runs of one call.
    assert len(caught) >= 8, f"{len(caught)} of {len(outcomes)} cases saw {fault}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_right_operations_beside_products_and_on_caches_raise_no_alarm(operation):
    outcomes = _run(operation, "none", 24)
    assert [x.detail for x in outcomes if x.status is Status.FAILED] == []
    assert sum(x.status is Status.PASSED for x in outcomes) > 18


@pytest.mark.parametrize(
    ("operation", "fault"), [(name, fault) for name, (_, faults) in OPERATIONS.items() for fault in faults]
)
def test_a_fault_planted_in_one_operation_is_caught(operation, fault):
    caught = [x for x in _run(operation, fault, 16) if x.status is Status.FAILED]
    assert len(caught) >= 6, f"{len(caught)} of 16 cases saw {fault}"


@pytest.mark.parametrize("fault", ENDS)
def test_a_process_that_dies_or_hangs_costs_one_case(fault):
    outcomes: list[Outcome] = []
    plan = pool.Plan(
        "gemm", _planted(fault), cases=2, workers=1, case_seconds=8.0 if fault == "hang" else 120.0
    )
    pool.run(plan, outcomes.append)
    assert [x.number for x in outcomes] == [0, 1]
    assert all(x.status is Status.FAILED and ENDS[fault] in x.detail for x in outcomes), outcomes
    assert fault != "hang" or all("planted.py" in x.detail for x in outcomes), "no stack of what hung"


def test_a_run_prints_counts_and_repro_lines_and_fails(tmp_path, monkeypatch, capsys):
    from tests.fuzz import __main__ as command

    monkeypatch.setattr(command, "_settings", lambda options: (_planted("unwritten"), 0))
    path = tmp_path / "found.json"
    status = command.main(["gemm", "--cases", "4", "--workers", "1", "--seed", "0", "--out", str(path)])
    said = capsys.readouterr().out
    assert status == 1 and "python -m tests.fuzz gemm --seed 0 --case 0" in said
    found = json.loads(path.read_text())[0]
    assert found["cases"] == 4 and found["failed"] == len(found["failures"]) > 0


def test_wrong_usage_has_a_status_of_its_own():
    command = [sys.executable, "-m", "tests.fuzz", "nonsuch"]
    assert subprocess.run(command, capture_output=True, check=False, cwd=pool.ROOT).returncode == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_case_follows_from_its_number_alone(family):
    settings = Settings(device="cpu", small=True, seed=3)
    for number in (0, 7, 100):
        assert str(generate(family, number, settings)) == str(generate(family, number, settings))
    assert module_of(family).expected_features(Settings())


def test_cases_of_a_block_share_what_the_kernel_depends_on():
    settings = Settings()
    draws = [Draw("gemm", number, settings) for number in range(cases_a_kernel(settings) + 1)]
    first, *others, next_block = [draw.kernel.random() for draw in draws]
    assert all(other == first for other in others) and next_block != first
    shapes = [draw.data.random() for draw in draws]
    assert shapes[0] != shapes[1] and shapes[0] == shapes[10] and 10 < len(set(shapes)) < len(draws)
    assert len({draw.value_seed() for draw in draws}) == len(draws)
    assert len({draw.mode() for draw in draws}) > 1
    emulated = [Draw("gemm", number, Settings(device="cpu", small=True)) for number in range(20)]
    assert len({draw.data.random() for draw in emulated}) == len(emulated)


def test_cases_that_a_long_run_found_to_be_wrong():
    """Factors of two batches that share memory, and NaN that nobody may read in all rows of stride 0."""
    shared, packed = generate("gemm", 4672, Settings()), generate("fp8", 3082, Settings())
    assert shared.batches[0] != shared.batches[1] and not shared.shared
    assert packed.gap and not any(0 in layout.expanded for layout in packed.layouts[1:])


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout((1, 0)), Layout((0, 1), gap=3, offset=1), Layout(step=2), Layout(negated=True),
     Layout(expanded=(0,))],
    ids=str,
)  # fmt: skip
def test_inputs_have_their_values_in_every_layout(layout):
    arena = Arena("cpu")
    values = [torch.randn(5, 7), torch.randn(5, 7)]
    if layout.expanded:
        values = [x[:1].expand(5, 7) for x in values]
    tensor = arena.input("x", lambda generation: values[generation], layout)
    arena.freeze()
    assert torch.equal(tensor.resolve_neg(), values[0]) and tensor.is_neg() == layout.negated
    arena.refill(1)
    arena.check()
    assert torch.equal(tensor.resolve_neg(), values[1])


def test_a_case_that_got_no_memory_is_tried_again():
    """Once, and only if it is memory that lacked."""
    tries = []

    class Starved:
        mode, features = Mode.PLAIN, ("gemm",)

        def build(self, arena, settings):
            tries.append(arena)
            if len(tries) <= lacking:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return generate("gemm", 1, QUIET).build(arena, settings)

    for lacking, status in ((0, Status.PASSED), (1, Status.PASSED), (2, Status.FAILED)):
        tries.clear()
        outcome = run_case(1, Starved(), QUIET)
        assert outcome.status is status and len(tries) == min(lacking, 1) + 1, outcome.detail


@pytest.mark.parametrize("elements", [1 << 26, 5])
def test_every_byte_is_compared(elements, monkeypatch):
    monkeypatch.setattr(memory, "_COMPARED_ELEMENTS", elements)
    arena = Arena("cpu")
    x = arena.input("x", lambda generation: torch.ones(4, 4, dtype=torch.bfloat16), Layout(gap=2))
    out = arena.output("out", (4, 4), torch.float32, Layout(gap=1))
    arena.freeze()
    arena.check_untouched()
    with pytest.raises(MemoryFault, match="16 of 16 elements of out were not written"):
        arena.check()
    out.fill_(1.0)
    arena.check()
    with pytest.raises(MemoryFault, match="around out"):
        arena.check_untouched()
    for place in (-1, 4, 19):
        beside = out.as_strided((1,), (1,), out.storage_offset() + place)
        kept = beside.clone()
        beside.fill_(0.0)
        with pytest.raises(MemoryFault, match="around out"):
            arena.check()
        beside.copy_(kept)
    x[2, 2] = 3.0
    with pytest.raises(MemoryFault, match="around x, an input"):
        arena.check()


def test_elements_that_a_call_must_not_write_are_compared():
    arena = Arena("cpu")
    mask = torch.tensor([[True, True], [False, False]])
    out = arena.output("out", (2, 2), torch.bfloat16, written=lambda: mask)
    arena.freeze()
    out[0] = 1.0
    arena.check()
    out[1, 0] = 1.0
    with pytest.raises(MemoryFault, match="1 elements of or around out"):
        arena.check()
