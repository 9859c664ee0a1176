"""Block-sparse (BSR) GEMM kernels."""
