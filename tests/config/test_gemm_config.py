"""GEMM configurations: budgets, the table's choices, the tuner's record. Needs no GPU."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernels_dsl.config import budget, gemm_table
from kernels_dsl.config.few_rows import tile_for_few_rows
from kernels_dsl.config.few_rows_scaled import scaled_tile_for_few_rows
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.many_rows import tile_for_many_rows
from kernels_dsl.config.order import Order
from kernels_dsl.config.problem import A100, DEVICES_BY_ARCH, H200, L40S, GemmProblem
from kernels_dsl.config.promotion import RECENT, Promotion
from kernels_dsl.config.tuned import TunedRecord, config_from_json, config_to_json
from kernels_dsl.config.wgmma import shared_memory

SHAPES = [
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (8192, 8192, 1024), (16384, 1024, 4096),
    (64, 8192, 8192), (1000, 2056, 4104), (17, 8192, 8192), (1, 1, 1), (1, 8192, 8192), (8192, 1, 64),
    (128, 128, 65536), (5, 7, 3), (70000, 64, 32768),
]  # fmt: skip


def _problems():
    for shape in SHAPES:
        for ab_type in ("bf16", "fp32"):
            for align in (16, 8, 4):
                for k_major in (True, False):
                    yield GemmProblem(
                        *shape, 1, ab_type, "bf16", a_k_major=True, b_k_major=k_major or ab_type == "fp32",
                        a_align=align, b_align=align, d_align=align,
                    )  # fmt: skip
    yield GemmProblem(512, 512, 512, a_align=2, b_align=2, d_align=2)
    yield GemmProblem(512, 512, 512, a_align=16, b_align=2, d_align=2, a_k_major=False)


def test_importing_a_configuration_imports_neither_torch_nor_the_compiler() -> None:
    code = (
        "import sys, kernels_dsl.config.gemm_table, kernels_dsl.config.tuned;"
        "assert not {'torch', 'cutlass'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("device", [H200, L40S, A100], ids=lambda device: device.name)
def test_the_choice_always_fits(device) -> None:
    for problem in _problems():
        for family in device.families():
            if family == "sm90" and min(problem.a_align, problem.b_align) < 16:
                continue
            config = gemm_table.choose(problem, device, family)
            assert config.family == family
            assert budget.why_not(config, problem, device) is None, (problem, config)
            if family == "sm90":
                assert gemm_table.adapted(config, problem) == config


def test_every_entry_of_the_table_fits_its_device_and_is_there_once() -> None:
    problem = GemmProblem(4096, 4096, 4096)
    for family, device in (("sm90", H200), ("sm80", A100)):
        table = [candidate.config for candidate in gemm_table.TABLES[family]]
        assert len(set(table)) == len(table)
        for config in table:
            assert budget.why_not(config, problem, device) is None, config
    assert sum(budget.why_not(c.config, problem, L40S) is None for c in gemm_table.SM80_CANDIDATES) >= 5


def test_the_device_table_agrees_with_the_architectures_limits() -> None:
    from lowering import arch

    for name, device in DEVICES_BY_ARCH.items():
        assert device.smem_bytes == arch.limits(name).smem_per_block
        assert device.capability == arch.capability(name)


def test_few_tiles_are_split_along_k_and_many_are_not() -> None:
    assert gemm_table.choose(GemmProblem(128, 128, 65536), H200, "sm90").split_k > 1
    assert gemm_table.choose(GemmProblem(128, 128, 65536), L40S, "sm80").split_k > 1
    assert gemm_table.choose(GemmProblem(8192, 8192, 8192), H200, "sm90").split_k == 1


def test_the_estimate_grows_with_the_problem() -> None:
    sizes = [GemmProblem(size, size, size) for size in (256, 1024, 4096, 16384)]
    for family in ("sm90", "sm80"):
        times = [gemm_table.best_estimate(problem, H200, family) for problem in sizes]
        assert times == sorted(times) and times[0] > 1e-6
    large = sizes[-1]
    assert large.flops / gemm_table.best_estimate(large, H200, "sm90") < 989e12, "faster than the hardware"


def test_copying_pays_for_large_problems_only() -> None:
    def pays(size: int) -> bool:
        problem = GemmProblem(size, size, size, a_align=2)
        return gemm_table.copying_pays(problem, replace(problem, a_align=16), 2 * size * size, 1, H200)

    assert pays(4096) and not pays(32)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (Sm90GemmConfig(96, 128), {}, "tile_m is 96"),
        (Sm90GemmConfig(256, 64, schedule=Schedule.PINGPONG), {}, "tile_m is 256"),
        (Sm90GemmConfig(128, 260), {}, "tile_n is 260"),
        (
            Sm90GemmConfig(128, 104),
            {"d_type": "fp8"},
            "tile_n is 104, must be a multiple of 16 from 16 to 256",
        ),
        (Sm90GemmConfig(128, 100, turned=True), {}, "tile_n is 100, must be a multiple of 8 from 16 to 256"),
        (Sm90GemmConfig(256, 256), {}, "256 accumulator registers"),
        (Sm90GemmConfig(128, 256, schedule=Schedule.PINGPONG), {}, "256 accumulator registers"),
        (
            Sm90GemmConfig(128, 192, schedule=Schedule.PINGPONG),
            {"operand_bytes": 4},
            "192 accumulator registers a thread, at most 160",
        ),
        (Sm90GemmConfig(128, 128, tile_k=8), {}, "tile_k is 8"),
        (Sm90GemmConfig(128, 128, cluster_m=3), {}, "a cluster of 3 x 1"),
        (Sm90GemmConfig(128, 128), {"ab_type": "fp32"}, "tf32 WGMMA reads A and B with K contiguous"),
        (Sm90GemmConfig(128, 144), {"ab_type": "fp32", "b_k_major": True}, "tile_n is 144, must be 16 or"),
        (Sm90GemmConfig(128, 128, l2_prefetch=True), {"grouped": True}, "l2_prefetch is True, must be False"),
        (Sm90GemmConfig(64, 16, cluster_m=4, cluster_k=4), {}, "a cluster has 16 CTAs, must have at most 8"),
        (Sm90GemmConfig(64, 16, cluster_k=2, stream_k=True), {}, "cluster_k is 2, must be 1 with split_k"),
        (Sm90GemmConfig(64, 16, cluster_k=2), {"k": 64}, "cluster_k is 2, more than K has tiles"),
        (Sm90GemmConfig(64, 64, last_m=64), {}, "one must be 0, the other a multiple of 8 below the tile"),
        (Sm90GemmConfig(64, 64, last_m=36), {}, "one must be 0, the other a multiple of 8 below the tile"),
        (Sm90GemmConfig(64, 64, last_m=8, last_n=8), {}, "one must be 0, the other a multiple of 8"),
        (Sm90GemmConfig(64, 64, cluster_n=2, last_m=8), {}, "must be 0 where CTAs load the operand for each"),
        (Sm90GemmConfig(64, 64, cluster_m=2, last_n=8), {}, "must be 0 where CTAs load the operand for each"),
        (
            Sm90GemmConfig(64, 64, tile_k=128, last_n=8),
            {"b_k_major": True},
            "must be 0 with groups, with tile_k",
        ),
        (Sm90GemmConfig(64, 64, last_n=8), {"b_k_major": False}, "or where K is not contiguous"),
        (Sm90GemmConfig(64, 16, cluster_k=5), {}, "cluster_k is 5, must be 1, 2, 3, 4 or 8"),
        (Sm90GemmConfig(64, 240, cluster_k=8), {}, "430080 bytes of sums of 8 CTAs do not fit in a ring"),
        (Sm90GemmConfig(192, 16, overlap=True), {}, "overlap is True, must be False in turns, or with"),
        (Sm90GemmConfig(64, 208, overlap=True), {}, "104 accumulator registers a thread, at most 80"),
        (Sm90GemmConfig(128, 128), {"a_align": 8}, "TMA loads need"),
        (Sm90GemmConfig(128, 128), {"d_align": 2}, "TMA stores need"),
        (Sm90GemmConfig(128, 128, stages=20), {}, "bytes of shared memory"),
        (Sm90GemmConfig(128, 128, split_k=9), {}, "split_k is 9, must be from 1 to the 8 tiles"),
        (Sm80GemmConfig(128, 128, 32, 4, 3, 2), {}, "tile_m is 128"),
        (Sm80GemmConfig(128, 24, 32, 4, 2, 2), {}, "tile_n is 24"),
        (Sm80GemmConfig(128, 128, 24, 4, 2, 2), {}, "tile_k is 24"),
        (Sm80GemmConfig(128, 256, 32, 4, 2, 2), {}, "256 accumulator registers"),
        (Sm80GemmConfig(128, 128, 32, 2, 2, 2), {}, "stages is 2"),
        (Sm80GemmConfig(32, 96, 96, 4, 1, 3), {"b_k_major": False}, "3 warps read 48 elements of B"),
        (Sm80GemmConfig(64, 64, 32, 4, 2, 2), {"a_align": 8}, "copy_bytes_a is 16"),
        (Sm80GemmConfig(64, 64, 32, 40, 2, 2), {}, "bytes of shared memory"),
        (Sm90GemmConfig(192, 208), {}, "WGMMAs of N = 208, at most 192 have enough registers with 3"),
        (Sm90GemmConfig(128, 128, raster_group=0), {}, "raster_group is 0, must be 1 or more"),
        (Sm90GemmConfig(128, 128, stages=-1), {}, "stages is -1, must be 0 or more"),
        (Sm90GemmConfig(128, 128, cluster_m=-1, cluster_n=-1), {}, "cluster_m is -1, must be 1 or more"),
        (
            Sm80GemmConfig(64, 64, 16, 4, 2, 2, copy_bytes_a=2),
            {"ab_type": "fp32"},
            "copy_bytes_a is 2, must be one of (16, 8, 4) with fp32 operands",
        ),
        (Sm80GemmConfig(64, 64, 32, 4, 2, 2, copy_bytes_b=3), {}, "copy_bytes_b is 3, must be one of (16, 8"),
    ],
)
def test_why_not_says_what_does_not_fit(config, changes: dict, reason: str) -> None:
    problem = replace(GemmProblem(512, 512, 512), **changes)
    found = budget.why_not(config, problem, H200)
    assert found is not None and reason in found


def test_why_not_names_a_device_that_lacks_the_instructions() -> None:
    reason = budget.why_not(Sm90GemmConfig(128, 128), GemmProblem(512, 512, 512), L40S)
    assert reason == "the sm90 kernels need compute capability 9.0 (TMA and WGMMA), L40S has 8.9"


def test_no_choice_leaves_half_of_its_tile_empty() -> None:
    for m, n in ((33, 4096), (4096, 3), (11008, 17), (8192, 40), (65, 129), (1, 1)):
        config = gemm_table.choose(GemmProblem(m, n, 4096, b_k_major=True, d_align=2), H200, "sm90")
        assert config.tile_m <= 64 or config.tile_m < 2 * m, (m, n, config)
        assert config.tile_n <= 16 or config.tile_n < 2 * n, (m, n, config)


def test_the_budget_counts_as_the_sm90_kernel_does() -> None:
    """The kernel derives its stages itself; the budget must come to the same."""
    cutlass = pytest.importorskip("cutlass")
    from types import SimpleNamespace

    from kernels_dsl.kernels.gemm.sm90_spec import make_spec

    types = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
    own = (Sm90GemmConfig(128, 208, cluster_k=4), Sm90GemmConfig(64, 16, cluster_k=2, overlap=True))
    for config in (*(candidate.config for candidate in gemm_table.SM90_CANDIDATES), *own):
        for ab_type, d_type in (("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")):
            problem = GemmProblem(512, 512, 512, 1, ab_type, d_type, b_k_major=True)
            if budget.why_not(config, problem, H200) is not None:
                continue
            a = SimpleNamespace(element_type=types[ab_type])
            turned = config.turned
            d = SimpleNamespace(element_type=types[d_type], stride=(1, 512, 0) if turned else (512, 1, 0))
            spec = make_spec(config, a, a, d)
            assert spec.epilogue.m_major == turned
            room = shared_memory(H200.smem_bytes, config.ctas_per_sm)
            assert spec.stages == budget.stages(config, problem, room)
    promotion = Promotion(1, 128)
    problem = GemmProblem(512, 512, 512, ab_type="fp8", b_k_major=True, promotion=promotion)
    a = SimpleNamespace(element_type=cutlass.Float8E4M3FN)
    d = SimpleNamespace(element_type=cutlass.BFloat16, stride=(512, 1, 0))
    for candidate in gemm_table.SM90_FP8_SCALED_CANDIDATES:
        assert budget.why_not(candidate.config, problem, H200) is None
        spec = make_spec(candidate.config, a, a, d, promotion)
        assert spec.stages == budget.stages(candidate.config, problem, H200.smem_bytes)
        staged = 4 * spec.scales.floats, 4 * RECENT * spec.scales.few
        assert staged == budget.scale_bytes(candidate.config, promotion)


CONFIGS = [
    Sm90GemmConfig(128, 192, cluster_m=2, schedule=Schedule.PINGPONG, raster_along_m=False),
    Sm80GemmConfig(128, 128, 32, 4, 2, 2, copy_bytes_a=4),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_configurations_survive_json(config) -> None:
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize(
    "data", [{}, {"family": "sm70"}, {"family": "sm80", "tile_m": 1}, {"family": "sm90", "warps_m": 2}]
)
def test_json_that_is_no_configuration(data: dict) -> None:
    with pytest.raises(ValueError, match="does not describe a GEMM configuration"):
        config_from_json(data)


def test_the_record_keeps_winners_apart(tmp_path: Path) -> None:
    problem, other = GemmProblem(512, 512, 512), GemmProblem(512, 512, 1024)
    record = TunedRecord(tmp_path / "sub" / "tuned.json")
    assert record.get(problem, H200, "sm90") is None
    for config in CONFIGS:
        record.put(problem, H200, config, 1e-3)
    again = TunedRecord(record.path)
    assert [again.get(problem, H200, family) for family in ("sm90", "sm80")] == CONFIGS
    assert again.get(other, H200, "sm90") is None
    assert again.get(problem, replace(H200, name="H100"), "sm90") is None
    replaced = replace(CONFIGS[0], raster_group=4)
    record.put(problem, H200, replaced, 1e-3)
    assert again.get(problem, H200, "sm90") == replaced, "a reader notices what another one wrote"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 99, "winners": {}}', '{"format": 1, "winners": 3}']
)
def test_a_damaged_record_counts_as_empty_and_is_replaced(tmp_path: Path, text: str) -> None:
    record = TunedRecord(tmp_path / "tuned.json")
    record.path.write_text(text)
    problem = GemmProblem(512, 512, 512)
    assert record.get(problem, H200, "sm90") is None
    record.put(problem, H200, CONFIGS[0], 1e-3)
    assert record.get(problem, H200, "sm90") == CONFIGS[0]


def _put(path: str, first: int) -> None:
    record = TunedRecord(Path(path))
    for k in range(first, first + 10):
        record.put(GemmProblem(512, 512, k), H200, CONFIGS[0], 1e-3)


def test_writers_do_not_lose_each_others_winners(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_put, args=(str(path), first)) for first in (100, 200, 300)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    record = TunedRecord(path)
    for first in (100, 200, 300):
        assert all(record.get(GemmProblem(512, 512, k), H200, "sm90") for k in range(first, first + 10))
    assert not [left for left in tmp_path.iterdir() if left.suffix not in (".json", ".lock")]


def _of_few_rows(m: int, n: int, k: int, **changes: object) -> GemmProblem:
    """A problem in the kernel's orientation: with M and N exchanged where a tile's N has all rows."""
    problem = replace(GemmProblem(m, n, k, b_k_major=True), **changes)
    if m > 32:
        return problem
    return replace(problem, m=n, n=m, promotion=problem.promotion and problem.promotion.swapped())


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (4, 4096, 4096, Sm90GemmConfig(64, 16, cluster_k=2, overlap=True)),
        (4, 4096, 14336, Sm90GemmConfig(64, 16, cluster_k=2)),
        (4, 5120, 8192, Sm90GemmConfig(128, 16, late=True)),
        (4, 5120, 25600, Sm90GemmConfig(64, 16, overlap=True)),
        (4, 7168, 2048, Sm90GemmConfig(64, 16, stages=10, late=True)),
        (4, 24576, 1536, Sm90GemmConfig(64, 16, stages=10, late=True)),
        (16, 2112, 7168, Sm90GemmConfig(64, 16, cluster_k=2, overlap=True)),
        (16, 10240, 8192, Sm90GemmConfig(192, 16, late=True)),
        (16, 28672, 4096, Sm90GemmConfig(64, 16, tile_k=128, late=True)),
        (33, 12288, 4096, Sm90GemmConfig(64, 96, last_m=40, late=True, evict_first_b=True)),
        (64, 28672, 4096, Sm90GemmConfig(64, 112, evict_first_b=True)),
        (64, 7168, 2048, Sm90GemmConfig(64, 64, turned=True, late=True)),
        (33, 7168, 2048, Sm90GemmConfig(128, 48, turned=True, late=True)),
        (33, 24576, 1536, Sm90GemmConfig(64, 48, turned=True, late=True)),
        (33, 57344, 8192, Sm90GemmConfig(128, 48, cluster_k=2, turned=True, late=True)),
        (64, 2112, 7168, Sm90GemmConfig(64, 64, turned=True, cluster_k=2)),
        (64, 5120, 25600, Sm90GemmConfig(64, 80, cluster_k=2, evict_first_b=True)),
        (64, 51200, 5120, Sm90GemmConfig(64, 64, turned=True)),
    ],
)
def test_few_rows_get_a_tile_of_their_own(m: int, n: int, k: int, tile: Sm90GemmConfig) -> None:
    """All rows are WGMMA's N or M, and the matrix's share out the SMs."""
    found = gemm_table.choose(_of_few_rows(m, n, k), H200, "sm90")
    expected = replace(tile, l2_prefetch=True, evict_first=not tile.evict_first_b)
    assert replace(found, raster_along_m=expected.raster_along_m, epi_tma=True) == expected


def test_other_problems_get_no_tile_of_few_rows() -> None:
    few = _of_few_rows(33, 12288, 4096)
    others = ({"m": 257}, {"n": 1984}, {"k": 512}, {"grouped": True}, {"l": 2}, {"gated": True})
    for change in others:
        assert not gemm_table.choose(replace(few, **change), H200, "sm90").l2_prefetch, change
    for order in (Order.SUMS, Order.ROW_SUMS):
        assert not gemm_table.choose(few, H200, "sm90", order).turned


def test_every_tile_of_few_rows_fits() -> None:
    """Those of all numbers of rows and many matrices, in bf16 and fp8: none is refused by the budget."""
    kinds = (("bf16", None), ("fp8", Promotion()), ("fp8", None), ("fp8", Promotion(1, 128)))
    for ab_type, promotion in kinds:
        scaled = promotion is not None and promotion.scaled
        tile_for = scaled_tile_for_few_rows if scaled else tile_for_few_rows
        for m in (*range(1, 17), *range(33, 257, 7), 256):
            for n in range(2048, 60000, 2944):
                problem = _of_few_rows(m, n, 4096, ab_type=ab_type, promotion=promotion)
                tile = tile_for(problem, H200) or (None if scaled else tile_for_many_rows(problem, H200))
                assert tile is None or budget.why_not(tile, problem, H200) is None, (m, n, ab_type)
