"""Attention kernels, one family of GPU a file set."""
