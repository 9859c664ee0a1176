"""Calls of the common calls' makers with sizes that the emulator runs in seconds, of each operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kernels_dsl.aot.calls import attention, bsr, fp8, gemm, serving
from kernels_dsl.aot.calls.call import BF16, Arguments, Call


def _call(
    operation: Callable[..., Any],
    words: str,
    make: Callable[..., Arguments],
    gradients: str = "",
    name: str | None = None,
    **sizes: Any,
) -> Call:
    return Call(
        name or operation.__name__, operation, words, partial(make, **sizes), tuple(gradients.split())
    )


_SIZE = {"size": (48, 64, 64), "dtype": BF16}
_QKV: dict[str, Any] = {"batch": 1, "length": 128, "dim": 64, "heads": (4, 2)}
_PACKED: dict[str, Any] = {"lengths": (70, 30), "dim": 64}
_CACHE: dict[str, Any] = {"batch": 2, "keys": 64, "dim": 64, "heads": (4, 2)}
_SPARSE: dict[str, Any] = {"size": (64, 128, 128), "dtype": BF16}
MERGE = _call(serving.merge_states, "", serving._states, "out lse", dim=64, dtype=BF16, turned=True)
SMALL = (
    _call(gemm.gemm, "bias", gemm.product, "a b bias", **_SIZE, bias=True),
    _call(gemm.gemm, "row-major", gemm.product, **_SIZE, layout="nn", activation="gelu", residual=True),
    _call(gemm.gemm_gated, "", gemm.product, "a b", **_SIZE),
    _call(gemm.gemm_reduce, "", gemm.product, **_SIZE, reduce="abs_max", dim=-1),
    _call(gemm.grouped_gemm, "", gemm._grouped, size=(64, 64, 64), dtype=BF16, layout="nt"),
    _call(attention.attention, "sinks", attention.qkv, **_QKV, causal=True, sinks=True, return_lse=True),
    _call(attention.attention, "", attention.qkv, "q k v", **_QKV, causal=True),
    _call(attention.attention_varlen, "", attention.packed, **_PACKED, heads=(4, 2), causal=True),
    _call(
        attention.scaled_dot_product_attention, "", attention._torchs,
        batch=1, length=64, dim=64, dtype=BF16, turned=True,
    ),
    _call(serving.attention_decode, "fp8", serving._decode, **_CACHE, fp8=True, return_lse=True),
    _call(serving.attention_decode, "packed", serving._decode, **_CACHE, queries=2, packed=True, sinks=True),
    _call(serving.append_kv, "", serving._append, dim=64, dtype=BF16, fp8=True, index=None),
    MERGE,
    _call(fp8.quantize, "", fp8._values, rows=64, columns=256, scaling="1x128", transpose="both"),
    _call(fp8.quantize_qkv, "", attention.qkv, batch=1, length=256, dim=64, scaling="block"),
    _call(fp8.scaled_gemm, "", fp8._scaled, size=(48, 128, 256), recipe="block"),
    _call(fp8.scaled_grouped_gemm, "", fp8._grouped, size=(64, 64, 128), recipe="row"),
    _call(
        fp8.scaled_linear, "", fp8._layer, "x weight bias",
        size=(48, 64, 128), dtype=BF16, bias=True, recipe="row",
    ),
    _call(fp8.attention_fp8, "", fp8._attention, batch=1, length=128, dim=64, scaling="head", causal=True),
    _call(fp8.attention_fp8_varlen, "", fp8._packed, **_PACKED),
    _call(bsr.bsr_gemm, "right", bsr._weight_right, "a b", **_SPARSE, block=32),
    _call(bsr.bsr_gemm, "left", bsr._weight_left, **_SPARSE, block=32, turned=True),
    _call(bsr.bsr_sddmm, "", bsr._sampled, **_SPARSE, block=64),
    _call(bsr.bsr_scaled_gemm, "", bsr._scaled, block=64, tokens=64, left=True, width=128),
    _call(bsr._layer, "", bsr._of_layer, "x layer", "BsrLinear", tokens=64, block=64, width=128),
)  # fmt: skip
