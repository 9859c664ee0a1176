"""Layers on top of the operations: linear ones with block-sparse weights, and with products in fp8."""
