"""Configurations of the kernel that computes dQ of attention by tiles of queries."""

from __future__ import annotations

from kernels_dsl.config.problem import H200
from lowering.records import frozen


@frozen
class Sm90DqConfig:
    """One instance: `tile_m` queries stay, 64 a consumer warpgroup, against `tile_n` keys a step.

    `dim` and `dim_v` are the head dimensions of q, k and of v, rounded up to multiples of 64. `k_stages`
    steps of K, at least 2, and `v_stages` of V are in flight. `ctas_per_sm` is 1, or 2 with 64 queries where
    the tiles leave room.
    """

    tile_m: int
    tile_n: int
    dim: int
    dim_v: int
    k_stages: int = 2
    v_stages: int = 2
    ctas_per_sm: int = 1

    family = "sm90"
    joined = 1  # listed blocks in a step

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: Q, dO, K and V, and some for mbarriers."""
        of_queries = self.tile_m * (self.dim + self.dim_v)
        of_keys = self.tile_n * (self.k_stages * self.dim + self.v_stages * self.dim_v)
        return 2 * (of_queries + of_keys) + 1024


def sm90_dq_config(
    dim: int, dim_v: int, block: tuple[int, int] = (128, 128), by_elements: bool = False
) -> Sm90DqConfig:
    """The tile for these head dimensions, at most 256. `block`: rows of listed blocks, multiples of 64.
    `by_elements`: there are masks or functions of single scores, which take registers."""
    d, dv = (-(-x // 64) * 64 for x in (dim, dim_v))
    widest = max(d, dv)
    tile_n = 64 if widest > 128 or by_elements or block[1] % 128 else 128
    if block[0] % 128:
        return Sm90DqConfig(64, 64, d, dv, ctas_per_sm=2 if widest <= 128 else 1)
    config = Sm90DqConfig(128, tile_n, d, dv)
    return config if config.smem_bytes <= H200.smem_bytes else Sm90DqConfig(128, tile_n, d, dv, v_stages=1)
