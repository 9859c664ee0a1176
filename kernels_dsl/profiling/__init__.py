"""One call under Nsight Compute: what `python -m kernels_dsl profile` runs, counts and says."""
