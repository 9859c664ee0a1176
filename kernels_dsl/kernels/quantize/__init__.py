"""Kernels that turn 16- and 32-bit floats into fp8 values and scales."""
