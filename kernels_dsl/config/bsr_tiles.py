"""Extents of the Hopper block-sparse GEMM's loads along K and of its tiles along the dense matrix.

What a box of TMA has behind a block's end, or behind the dense matrix, it fills with zeros, and these take
more time than what it reads.
"""

from __future__ import annotations

STAGE_K = 64
"""Elements of K in a stage, 128 bytes: longer blocks take several stages, shorter ones share one."""
ROW = 64
"""Elements of the dense matrix in a box of TMA, of 128 bytes, where K is not its contiguous mode."""
_COSTS = {64: 0.0, 32: 0.0, 48: 0.03, 80: 0.02, 16: 0.08}
"""Units of K, and what their rows of 128, 64 or 32 bytes cost, as measured with blocks of 80, 96 and 112."""
_MOST_BYTES = 56 << 10
"""Of a stage with a unit above STAGE_K: the ring has four then."""
_GAIN = {True: 1.2, False: 1.05}
"""Factor of zeros, by the side of the blocks, from which on units other than STAGE_K are taken."""


def unit_along_k(block_k: int, rows: int, on_m: bool, dense_k_major: bool) -> int:
    """Elements of K of a load, of which few lie behind the end of a block.

    `rows`: of both operands' tiles; `on_m`: blocks lie on WGMMA's M. Of a block of 80 two loads of 64 have 3
    zeros in 8 elements. A dense matrix that is contiguous along K keeps its rows of 128 bytes.
    """
    whole = min(block_k, STAGE_K)
    if dense_k_major or block_k <= STAGE_K:
        return whole

    def cost(unit: int) -> float:
        return -(-block_k // unit) * unit / block_k * (1.0 + _COSTS[unit])

    large = not on_m and 2 * rows * max(_COSTS) <= _MOST_BYTES
    fitting = [unit for unit in _COSTS if unit <= STAGE_K or large]
    best = min(fitting, key=cost)
    return best if cost(whole) >= _GAIN[on_m] * cost(best) else whole


def unit_of_wide_tile(block_k: int) -> int:
    """The same for tiles of 64 x 512: rows of 64 bytes, or of 32 where that saves a tenth."""
    half = STAGE_K // 2
    return half if -block_k % half * 10 < block_k else half // 2


def tile_for_few(other: int, on_m: bool) -> int | None:
    """The smallest tile that has all of a dense matrix of up to 192 columns; None for more of them.

    As WGMMA's N (`on_m`) it may be 16.
    """
    extents = (16, 32, 64, 128, 192) if on_m else (64, 128, 192)
    return next((extent for extent in extents if other <= extent), None)
