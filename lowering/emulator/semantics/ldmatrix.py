"""`ldmatrix`, `stmatrix` and `movmatrix` of 8x8 matrices of 16-bit elements.

With `.x1`, `.x2` or `.x4`, lanes 8j to 8j + 7 hold the addresses of the eight 16-byte rows of matrix j, and
register j of every lane holds its two elements of matrix j. Memory access is the caller's: it reads or writes
whole rows, and these functions say which elements of them belong to which lane.

Source: PTX ISA; checked against the layouts that CuTe's copy atoms report.
"""

from __future__ import annotations

import functools

import numpy as np

from .. import fast


@functools.lru_cache(maxsize=2)
def element_coordinates(transposed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of a matrix, each int64 (32, 2): which elements the two halves of a lane's register
    hold.

    Lane t holds row t / 4, columns 2 (t % 4) and 2 (t % 4) + 1; with `.trans` rows and columns change places.
    The low half comes first.
    """
    lane = np.arange(32)[:, None]
    row = np.broadcast_to(lane // 4, (32, 2))
    column = (lane % 4) * 2 + np.arange(2)[None, :]
    return (column, row) if transposed else (row, column)


def row_addresses(addresses: np.ndarray, count: int) -> np.ndarray:
    """Addresses of the rows, (..., count, 8), from the address registers of the lanes (..., 32).

    Lanes from 8 * count on are not used. `count` is 1, 2 or 4.
    """
    if count not in (1, 2, 4):
        raise ValueError(f"count was {count}; it must be 1, 2 or 4")
    return addresses[..., : 8 * count].reshape(*addresses.shape[:-1], count, 8)


def distribute(rows: np.ndarray, transposed: bool = False) -> np.ndarray:
    """`ldmatrix`: rows read from memory, uint16 (..., count, 8, 8) -> registers uint32 (..., 32, count)."""
    row, column = element_coordinates(transposed)
    elements = rows[..., row, column].astype(np.uint32)
    return np.swapaxes(elements[..., 0] | elements[..., 1] << np.uint32(16), -1, -2)


def loaded(rows: np.ndarray, transposed: bool = False) -> np.ndarray:
    """`distribute` of one warp with the registers first: uint16 (count, 8, 8) -> uint32 (count, 32)."""
    compiled = fast.kernels()
    if compiled is not None:
        return compiled.distribute(rows, transposed)
    return np.ascontiguousarray(distribute(rows, transposed).T)


def collect(registers: np.ndarray, transposed: bool = False) -> np.ndarray:
    """`stmatrix`: registers uint32 (..., 32, count) -> rows to write, uint16 (..., count, 8, 8)."""
    row, column = element_coordinates(transposed)
    by_matrix = np.swapaxes(np.asarray(registers, dtype=np.uint32), -1, -2)
    elements = np.stack((by_matrix & np.uint32(0xFFFF), by_matrix >> np.uint32(16)), axis=-1)
    rows = np.empty((*by_matrix.shape[:-1], 8, 8), dtype=np.uint16)
    rows[..., row, column] = elements
    return rows


def movmatrix(registers: np.ndarray) -> np.ndarray:
    """`movmatrix.sync.aligned.m8n8.trans.b16`: uint32 (..., 32) -> transposed, likewise."""
    return distribute(collect(registers[..., None]), transposed=True)[..., 0]
