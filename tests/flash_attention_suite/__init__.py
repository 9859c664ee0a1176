"""FlashAttention's own tests of its CuTe DSL kernels, run on this library's operations."""
