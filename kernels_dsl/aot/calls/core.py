"""The core of the common calls: those that are described in usual words alone.

A released wheel carries their kernels (`tools/wheel.py`), so that most programs' first calls compile nothing.
"""

from __future__ import annotations

from kernels_dsl.aot.calls.call import Call
from kernels_dsl.aot.calls.fp8 import CUBES
from kernels_dsl.aot.calls.gemm import SHOWN, sizes, text

_LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336))
_PRODUCTS = {
    *map(text, sizes(_LAYERS, (1, 16, 64, 512, 2048, 8192))),
    *(text((n, n, n)) for n in (512, 2048, 8192)),
    "512x2048x2048",
}
_SCALED = {*map(text, sizes(_LAYERS, (16, 1024, 4096)))}
_ATTENTION = {"bf16", "d64", "d128", "causal"}
_BLOCKS = {"x", "@", "w", "w.t()", "bf16", "64x64", "512x2048x2048", "4096x4096x2048"}
USUAL: tuple[tuple[str, set[str]], ...] = (
    ("gemm", {"bf16", "nt", "nn", *_PRODUCTS}),
    ("gemm", {"bf16", "nt", "gradients", "2048x4096x4096", "8192x4096x4096"}),
    ("gemm", {"bf16", "nt", "bias", *_PRODUCTS}),
    ("gemm", {"bf16", "nt", "gelu", *map(text, SHOWN)}),
    ("gemm", {"fp16", "nt", *_PRODUCTS}),
    ("attention", {*_ATTENTION, "16", "heads", "1x512", "1x4096"}),
    ("attention", {*_ATTENTION, "16", "32", "heads", "1x4096", "gradients"}),
    ("attention", {"fp16", "d128", "causal", "1x4096"}),
    ("scaled_dot_product_attention", {*_ATTENTION, "1x4096"}),
    ("attention_varlen", {*_ATTENTION, "(1000,", "24,", "3072)"}),
    ("attention_decode", {"bf16", "d128", "paged", "32", "heads", "1x4096", "16x4096"}),
    ("quantize", {"tensor", "row", "1x128", "128x128", "16x4096", "4096x4096"}),
    ("scaled_gemm", {"tensor", "row", "block", *_SCALED}),
    ("scaled_gemm", {"tensor", "row", "accurate", *map(text, CUBES)}),
    ("bsr_gemm", {*_BLOCKS, "unknown"}),
    ("bsr_gemm", {*_BLOCKS, "gradients"}),
    ("BsrLinear", {"bf16", "64x64", "4096", "gradients"}),
)
"""Operations and the words that are usual in their calls."""


def is_core(call: Call) -> bool:
    """Says whether an entry of `USUAL` has the call's operation and all of its words."""
    name, *words = call.label.split()
    return any(name == operation and taken.issuperset(words) for operation, taken in USUAL)
