"""Configurations of the SM80-class attention kernel: cp.async, ldmatrix, mma.sync."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sm80AttentionConfig:
    """One instance of the mma.sync kernel.

    `tile_m` query rows, shared by `warps` warps of 16 or 32 rows each, and `tile_n` keys a step. `dim` and
    `dim_v` are the head dimensions of q, k and of v, o, rounded up to multiples of 32. K and V have two
    buffers each. `q_registers` keeps Q in registers instead of reading it from shared memory at every step.
    `overlap` multiplies the last block's probabilities with V beside the softmax of this one, at the price of
    their registers. `ahead` steps of 16 x 16 elements of K and V are read before they are multiplied.
    `ctas_per_sm` is what the registers are budgeted for. `lazy_rescale` as in `Sm90AttentionConfig`.
    """

    tile_m: int
    tile_n: int
    dim: int
    dim_v: int
    warps: int = 4
    q_registers: bool = False
    overlap: bool = False
    ahead: int = 1
    ctas_per_sm: int = 1
    lazy_rescale: bool = False

    family = "sm80"

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: Q, which the output is staged in later, and two buffers of K and V."""
        return 2 * self.tile_m * max(self.dim, self.dim_v) + 4 * self.tile_n * (self.dim + self.dim_v)
