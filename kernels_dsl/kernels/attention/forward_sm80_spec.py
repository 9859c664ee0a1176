"""Trace-time facts of the SM80-class forward kernel, from its configuration and operand types."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean

from kernels_dsl.blocks.attention.kv_blocks import TileShape
from kernels_dsl.blocks.attention.query_tiles import QueryTile
from kernels_dsl.blocks.attention.seqlen import SeqInfo
from kernels_dsl.blocks.hw.mma_sync import mma_k
from kernels_dsl.blocks.hw.swizzled_rows import PAIR, RowsTile
from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig

WARP_ROWS = (16, 32)
"""Query rows that a warp may have. A fragment of K or V that it reads serves all of them."""


@dataclass(frozen=True)
class ForwardSpec:
    """Static facts of one instance; extents in elements."""

    config: Sm80AttentionConfig
    dtype: type[cutlass.Numeric]
    variant: AttentionVariant
    varlen: bool
    """Packed sequences."""
    scales_by_block: bool = False
    """Operands are fp8 with factors a block of keys."""
    paged: bool = False
    """K and V lie in pages."""
    no_max = False
    linear_exps = 0
    pack = 1

    def has_rows(self, at: QueryTile, seq: SeqInfo) -> Boolean:
        """False for a tile past the end of its packed sequence."""
        return at.m * self.tile_m < seq.q_len if self.varlen else Boolean(True)

    @property
    def fp8(self) -> bool:
        """Operands are e4m3: V comes transposed, tiles are copied as pairs of elements."""
        return self.dtype.width == 8

    @property
    def unit(self) -> type[cutlass.Numeric]:
        """Type of the elements of tiles in shared memory, as copies see them."""
        return PAIR if self.fp8 else self.dtype

    @property
    def dim_steps(self) -> int:
        """Instructions along the head dimension of Q and K."""
        return self.dim // mma_k(self.dtype)

    @property
    def key_steps(self) -> int:
        """Instructions along the keys of a step."""
        return self.tile_n // mma_k(self.dtype)

    @property
    def tile_m(self) -> int:
        """Query rows of a CTA."""
        return self.config.tile_m

    @property
    def tile_n(self) -> int:
        """Keys of a step."""
        return self.config.tile_n

    @property
    def tile(self) -> TileShape:
        """Query rows and keys of one step."""
        return TileShape(self.tile_m, self.tile_n)

    @property
    def dim(self) -> int:
        """Padded head dimension of Q and K."""
        return self.config.dim

    @property
    def dim_v(self) -> int:
        """Padded head dimension of V and O."""
        return self.config.dim_v

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
        return RowsTile(self.tile_m, self.dim // self._per_unit)

    @property
    def k_tile(self) -> RowsTile:
        """One buffer of K (N, D)."""
        return RowsTile(self.tile_n, self.dim // self._per_unit)

    @property
    def v_tile(self) -> RowsTile:
        """One buffer of V (N, Dv), or of its transpose (Dv, N)."""
        return RowsTile(self.dim_v, self.tile_n // 2) if self.fp8 else RowsTile(self.tile_n, self.dim_v)

    @property
    def o_tile(self) -> RowsTile:
        """A warp's rows of the output."""
        return RowsTile(self.warp_rows, self.dim_v)

    @property
    def k_offset(self) -> int:
        """Byte offset of K's buffers; Q, and after it O, lie before them."""
        return self.config.q_bytes

    @property
    def _per_unit(self) -> int:
        return self.unit.width // self.dtype.width

    @property
    def v_offset(self) -> int:
        """Byte offset of V's buffers."""
        return self.k_offset + 2 * self.k_tile.bytes


Spec = cutlass.Constexpr[ForwardSpec]
"""A `ForwardSpec` as a parameter of device functions."""


def make_spec(
    config: Sm80AttentionConfig,
    variant: AttentionVariant,
    dtype: type[cutlass.Numeric],
    varlen: bool,
    scales_by_block: bool = False,
) -> ForwardSpec:
    """Completes a configuration. ValueError names what does not fit."""
    if dtype.width != 8 * config.element_bytes:
        raise ValueError(
            f"element_bytes must be {dtype.width // 8} for {dtype}; it is {config.element_bytes}"
        )
    if config.tile_m not in tuple(config.warps * rows for rows in WARP_ROWS):
        raise ValueError(
            f"tile_m must be 16 or 32 rows for each of {config.warps} warps; it is {config.tile_m}"
        )
    if config.tile_n % 16 or config.tile_n <= 0:
        raise ValueError(f"tile_n must be a multiple of 16; it is {config.tile_n}")
    spec = ForwardSpec(config, dtype, variant, varlen, scales_by_block)
    for tile in (spec.q_tile, spec.k_tile, spec.v_tile):
        tile.check_threads(spec.threads)
    return spec
