"""Kernels that make lists of key blocks for sparse attention."""
