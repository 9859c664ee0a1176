"""Tiles of rows in shared memory: every chunk has a place of its own, and reads have no bank conflicts."""

from __future__ import annotations

import pytest

from kernels_dsl.blocks.hw.swizzled_rows import VECTOR, RowsTile

TILES = [RowsTile(64, 64), RowsTile(32, 96), RowsTile(16, 128), RowsTile(48, 192), RowsTile(64, 32)]


def _address(tile: RowsTile, row: int, column: int) -> int:
    """As a lane finds it: from the place of its row within 16 rows, a flip, and a static offset."""
    return (tile.chunk_offset(row % 16, 0) ^ tile.flip(column)) + tile.row_offset(row // 16 * 16, column)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_chunks_fill_the_tile(tile):
    found = {_address(tile, row, c) for row in range(tile.rows) for c in range(0, tile.columns, VECTOR)}
    assert found == set(range(0, tile.bytes, 16))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_copies_and_reads_agree(tile):
    """A copy takes the place of the row itself and adds the column block."""
    for row in range(tile.rows):
        for column in range(0, tile.columns, VECTOR):
            chunk = column % tile.width // VECTOR
            assert _address(tile, row, column) == tile.chunk_offset(row, chunk) + tile.row_offset(0, column)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_eight_rows_lie_in_all_banks(tile):
    """ldmatrix reads one chunk of each of eight rows: 128 bytes that must lie in 32 different banks."""
    for row in range(0, tile.rows, 8):
        for column in range(0, tile.columns, VECTOR):
            assert len({_address(tile, row + i, column) // 16 % 8 for i in range(8)}) == 8


def test_threads_that_cannot_share_out_a_tile():
    assert RowsTile(64, 64).check_threads(128) == 16
    with pytest.raises(ValueError, match="128 threads copy 32 rows at a time, must be a multiple of 8"):
        RowsTile(48, 96).check_threads(128)


@pytest.mark.parametrize(
    ("sizes", "message"), [((24, 64), "rows is 24, must be"), ((32, 80), "columns is 80, must be")]
)
def test_impossible_tiles(sizes, message):
    with pytest.raises(ValueError, match=message):
        RowsTile(*sizes)
