"""The operands of an epilogue that are loaded before the main loop, and a thread's share of them."""

from __future__ import annotations

from kernels_dsl.blocks.epilogue.prefetch import Along, along, early_registers, offsets_kept
from tests.blocks.tracing import fake, trace

OPERANDS = [fake(strides) for strides in ((0, 0, 0), (1, 0, 0), (0, 1, None), (None, 1, None))]


def test_operands_that_vary_along_one_mode_at_most() -> None:
    found = trace(lambda *operands: [along(x) for x in operands], *OPERANDS)
    assert found == [Along.NOWHERE, Along.ROWS, Along.COLUMNS, None]
    assert along(2.0) is None


def test_registers() -> None:
    """One, two for each 64 rows, and two for each 64 columns begun."""

    def registers(*operands):
        modes = (tuple(Along), (Along.ROWS,), (Along.COLUMNS,))
        return [early_registers((*operands, 2.0), (128, 144), wanted) for wanted in modes]

    assert trace(registers, *OPERANDS) == [1 + 4 + 6, 4, 6]


def test_lanes_keep_every_row_and_column_of_a_tile() -> None:
    first = [16 * warp + lane // 4 for warp in range(4) for lane in range(32)]
    rows = {row + offset[0] for row in first for offset in offsets_kept(Along.ROWS, (128, 80))}
    assert rows == set(range(128))
    columns = [2 * lane + o[1] for o in offsets_kept(Along.COLUMNS, (128, 80)) for lane in range(32)]
    assert sorted(columns) == list(range(128))  # of 80, in whole 64
