"""The choice of products in which block rows share tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels_dsl.config.bsr import BsrProblem
from kernels_dsl.config.bsr_budget import why_not
from kernels_dsl.config.bsr_together import choose_together, gain_together, union_density
from kernels_dsl.config.problem import H200

SIZE = 8192


def problem(extent: int, density: float, **changes) -> BsrProblem:
    """A product of 8192 x 8192 x 8192."""
    nnz = round(density * (SIZE // extent) ** 2)
    return replace(BsrProblem(SIZE, SIZE, SIZE, nnz, extent, extent), **changes)


def test_the_union_of_random_rows() -> None:
    assert union_density(0.25, 4) == pytest.approx(0.6836, abs=1e-4)
    assert union_density(0.25, 2) == 0.4375
    assert union_density(0.0, 4) == 0.0 and union_density(1.0, 4) == 1.0


def test_large_products_of_small_blocks_with_many_of_them_kept() -> None:
    for extent in (16, 32):
        config = choose_together(problem(extent, 0.25), 132)
        assert config is not None and config.rows_together * extent == config.tile_s == 64
        assert config.pairs and config.deep_boxes and config.unit_k * config.units == 32
        assert why_not(config, problem(extent, 0.25), H200) is None


@pytest.mark.parametrize(
    ("extent", "changes"),
    [
        (16, {"dense_k_major": True}),
        (16, {"n": 512}),  # few tiles
        (32, {"n": 1024}),  # packing takes as long as is gained
        (16, {"n": 8192 + 512}),  # not in twos
        (16, {"nnz": 0}),
        (16, {"nnz": 3 * 512 * 512 // 100}),  # below what was tried
        (16, {"l": 16}),  # the packed blocks would take too much memory
        (16, {"block_k": 32}),
        (48, {}),
        (64, {}),
    ],
)
def test_others_do_not(extent: int, changes: dict) -> None:
    assert choose_together(replace(problem(extent, 0.25), **changes), 132) is None


def test_the_gain_grows_with_what_rows_share() -> None:
    gains = [gain_together(problem(16, density), 132) for density in (0.05, 0.1, 0.25, 0.5, 1.0)]
    assert gains == sorted(gains)


@pytest.mark.parametrize("n", [8192, 7688])
def test_boxes_are_deep_where_rows_of_them_are_whole(n: int) -> None:
    chosen = choose_together(problem(16, 0.4, n=n), 132)
    assert chosen is not None and chosen.deep_boxes == (n % 64 == 0)


@pytest.mark.parametrize(
    ("extent", "n", "densities", "faster"),
    [
        (16, 8192, (0.25, 0.2, 0.15, 0.1, 0.05), (1.616, 1.463, 1.279, 1.172, 1.13)),
        (16, 1024, (0.25, 0.2, 0.15, 0.1), (1.163, 1.128, 1.014, 0.944)),
        (32, 8192, (0.35, 0.25, 0.15, 0.05), (1.369, 1.239, 1.136, 1.222)),
        (32, 1024, (0.35, 0.25, 0.15), (0.97, 0.872, 0.87)),
    ],
)
def test_the_model_is_near_what_was_measured(extent: int, n: int, densities: tuple, faster: tuple) -> None:
    """Whole calls, alone by together, on an H200."""
    for density, ratio in zip(densities, faster):
        assert gain_together(problem(extent, density, n=n), 132) == pytest.approx(ratio, rel=0.12)
