"""The former name of `kernels_dsl.blocks.epilogue.functions`, for code that imports from it."""

from kernels_dsl.blocks.epilogue.functions import gelu, gelu_tanh, identity, relu, sigmoid, silu

__all__ = ["gelu", "gelu_tanh", "identity", "relu", "sigmoid", "silu"]
