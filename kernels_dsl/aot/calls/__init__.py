"""Common calls of the public operations: a bundle of common kernels has those that they launch."""
