"""Which configuration a block-sparse product gets."""

from __future__ import annotations

from dataclasses import replace

from kernels_dsl.config.bsr import reads_other_order
from kernels_dsl.config.bsr_layout import BsrProblem

LARGE = BsrProblem(8192, 8192, 8192, 128 * 512, 16, 16, dense_k_major=True, dense_left=True)


def test_the_dense_matrix_is_copied_where_many_blocks_of_16_meet_it() -> None:
    assert reads_other_order(LARGE)
    assert not reads_other_order(replace(LARGE, dense_k_major=False))
    assert not reads_other_order(replace(LARGE, block_k=32))
    assert not reads_other_order(replace(LARGE, nnz=29 * 512)) and reads_other_order(
        replace(LARGE, nnz=30 * 512)
    )
