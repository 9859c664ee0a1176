"""Tiles of products of 65 to 256 rows, by the time that a model gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels_dsl.config import budget, gemm_table
from kernels_dsl.config.few_rows import rows_and_matrix
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.many_rows import tiles, time
from kernels_dsl.config.problem import H200, GemmProblem
from kernels_dsl.config.promotion import Promotion

FP8 = {"ab_type": "fp8", "promotion": Promotion()}


def _chosen(m: int, n: int, k: int, **changes: object) -> Sm90GemmConfig:
    found = gemm_table.choose(replace(GemmProblem(m, n, k, b_k_major=True), **changes), H200, "sm90")
    assert isinstance(found, Sm90GemmConfig)
    return found


@pytest.mark.parametrize(
    ("m", "n", "k", "changes", "words"),
    [
        (100, 4096, 4096, {}, "64x56 cluster 1x2 last 0x48"),
        (129, 8192, 8192, {}, "128x72 cluster 1x2 last 0x64"),
        (129, 7168, 16384, {}, "64x136 cluster 4x1"),
        (100, 51200, 5120, {}, "64x104 cluster 4x1"),
        (200, 12288, 4096, {}, "192x104 cluster 1x2"),
        (200, 5120, 8192, {}, "192x104 cluster 1x2 2 along K"),
        (129, 5120, 25600, {}, "192x136 cluster 2x1 4 along K"),
        (129, 28672, 4096, {}, "128x136 cluster 4x1"),
        (200, 51200, 5120, {}, "128x200 cluster 2x1 stream-k"),
        (129, 5120, 8192, FP8, "192x72 cluster 1x2 2 along K"),
        (200, 28672, 4096, FP8, "128x104 cluster 1x2"),
    ],
)
def test_tiles_share_out_the_device(m: int, n: int, k: int, changes: dict, words: str) -> None:
    """All rows or half of them are WGMMA's N; clusters share K where tiles are few."""
    found = _chosen(m, n, k, **changes)
    label = replace(found, turned=False, l2_prefetch=False, evict_first=False, late=False).label
    assert label == words and found.turned and found.l2_prefetch and found.evict_first


@pytest.mark.parametrize(
    ("m", "n", "k", "changes", "words"),
    [
        (100, 6144, 4096, {}, "64x96 cluster 2x1 last 40x0"),
        (256, 5120, 25600, {}, "128x80 cluster 2x1"),
        (250, 7168, 16384, FP8, "128x112 cluster 2x1"),
        (256, 2112, 7168, FP8, "64x72 cluster 4x1"),
        (240, 28672, 4096, FP8, "256x112 last 240x0"),
    ],
)
def test_columns_of_the_matrix_share_out_the_device(
    m: int, n: int, k: int, changes: dict, words: str
) -> None:
    """Rows of A are WGMMA's M; in the last tile no more are loaded than there are."""
    found = _chosen(m, n, k, **changes)
    label = replace(found, l2_prefetch=False, evict_first_b=False, late=False, raster_along_m=True).label
    assert label == words and found.l2_prefetch and found.evict_first_b
    if not changes:
        assert not _chosen(m, n, k, b_k_major=False).last_m, "K is not contiguous"


def test_many_rows_of_some_matrices_are_left_to_the_model_of_waves() -> None:
    for n, k in ((10240, 8192), (51200, 5120)):
        assert not _chosen(256, n, k).turned
    assert not _chosen(256, 5120, 8192, **FP8).turned, "fp8: tiles of 96 columns of the matrix"


def test_the_time_grows_with_k_and_rows() -> None:
    """Of each tile, whatever the matrix."""
    for n in (2112, 5120, 28672):
        for changes in ({}, FP8):
            shorter, longer = (
                rows_and_matrix(replace(GemmProblem(129, n, k, b_k_major=True), **changes), H200)
                for k in (4096, 8192)
            )
            assert shorter is not None and longer is not None
            for tile in tiles(129, shorter[1]):
                assert time(tile, 129, shorter[1]) < time(tile, 129, longer[1])


def test_a_tile_that_does_not_fit_gives_way_to_the_next() -> None:
    """A residual takes registers from the sums that a cluster shares."""
    plain, residual = _chosen(129, 5120, 25600), _chosen(129, 5120, 25600, operand_bytes=2)
    assert plain.cluster_k == 4 and residual.turned and residual != plain
    problem = GemmProblem(129, 5120, 25600, b_k_major=True, operand_bytes=2)
    assert budget.why_not(plain, problem, H200) is not None
    assert not _chosen(129, 5120, 25600, d_align=2).epi_tma
