"""The tiles of the last wave that are cut along K, and the memory that their sums take."""

from __future__ import annotations

import pytest

from kernels_dsl.config.budget import why_not
from kernels_dsl.config.gemm import Schedule, Sm90GemmConfig
from kernels_dsl.config.gemm_table import choose
from kernels_dsl.config.problem import H200, GemmProblem
from kernels_dsl.config.promotion import Promotion
from kernels_dsl.config.stream_k import COUNTERS, memory, shares

CONFIG = Sm90GemmConfig(128, 128, cluster_m=2, stream_k=True)
BLOCKS = Promotion(1, 128)


@pytest.mark.parametrize(
    ("m", "n", "k", "tiles"),
    [
        (8192, 8192, 8192, 2 + 66),  # two tiles behind 31 waves: with a wave more, each is in few pieces
        (4096, 7168, 16384, 38),  # more than half of a wave
        (256 * 66, 128, 1024, 0),  # whole waves
        (1000, 128, 4096, 4),  # less than one
    ],
)
def test_the_last_wave_is_shared_evenly(m: int, n: int, k: int, tiles: int) -> None:
    problem = GemmProblem(m, n, k, ab_type="fp8", b_k_major=True, promotion=Promotion())
    found = shares(CONFIG, problem, 132)
    assert (found.tiles, found.clusters) == (tiles, 66)
    whole = tiles * k // 128
    assert (found.share - 1) * 66 < max(whole, 1) <= max(found.share * 66, 1)
    pieces = tiles + 65 if tiles else 1  # each tile or cluster more is one more; nothing is allocated for 0
    assert memory(CONFIG, found) == (COUNTERS * 4 * pieces, 256 * 128 * pieces)


@pytest.mark.parametrize(
    "options",
    [{"schedule": Schedule.PINGPONG}, {"split_k": 2}, {"tile_m": 256}, {"turned": True, "split_k": 2}],
    ids=str,
)
def test_what_cannot_be_cut(options: dict) -> None:
    problem = GemmProblem(1024, 1024, 1024, ab_type="fp8", b_k_major=True, promotion=None)
    config = Sm90GemmConfig(**{"tile_m": 128, "tile_n": 64, "stream_k": True, **options})
    reason = why_not(config, problem, H200)
    assert reason is not None and ("stream_k" in reason or "split_k" in reason)


@pytest.mark.parametrize(
    ("size", "promotion", "cut"),
    [
        ((8192, 8192, 8192), Promotion(), True),
        ((4096, 4096, 4096), Promotion(), False),  # 7.8 waves of pairs of 128x128
        ((4096, 7168, 16384), BLOCKS, True),
        ((2048, 2304, 8192), BLOCKS, True),  # 2.2 waves
        ((4096, 4096, 4096), BLOCKS, False),
        ((8192, 8192, 1024), BLOCKS, False),
    ],
    ids=str,
)
def test_the_table_cuts_tiles_where_an_idle_wave_is_long(size, promotion, cut: bool) -> None:
    problem = GemmProblem(*size, ab_type="fp8", b_k_major=True, promotion=promotion)
    chosen = choose(problem, H200, "sm90")
    assert isinstance(chosen, Sm90GemmConfig) and chosen.stream_k is cut
    assert chosen.cluster_m * chosen.cluster_n == 2 or not cut  # who cuts shares its loads
