"""A dense GEMM cut along K, all of it or the tiles that fill the last wave: plain arithmetic on the host.

Osama, Merrill et al., "Stream-K: work-centric parallel decomposition for dense matrix-matrix multiplication
on the GPU", 2023. The tiles that are cut come first, whole ones behind them.
"""

from __future__ import annotations

from kernels_dsl.config.budget import sm90_consumers
from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.config.problem import GemmProblem
from lowering.records import frozen

COUNTERS = 2
"""Of a warpgroup's part of a piece: how many came to its tile's end, how many left their sums."""

_ALIGN = 4
"""Float32 elements of the 16 bytes that TMA stores whole."""


def partials_shape(problem: GemmProblem, splits: int) -> tuple[int, int, int]:
    """(L * splits, M, columns) of the float32 partial sums of a split K.

    A row has whole units of a TMA store: columns beyond N get the zeros that loads beyond B give, and nobody
    reads them.
    """
    return problem.l * splits, problem.m, -(-problem.n // _ALIGN) * _ALIGN


@frozen
class Shares:
    """The first `tiles` cluster tiles are cut: each of `clusters` does `share` K tiles of them, in a row."""

    tiles: int
    share: int
    clusters: int

    @property
    def pieces(self) -> int:
        """Numbers of pieces, as `blocks.reduce.partial_sums` counts them."""
        return self.tiles + self.clusters - 1 if self.tiles else 0


def shares(config: Sm90GemmConfig, problem: GemmProblem, max_ctas: int) -> Shares:
    """Shares out the tiles of `problem`, as the kernel sees it, to `max_ctas` CTAs.

    The tiles that are left over are cut, and one wave more where they are few: a tile is in few pieces then.
    """
    clusters = max(1, max_ctas // (config.cluster_m * config.cluster_n))
    rows, columns = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
    tiles = -(-problem.m // rows) * -(-problem.n // columns) * problem.l
    k_tiles = -(-problem.k // config.tile_k_for(problem.ab_bytes))
    left = tiles % clusters
    if left and 2 * left < clusters <= tiles:
        left += clusters
    return Shares(left, max(1, -(-left * k_tiles // clusters)), clusters)


def memory(config: Sm90GemmConfig, found: Shares) -> tuple[int, int]:
    """Elements of (counters, workspace) for the sums of pieces: `blocks.reduce.partial_sums`."""
    pieces = max(1, found.pieces) * config.cluster_m * config.cluster_n
    return COUNTERS * sm90_consumers(config) * pieces, config.tile_m * config.tile_n * pieces
