"""GPU kernels written in Python with CUTLASS's CuTe DSL, for PyTorch tensors.

`gemm(a, b)` and its relatives compile their kernel at the first call, keep it on disk and launch it on
torch's current stream. Importing this package imports neither torch nor the compiler: names are looked up
when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

from kernels_dsl._version import __version__

# Public name -> the module that defines it.
_PUBLIC = {
    "gemm": "kernels_dsl.ops.gemm.gemm",
    "supports": "kernels_dsl.ops.gemm.gemm",
    "autotune_gemm": "kernels_dsl.ops.gemm.autotune",
    "attention": "kernels_dsl.ops.attention.attention",
    "attention_varlen": "kernels_dsl.ops.attention.attention",
    "attention_fp8": "kernels_dsl.ops.attention.attention_fp8",
    "attention_fp8_varlen": "kernels_dsl.ops.attention.attention_fp8",
    "quantize_qkv": "kernels_dsl.ops.attention.fp8_inputs",
    "attention_fp8_supports": "kernels_dsl.ops.attention.attention_fp8",
    "attention_supports": "kernels_dsl.ops.attention.attention",
    "scaled_dot_product_attention": "kernels_dsl.ops.attention.attention",
    "register_torch_attention": "kernels_dsl.ops.attention.with_torch",
    "register_transformers_attention": "kernels_dsl.ops.attention.with_transformers",
    "kernel_function": "kernels_dsl.ops.attention.functions",
    "checked": "kernels_dsl.ops.checked",
    "BlockLists": "kernels_dsl.ops.attention.blocks",
    "quantize": "kernels_dsl.ops.quantize.quantize",
    "quantize_supports": "kernels_dsl.ops.quantize.quantize",
    "append_kv": "kernels_dsl.ops.serving.append_kv",
    "merge_states": "kernels_dsl.ops.serving.merge_states",
    "scaled_gemm": "kernels_dsl.ops.scaled.scaled_gemm",
    "scaled_gemm_supports": "kernels_dsl.ops.scaled.scaled_gemm",
    "grouped_gemm": "kernels_dsl.ops.gemm.grouped",
    "grouped_gemm_supports": "kernels_dsl.ops.gemm.grouped",
    "scaled_grouped_gemm": "kernels_dsl.ops.gemm.grouped",
    "scaled_grouped_gemm_supports": "kernels_dsl.ops.gemm.grouped",
    "scaled_linear": "kernels_dsl.ops.scaled.linear",
    "ScaledLinear": "kernels_dsl.ops.scaled.linear",
    "bsr_gemm": "kernels_dsl.ops.bsr.bsr",
    "bsr_sddmm": "kernels_dsl.ops.bsr.bsr",
    "bsr_supports": "kernels_dsl.ops.bsr.bsr",
    "bsr_scaled_gemm": "kernels_dsl.ops.bsr.scaled",
    "bsr_scaled_supports": "kernels_dsl.ops.bsr.scaled",
    "BsrTensor": "kernels_dsl.ops.bsr.tensor",
    "BsrLinear": "kernels_dsl.ops.bsr.linear",
    "register_epilogue": "kernels_dsl.ops.epilogues",
    "GemmConfig": "kernels_dsl.config.gemm",
    "Schedule": "kernels_dsl.config.gemm",
    "Sm80AttentionConfig": "kernels_dsl.config.attention_sm80",
    "Sm90AttentionConfig": "kernels_dsl.config.attention",
    "Sm80GemmConfig": "kernels_dsl.config.gemm",
    "Sm90GemmConfig": "kernels_dsl.config.gemm",
    "LinearEpilogue": "kernels_dsl.blocks.epilogue.functions",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kernels_dsl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
