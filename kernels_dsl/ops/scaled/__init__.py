"""`scaled_gemm` and linear layers of fp8 operands."""
