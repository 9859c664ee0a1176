"""Slow and obvious: what the kernels are checked against. Needs torch alone.

- `gemm`: GEMM in float64, and the same in the input's dtype as PyTorch would do it.
- `tolerance`: how far from float64 a kernel may be, per tile; bit-for-bit comparison.
- `inputs`: seeded inputs, exactly representable integers, operands that lie between NaNs.
- `buffers`: strided views in guarded memory, outputs poisoned before the call.
"""
