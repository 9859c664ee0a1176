"""The SM90 GEMM emulated at small ragged sizes: every schedule, bit for bit on integers, and no finding."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import kernels_dsl  # noqa: E402
from kernels_dsl.config.gemm import Schedule, Sm90GemmConfig  # noqa: E402
from lowering import emulator  # noqa: E402

COOPERATIVE, PINGPONG = Schedule.COOPERATIVE, Schedule.PINGPONG
CASES = {
    "one warpgroup": (Sm90GemmConfig(64, 64), (70, 72, 136), {}),
    "cooperative": (Sm90GemmConfig(128, 128), (200, 136, 72), {}),
    "ping-pong": (Sm90GemmConfig(64, 128, schedule=PINGPONG), (200, 136, 200), {}),
    "few stages, long K": (Sm90GemmConfig(128, 64, stages=2), (128, 64, 520), {}),
    "cluster along M": (Sm90GemmConfig(128, 128, cluster_m=2), (264, 136, 136), {}),
    "cluster along N": (Sm90GemmConfig(128, 64, cluster_n=2), (136, 136, 136), {}),
    "ping-pong cluster": (Sm90GemmConfig(64, 64, cluster_m=2, schedule=PINGPONG), (136, 72, 136), {}),
    "global stores": (Sm90GemmConfig(128, 64, epi_tma=False), (131, 61, 72), {}),
    "split K": (Sm90GemmConfig(128, 64, split_k=3), (128, 64, 264), {}),
    "tf32": (Sm90GemmConfig(128, 64), (136, 68, 40), {"dtype": torch.float32}),
    "fp16, MN-major operands": (Sm90GemmConfig(128, 64), (136, 72, 72), {"dtype": torch.float16, "mn": True}),
    "batch": (Sm90GemmConfig(64, 64), (72, 72, 72), {"batch": 3}),
}


def _inputs(shape: tuple[int, int, int], options: dict[str, Any]) -> tuple[Any, Any]:
    m, n, k = shape
    dtype = options.get("dtype", torch.bfloat16)
    lead = (options["batch"],) if "batch" in options else ()
    generator = torch.Generator().manual_seed(7)
    a = torch.randint(-3, 4, (*lead, m, k), generator=generator).to(dtype)
    b = torch.randint(-3, 4, (*lead, k, n), generator=generator).to(dtype)
    if options.get("mn"):
        return a.mT.contiguous().mT, b
    return a, b.mT.contiguous().mT


@pytest.mark.parametrize("name", CASES)
def test_integers_match_bit_for_bit(name: str) -> None:
    config, shape, options = CASES[name]
    a, b = _inputs(shape, options)
    expected = (a.double() @ b.double()).to(a.dtype)
    with emulator.run(arch="sm_90a", seed=1) as session:
        d = kernels_dsl.gemm(a, b, config=config)
    assert torch.equal(d, expected)
    assert session.stats.total["matrix_flops"] > 0 and not session.reports


@pytest.mark.parametrize("n", [100, 104])
def test_a_slice_of_a_wider_result_leaves_its_neighbours_alone(n: int) -> None:
    """Rows of D are 16-byte aligned, and for n = 100 end within 16 bytes, where a TMA store would go on."""
    a, b = _inputs((128, n, 64), {})
    wide = torch.full((128, 112), 7.0, dtype=torch.bfloat16)
    with emulator.run(arch="sm_90a"):
        kernels_dsl.gemm(a, b, out=wide[:, :n], config=Sm90GemmConfig(128, 128))
    assert torch.equal(wide[:, :n], (a.double() @ b.double()).to(a.dtype))
    assert (wide[:, n:] == 7).all()


def test_many_schedules_of_a_short_pipeline() -> None:
    """Two stages and four K tiles: every order of producer, consumers and copies gives the same bits."""
    a, b = _inputs((128, 128, 256), {})
    expected = (a.double() @ b.double()).to(a.dtype)
    steps = set()
    for seed in range(12):
        with emulator.run(arch="sm_90a", seed=seed) as session:
            d = kernels_dsl.gemm(a, b, config=Sm90GemmConfig(128, 128, stages=2))
        assert torch.equal(d, expected), f"seed {seed}"
        steps.add(session.steps)
    assert len(steps) > 1, "the seeds must lead to different schedules"


def test_a_seed_fixes_the_schedule() -> None:
    a, b = _inputs((128, 128, 128), {})

    def events() -> list:
        with emulator.run(arch="sm_90a", seed=5) as session:
            kernels_dsl.gemm(a, b, config=Sm90GemmConfig(128, 128))
        return session.timeline.events

    assert events() == events()


def test_the_timeline_shows_the_producer_ahead_and_ping_pong() -> None:
    a, b = _inputs((256, 128, 512), {})
    with emulator.run(arch="sm_90a", seed=2) as session:
        kernels_dsl.gemm(a, b, config=Sm90GemmConfig(64, 128, schedule=PINGPONG, stages=4))
    loads = [e for e in session.timeline.events if e.kind == "tma load"]
    products = [e for e in session.timeline.events if e.kind == "wgmma"]
    assert min(e.start for e in loads) < min(e.start for e in products)
    assert len({e.actor for e in products if "(0, 0, 0)" in e.actor}) >= 1
    assert "L" in str(session.timeline) and "W" in str(session.timeline)
