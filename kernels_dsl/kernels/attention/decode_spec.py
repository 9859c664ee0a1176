"""Trace-time facts of decoding attention, from its configuration and operand types."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from kernels_dsl.blocks.hw.swizzled_rows import RowsTile
from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.decode import OUTPUT_PAD, DecodeConfig


@dataclass(frozen=True)
class DecodeSpec:
    """Trace-time facts of one instance."""

    config: DecodeConfig
    dtype: type[cutlass.Numeric]
    """Operands of the products: the queries' type, fp16 with fp8 caches."""
    variant: AttentionVariant
    paged: bool
    q_dtype: type[cutlass.Numeric]

    @property
    def fp8(self) -> bool:
        """Caches hold e4m3."""
        return self.config.kv_bytes == 1

    @property
    def scales_rows(self) -> bool:
        """Rows of Q have factors: bf16 became fp16."""
        return self.fp8 and self.q_dtype is cutlass.BFloat16

    @property
    def q_tile(self) -> RowsTile:
        """Q's rows in shared memory."""
        return RowsTile(self.config.rows, self.config.dim)

    @property
    def kv_tile(self) -> RowsTile:
        """A block of K, or of V, or the part of one that TMA loads at a time; fp8 in pairs."""
        config = self.config
        columns = config.dim * config.kv_bytes // 2
        return RowsTile(config.box or config.tile_n, columns)

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
    def boxes(self) -> int:
        """Loads by TMA that a block of K or of V takes."""
        return self.config.tile_n // self.config.box

    @property
    def ring_stages(self) -> int:
        """Stages of the ring of K's blocks, and of that of V's."""
        return self.config.stages // 2

    def warp_offset(self, warp_n: Int32) -> Int32:
        """Byte offset of a warp's keys in a block."""
        tile, key = self.kv_tile, warp_n * self.warp_keys
        if tile.rows == self.config.tile_n:
            return key * (2 * tile.width)
        return key // tile.rows * tile.bytes + key % tile.rows * (2 * tile.width)

    def box_offset(self, key: int) -> int:
        """Bytes from a warp's first keys to the tile of its key number `key`."""
        return key // self.kv_tile.rows * self.kv_tile.bytes

    @property
    def pitch(self) -> int:
        """float32 from row to row of the warps' outputs."""
        return self.config.merged_columns + OUTPUT_PAD * 2 // self.config.kv_bytes


Spec = cutlass.Constexpr[DecodeSpec]
"""A `DecodeSpec` as a parameter of device functions."""
