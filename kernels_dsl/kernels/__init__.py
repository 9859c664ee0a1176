"""Kernels, one folder a family: host set-up and role wiring, composed from `kernels_dsl.blocks`."""
