"""A thread's loads of the epilogue's operands: distinct elements, and the number in one load."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest

from kernels_dsl.blocks.epilogue.operands import coord_modes, gather_plan
from kernels_dsl.blocks.epilogue.staged_store import row_vectors
from kernels_dsl.blocks.hw.mma_sync import make_tiled_mma
from tests.blocks.tracing import fake, trace

ROWS = fake((None, 1, None))


def _rows_fragment(mD, vector=8):
    """Coordinates of a thread that stores vectors along N: rows of a (32, 64) tile."""
    cD = cute.local_tile(cute.make_identity_tensor(mD.shape), (32, 64, 1), (2, 3, 1))
    return row_vectors((16, 8), vector).get_slice(5).partition_D(cD[None, None, 0])


def _mma_fragment(mD):
    """Coordinates of an mma.sync accumulator of a (64, 64) tile, 2 x 2 warps."""
    cD = cute.local_tile(cute.make_identity_tensor(mD.shape), (64, 64, 1), (2, 3, 1))
    return make_tiled_mma(cutlass.BFloat16, 2, 2).get_slice(37).partition_C(cD[None, None, 0])


def _plan(operand, fragment=_rows_fragment):
    def traced(mD, mC):
        plan = gather_plan(mC, fragment(mD))
        return plan.vector, plan.offsets

    return trace(traced, ROWS, operand)


@pytest.mark.parametrize(
    ("operand", "vector", "distinct"),
    [
        (fake((None, 1, None)), 8, 16),
        (fake((None, 1, None), align=8), 4, 16),
        (fake((None, 1, None), align=2), 1, 16),
        (fake((None, 1, None), dtype=cutlass.Float32), 4, 16),
        (fake((None, 1, None), wide=True), 8, 16),
        (fake((0, 1, 0)), 8, 8),  # a bias along N: both rows of the thread share it
        (fake((1, 0, 0)), 1, 2),  # a bias along M: one value a row
        (fake((0, 0, 0)), 1, 1),  # one number
        (fake((1, None, None)), 1, 16),  # contiguous along M, where the thread's elements are not neighbours
    ],
)
def test_distinct_elements_and_vectors(operand, vector: int, distinct: int) -> None:
    found, offsets = _plan(operand)
    assert (found, len(offsets)) == (vector, distinct)


def test_offsets_are_those_of_the_fragment() -> None:
    """Elements 0 to 7 of the first row, then of the row that the thread has 16 further down."""
    _, offsets = _plan(fake((None, 1, None)))
    assert offsets == [(m, n, 0) for m in (0, 16) for n in range(8)]


def test_an_accumulator_fragment_reads_pairs() -> None:
    vector, offsets = _plan(fake((None, 1, None)), _mma_fragment)
    assert (vector, len(offsets)) == (2, 32)
    assert offsets[:4] == [(0, 0, 0), (0, 1, 0), (8, 0, 0), (8, 1, 0)]


def test_a_tensor_that_is_no_coordinate_is_refused() -> None:
    with pytest.raises(Exception, match="identity tensor"):
        trace(lambda mD: coord_modes(cute.make_rmem_tensor((4, 4), cutlass.Float32)), ROWS)
