"""Measurements of this project against its peers. `python -m benchmarks.gemm --help`."""
