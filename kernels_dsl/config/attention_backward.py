"""Configurations of the attention backward."""

from __future__ import annotations

from lowering.records import frozen


@frozen
class SumsOfTile:
    """Order of the float32 sums of dQ of a query tile in memory.

    A tile is cut into shares of 64 rows and `columns` columns, as the accumulators of four warps have them:
    (share, eight columns, thread, four elements). `across` shares lie side by side, and come before those
    below them.
    """

    columns: int
    across: int

    @property
    def vectors(self) -> int:
        """Vectors of four elements that a thread has of one share."""
        return self.columns // 8

    @property
    def size(self) -> int:
        """Elements of one share."""
        return 64 * self.columns


@frozen
class Sm90BackwardConfig:
    """One instance of the TMA + WGMMA backward: `tile_q` queries a step, against 128 keys that stay.

    `dim` and `dim_v` are the head dimensions of q, k and of v, rounded up to 64 or 128. `stages` query blocks
    are in flight. `deterministic`: the shares of dQ are added in the order of their keys. `tma_stores` False
    stores dK and dV with predicated stores, which any alignment allows.
    """

    tile_q: int
    dim: int
    dim_v: int
    stages: int = 2
    deterministic: bool = True
    tma_stores: bool = True

    family = "sm90"

    @property
    def dq_share(self) -> tuple[int, int]:
        """Queries and columns of a warpgroup's share of dQ: half of the rows where they are 128, else half of
        the columns."""
        return (64, self.dim) if self.tile_q > 64 else (64, self.dim // 2)

    @property
    def sums(self) -> SumsOfTile:
        """Order of the sums of dQ: a share a warpgroup."""
        columns = self.dq_share[1]
        return SumsOfTile(columns, self.dim // columns)


def sm90_backward_config(dim: int, dim_v: int, deterministic: bool) -> Sm90BackwardConfig:
    """The tile for these head dimensions, at most 128."""
    d, dv = (64 if x <= 64 else 128 for x in (dim, dim_v))
    return Sm90BackwardConfig(64, d, dv, deterministic=deterministic)
