"""Which configuration a block-sparse product gets."""

from __future__ import annotations

from dataclasses import replace

from kernels_dsl.config.bsr import choose, reads_other_order
from kernels_dsl.config.bsr_layout import BsrProblem

LARGE = BsrProblem(8192, 8192, 8192, 128 * 512, 16, 16, dense_k_major=True, dense_left=True)


def test_the_dense_matrix_is_copied_where_many_blocks_of_16_meet_it() -> None:
    assert reads_other_order(LARGE)
    assert not reads_other_order(replace(LARGE, dense_k_major=False))
    assert not reads_other_order(replace(LARGE, block_k=32))
    assert not reads_other_order(replace(LARGE, nnz=29 * 512)) and reads_other_order(
        replace(LARGE, nnz=30 * 512)
    )
    assert not reads_other_order(replace(LARGE, dtype="fp8"))


def test_blocks_of_64_get_wide_tiles_where_there_is_work_for_them() -> None:
    large = BsrProblem(8192, 8192, 8192, 32 * 128, 64, 64)
    wide = choose(large)
    assert wide is not None and wide.tile == (64, 512) and wide.cluster == (1, 2)
    assert wide.kept_stages
    for other in (
        replace(large, n=8192 - 512),  # half of the last pair's tiles would be empty
        replace(large, m=2048),
        replace(large, dense_k_major=True),
        replace(large, block_k=32),
    ):
        chosen = choose(other)
        assert chosen is not None and chosen.tile == (64, 256) and not chosen.kept_stages


def test_stores_by_tma_where_rows_are_aligned() -> None:
    for problem in (LARGE, replace(LARGE, dense_left=False), replace(LARGE, block_mn=128)):
        for changes, by_tma in (({}, True), ({"d_align": 8}, False), ({"n": 8196}, False)):
            chosen = choose(replace(problem, **changes))
            assert chosen is not None and chosen.epi_tma == by_tma
