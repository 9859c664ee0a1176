"""What the SM80-class attention kernel derives from its configuration and operand types at trace time."""

from dataclasses import dataclass
from typing import Any

import cutlass

from kernels_dsl.blocks.swizzled_rows import RowsTile
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig

WARP_ROWS = (16, 32)
"""Query rows that a warp may have. A fragment of K or V that it reads serves all of them."""


@dataclass(frozen=True)
class Sm80AttentionSpec:
    """Static facts of one instance; extents in elements."""

    config: Sm80AttentionConfig
    dtype: type[cutlass.Numeric]
    variant: Any  # AttentionVariant
    varlen: bool
    """Packed sequences."""

    @property
    def tile_m(self) -> int:
        """Query rows of a CTA."""
        return self.config.tile_m

    @property
    def tile_n(self) -> int:
        """Keys of a step."""
        return self.config.tile_n

    @property
    def tile(self) -> tuple[int, int]:
        """Query rows and keys of one step."""
        return self.tile_m, self.tile_n

    @property
    def pack(self) -> int:
        """Query heads whose rows share a tile."""
        return 1

    @property
    def dim(self) -> int:
        """Padded head dimension of Q and K."""
        return self.config.dim

    @property
    def dim_v(self) -> int:
        """Padded head dimension of V and O."""
        return self.config.dim_v

    watch_sums = False

    @property
    def lazy_rescale(self) -> bool:
        """See `softmax.online_step`."""
        return self.config.lazy_rescale

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.config.warps

    @property
    def warp_rows(self) -> int:
        """Query rows of a warp."""
        return self.tile_m // self.config.warps

    @property
    def q_tile(self) -> RowsTile:
        """Q (M, D) in shared memory."""
        return RowsTile(self.tile_m, self.dim)

    @property
    def k_tile(self) -> RowsTile:
        """One buffer of K (N, D)."""
        return RowsTile(self.tile_n, self.dim)

    @property
    def v_tile(self) -> RowsTile:
        """One buffer of V (N, Dv)."""
        return RowsTile(self.tile_n, self.dim_v)

    @property
    def o_tile(self) -> RowsTile:
        """A warp's rows of the output."""
        return RowsTile(self.warp_rows, self.dim_v)

    @property
    def k_place(self) -> int:
        """Byte offset of K's buffers; Q and later O lie before them."""
        return self.tile_m * max(self.dim, self.dim_v) * 2

    @property
    def v_place(self) -> int:
        """Byte offset of V's buffers."""
        return self.k_place + 2 * self.k_tile.bytes


def make_spec(
    config: Sm80AttentionConfig, variant: Any, dtype: type[cutlass.Numeric], varlen: bool
) -> Sm80AttentionSpec:
    """Completes a configuration. ValueError names what does not fit."""
    if config.tile_m not in tuple(config.warps * rows for rows in WARP_ROWS):
        raise ValueError(
            f"tile_m must be 16 or 32 rows for each of {config.warps} warps; it is {config.tile_m}"
        )
    if config.tile_n % 16 or config.tile_n <= 0:
        raise ValueError(f"tile_n must be a multiple of 16; it is {config.tile_n}")
    spec = Sm80AttentionSpec(config, dtype, variant, varlen)
    for tile in (spec.q_tile, spec.k_tile, spec.v_tile):
        tile.check_threads(spec.threads)
    return spec
