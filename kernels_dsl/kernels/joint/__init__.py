"""Host functions that launch kernels of several families, one after the other: one call for the host."""
