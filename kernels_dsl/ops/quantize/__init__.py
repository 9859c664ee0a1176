"""`quantize`: which kernels make fp8 operands from a tensor."""
