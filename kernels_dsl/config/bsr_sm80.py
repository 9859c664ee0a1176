"""Which tile the SM80-class block-sparse kernel uses."""

from __future__ import annotations

from kernels_dsl.config.bsr_layout import BsrProblem
from kernels_dsl.config.gemm import Sm80GemmConfig

# Tile along the blocked mode -> (tile along the dense mode, tile_k, stages, warps along each, rate).
# The rate is a guess of how well the tile keeps the tensor cores busy, against the largest one.
_TILES = {
    128: (128, 32, 4, 2, 2, 1.0),
    64: (128, 32, 4, 2, 2, 0.75),
    32: (128, 64, 3, 1, 4, 0.45),
    16: (128, 64, 3, 1, 4, 0.25),
}


def tile_for(block_mn: int) -> int:
    """The tile extent that computes blocks of `block_mn` rows quickest, rows that it wastes included."""
    return min(_TILES, key=lambda tile: -(-block_mn // tile) * tile / _TILES[tile][-1])


def choose_sm80(problem: BsrProblem) -> Sm80GemmConfig:
    """The configuration for a problem; it fits the 99 KB of shared memory that sm_86 and sm_89 have."""
    blocked = tile_for(problem.block_mn)
    dense, tile_k, stages, warps_blocked, warps_dense, _rate = _TILES[blocked]
    if problem.dense_left:
        return Sm80GemmConfig(dense, blocked, tile_k, stages, warps_dense, warps_blocked)
    return Sm80GemmConfig(blocked, dense, tile_k, stages, warps_blocked, warps_dense)


SDDMM_TILE = 128
"""Extent of a tile of the sampled product along gathered blocks."""


def sddmm_units(block: tuple[int, int]) -> int:
    """Kept blocks of (rows, columns) that a tile of the sampled product takes side by side."""
    return max(1, SDDMM_TILE // block[1])


def choose_sddmm_sm80(block: tuple[int, int], copy_bytes: tuple[int, int]) -> Sm80GemmConfig:
    """The configuration of the sampled product for blocks of (rows, columns).

    `copy_bytes`: alignment classes of a and b.
    """
    tile_m = tile_for(block[0])
    _other, tile_k, stages, warps_m, warps_n, _rate = _TILES[tile_m]
    return Sm80GemmConfig(
        tile_m, SDDMM_TILE, tile_k, stages, warps_m, warps_n,
        copy_bytes_a=copy_bytes[0], copy_bytes_b=copy_bytes[1],
    )  # fmt: skip
