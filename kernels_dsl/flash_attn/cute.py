"""FlashAttention-4's functions under its names: `from kernels_dsl.flash_attn.cute import flash_attn_func`."""

from kernels_dsl.ops.attention.flash_attn_4 import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
