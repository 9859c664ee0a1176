"""Runs compiled CuTe DSL kernels on the CPU, from their PTX, with asynchrony modelled and races reported."""
