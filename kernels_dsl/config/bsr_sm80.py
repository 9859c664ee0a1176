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


def choose_sddmm_sm80(block: tuple[int, int], copy_bytes: tuple[int, int]) -> Sm80GemmConfig:
    """The configuration that computes blocks of (rows, columns) of a product, one CTA a tile of a block.

    `copy_bytes`: alignment classes of a and b.
    """
    tile_m, tile_n = (tile_for(extent) for extent in block)
    tile_k = 32 if tile_m + tile_n > 128 else 64
    warps_m = min(2, tile_m // 16)
    warps_n = min(2, tile_n // 16)
    stages = 4 if tile_k == 32 else 3
    return Sm80GemmConfig(
        tile_m,
        tile_n,
        tile_k,
        stages,
        warps_m,
        warps_n,
        copy_bytes_a=copy_bytes[0],
        copy_bytes_b=copy_bytes[1],
    )
