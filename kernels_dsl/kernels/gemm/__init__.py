"""Dense GEMM: the SM90 family (TMA, WGMMA) and the SM80-class family (cp.async, mma.sync)."""
