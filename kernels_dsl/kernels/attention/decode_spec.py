"""Trace-time facts of decoding attention, from its configuration and operand types."""

from dataclasses import dataclass

import cutlass

from kernels_dsl.blocks.hw.swizzled_rows import RowsTile
from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.decode import DecodeConfig

PAD = 8
"""float32 between rows of the warps' outputs, so that four rows lie in different banks."""


@dataclass(frozen=True)
class DecodeSpec:
    """Trace-time facts of one instance."""

    config: DecodeConfig
    dtype: type[cutlass.Numeric]
    variant: AttentionVariant
    paged: bool

    @property
    def q_tile(self) -> RowsTile:
        """Q's rows in shared memory."""
        return RowsTile(self.config.rows, self.config.dim)

    @property
    def kv_tile(self) -> RowsTile:
        """A block of K, or of V."""
        return RowsTile(self.config.tile_n, self.config.dim)

    @property
    def warp_keys(self) -> int:
        """Keys of a step that a warp has."""
        return self.config.tile_n // self.config.warps_n

    @property
    def q_registers(self) -> bool:
        """Q stays in registers: there is room up to 128 columns."""
        return self.config.dim <= 128

    @property
    def copied_rows(self) -> int:
        """Rows of a block that a thread copies a part of."""
        return self.config.tile_n // self.kv_tile.check_threads(self.config.threads)

    @property
    def pitch(self) -> int:
        """float32 from row to row of the warps' outputs."""
        return self.config.dim + PAD


Spec = cutlass.Constexpr[DecodeSpec]
"""A `DecodeSpec` as a parameter of device functions."""
