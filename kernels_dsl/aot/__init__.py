"""The kernels that are worth compiling ahead of time, by family."""
