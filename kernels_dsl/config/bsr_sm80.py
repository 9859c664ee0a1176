"""The tile of the SM80-class block-sparse kernel."""

from __future__ import annotations

from kernels_dsl.config.bsr import BsrProblem
from kernels_dsl.config.gemm import Sm80GemmConfig

# Tile along the blocked mode -> (tile along the dense mode, tile_k, stages, warps along each), the fastest on
# an H200 at 8192 x 8192 x 8192 with 25 % kept; and the rate against the largest tile.
_TILES = {
    128: (128, 32, 4, 2, 2),
    64: (256, 32, 4, 1, 4),
    32: (256, 32, 4, 1, 4),
    16: (128, 64, 3, 1, 4),
}
_NARROW_TILES = {
    128: (128, 32, 4, 2, 2),
    64: (128, 32, 4, 2, 2),
    32: (128, 64, 3, 1, 4),
    16: (128, 64, 3, 1, 4),
}
"""Tiles for a short dense mode, and for the sampled product."""
_FP8_TILES = {
    128: (128, 64, 4, 2, 4),
    64: (128, 64, 4, 2, 2),
    32: (256, 64, 4, 1, 4),
    16: (128, 128, 3, 1, 4),
}
"""The same for fp8: two sets of accumulators, 64 a thread at most. Not measured."""
NARROW = 128
"""Extent of the dense mode up to which the narrow tiles are taken."""
MOST_CTAS = 65535
"""Along the second and third mode of a grid."""
_RATES = {128: 1.0, 64: 0.9, 32: 0.6, 16: 0.35}


def tile_for(block_mn: int) -> int:
    """The tile extent that computes blocks of `block_mn` rows quickest, rows that it wastes included."""
    return min(_RATES, key=lambda tile: -(-block_mn // tile) * tile / _RATES[tile])


def choose_sm80(problem: BsrProblem) -> Sm80GemmConfig:
    """The configuration for a problem; it fits the 99 KB of shared memory that sm_86 and sm_89 have."""
    blocked = tile_for(problem.block_mn)
    tiles = _NARROW_TILES if problem.other <= NARROW else _TILES
    if problem.dtype == "fp8":
        tiles = _FP8_TILES
    dense, tile_k, stages, warps_blocked, warps_dense = tiles[blocked]
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
    _other, tile_k, stages, warps_m, warps_n = _NARROW_TILES[tile_m]
    return Sm80GemmConfig(
        tile_m, SDDMM_TILE, tile_k, stages, warps_m, warps_n,
        copy_bytes_a=copy_bytes[0], copy_bytes_b=copy_bytes[1],
    )  # fmt: skip


def check_grid(name: str, tiles: int, matrices: int) -> None:
    """ValueError where a launch of the SM80-class kernels would have more CTAs along a mode than CUDA takes.

    `tiles`: along the dense factor `name`; `matrices`: the batch.
    """
    for count, kind in ((tiles, "tiles along its dense mode"), (matrices, "matrices")):
        if count > MOST_CTAS:
            raise ValueError(f"{name} has {count} {kind}, must have {MOST_CTAS} at most for the sm80 kernels")
