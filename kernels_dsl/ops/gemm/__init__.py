"""`gemm` and `grouped_gemm`: what a call asks for, which kernel it gets, its plan, its operators."""
