"""The public operations with a valid call each, small enough for a CPU, and which arguments are tensors.

A test compares the table with the signatures, so that an argument cannot be forgotten in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import kernels_dsl
from kernels_dsl.sparse.attention_blocks import causal_blocks

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Operation(NamedTuple):
    """A way of calling a public operation.

    arguments: makes a valid call's keywords. inputs, outputs: those that are tensors it reads and writes, as
    "c", "aux[0]" and "blocks.counts". call: the operation; None: the public name.
    """

    name: str
    arguments: Callable[[], dict[str, Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None

    def __call__(self, **arguments: Any) -> Any:
        return (self.call or getattr(kernels_dsl, self.name))(**arguments)


def value_at(arguments: dict[str, Any], path: str) -> Any:
    """The argument, or the part of it, that `path` names."""
    name, part, where = _parts(path)
    value = arguments[name]
    return value if part is None else value[part] if where == "[" else getattr(value, str(part))


def with_value(arguments: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The arguments with another value there."""
    name, part, where = _parts(path)
    whole = arguments[name]
    if where == "[":
        value = tuple(value if n == part else x for n, x in enumerate(whole))
    elif where == ".":
        fields = ("counts", "indices", "full_counts", "full_indices")
        lists = {field: getattr(whole, field) for field in fields}
        value = kernels_dsl.BlockLists(**{**lists, str(part): value}, block=whole.block)
    return {**arguments, name: value}


def _parts(path: str) -> tuple[str, Any, str]:
    if path.endswith("]"):
        name, _, number = path[:-1].partition("[")
        return name, int(number), "["
    name, dot, field = path.partition(".")
    return name, field or None, dot


def parameters(operation: Operation) -> dict[str, inspect.Parameter]:
    """The parameters of the operation's public name."""
    return dict(inspect.signature(getattr(kernels_dsl, operation.name)).parameters)


def _ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def _twice(acc: Any, x: Any) -> Any:
    return acc + x


def _gemm() -> dict[str, Any]:
    return {
        "a": _ones(32, 64), "b": _ones(64, 48), "c": _ones(32, 48), "bias": _ones(48), "bias_axis": "n",
        "residual": _ones(32, 48), "alpha": 0.5, "beta": 2.0, "activation": "relu", "out": _ones(32, 48),
        "out_dtype": BF16, "config": None, "family": None, "epilogue": None, "epilogue_args": (),
    }  # fmt: skip


_LINEAR = ("c", "bias", "residual")


def _gated() -> dict[str, Any]:
    return {
        "a": _ones(32, 64), "b": _ones(64, 48), "c": _ones(32, 48), "bias": _ones(48), "bias_axis": "n",
        "alpha": 0.5, "beta": 2.0, "activation": "swiglu", "out": _ones(32, 24), "preact_out": _ones(32, 48),
        "return_preact": True, "out_dtype": BF16, "config": None, "family": None, "batch_invariant": False,
    }  # fmt: skip


def _reduced() -> dict[str, Any]:
    return {
        **_gemm(), "reduce": "sum", "dim": -1, "reduced_out": torch.ones(32), "batch_invariant": False,
    }  # fmt: skip


def _own_epilogue(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with an epilogue in place of everything else."""
    shape = (arguments["a"].shape[-2], arguments["b"].shape[-1])
    kept = {name: arguments[name] for name in ("a", "b", "scale_a", "scale_b", "offs") if name in arguments}
    return {**kept, "epilogue": _twice, "epilogue_args": (_ones(*shape),)}


def _scaled() -> dict[str, Any]:
    return {
        **_gemm(), "a": _ones(32, 256, dtype=E4M3), "b": _ones(48, 256, dtype=E4M3).mT,
        "scale_a": torch.ones(32, 1), "scale_b": torch.ones(1, 48), "scale_result": torch.ones(()),
        "amax": torch.ones(1), "use_fast_accum": True, "out_dtype": E4M3,
        "out": _ones(32, 48, dtype=E4M3),
    }  # fmt: skip


def _grouped() -> dict[str, Any]:
    offs = torch.tensor([16, 32], dtype=torch.int32)
    made = {**_gemm(), "b": _ones(2, 64, 48), "offs": offs}
    return {name: value for name, value in made.items() if name not in ("c", "beta", "bias_axis")}


def _scaled_grouped() -> dict[str, Any]:
    fp8 = {"a": _ones(32, 256, dtype=E4M3), "b": _ones(2, 48, 256, dtype=E4M3).mT}
    scales = {"scale_a": torch.ones(32), "scale_b": torch.ones(2, 48), "scale_result": torch.ones(())}
    written = {"amax": torch.ones(1), "out": _ones(32, 48, dtype=E4M3), "out_dtype": E4M3}
    return {**_grouped(), **fp8, **scales, **written, "use_fast_accum": True}


def _parts_of_sparse(dtype: torch.dtype) -> dict[str, Any]:
    index = torch.arange(3, dtype=torch.int32)
    values = _ones(2, 32, 32, dtype=dtype)
    return {"crow_indices": index, "col_indices": index[:2].clone(), "values": values, "shape": (64, 64)}


def _sparse(dtype: torch.dtype = BF16) -> kernels_dsl.BsrTensor:
    return kernels_dsl.BsrTensor(**_parts_of_sparse(dtype))


def _bsr() -> dict[str, Any]:
    made = {"a": _sparse(), "b": _ones(64, 48), "c": _ones(64, 48), "residual": _ones(64, 48)}
    return {**_gemm(), **made, "out": _ones(64, 48), "check": False}


def _bsr_scaled() -> dict[str, Any]:
    fp8 = {"a": _sparse(E4M3), "b": _ones(48, 64, dtype=E4M3).mT}
    return {**_bsr(), **fp8, "scale_a": torch.ones(2), "scale_b": torch.ones(1, 48)}


def _bsr_of_parts(**arguments: Any) -> Any:
    """A product with the matrix that has these parts."""
    return kernels_dsl.bsr_gemm(kernels_dsl.BsrTensor(**arguments), _ones(64, 48))


def _attention() -> dict[str, Any]:
    q, k = _ones(1, 128, 2, 64), _ones(1, 128, 1, 64)
    return {
        "q": q, "k": k, "v": k.clone(), "mask": torch.ones(128, 128), "sinks": torch.ones(2),
        "blocks": _lists(), "mask_mod": _allowed, "aux": (torch.ones(128),), "out": q.clone(),
    }  # fmt: skip


def _lists() -> kernels_dsl.BlockLists:
    return causal_blocks(128, 128, block=(128, 128), device="cpu")


def _allowed(b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
    return aux[j] > 0.0


def _packed(made: dict[str, Any]) -> dict[str, Any]:
    packed = {name: made[name][0] for name in ("q", "k", "v", "out")}
    starts = torch.tensor([0, 128], dtype=torch.int32)
    sequences = {"cu_seqlens_q": starts, "cu_seqlens_k": starts.clone(), "max_seqlen_q": 128}
    used = torch.tensor([100], dtype=torch.int32)
    return {**made, **packed, **sequences, "seqused_k": used}


def _in_pages() -> dict[str, Any]:
    used, table = torch.tensor([100], dtype=torch.int32), torch.arange(4, dtype=torch.int32)[None]
    starts, cache = torch.tensor([0, 128], dtype=torch.int32), _ones(4, 32, 1, 64)
    return {
        "q": _ones(128, 2, 64), "k": cache, "v": cache.clone(), "cu_seqlens_q": starts, "max_seqlen_q": 128,
        "seqused_k": used, "block_table": table,
    }  # fmt: skip


def _attention_fp8() -> dict[str, Any]:
    q, k = _ones(1, 128, 2, 64, dtype=E4M3), _ones(1, 128, 1, 64, dtype=E4M3)
    scales = {f"{name}_descale": torch.ones(1, 2 if name == "q" else 1) for name in "qkv"}
    return {
        "q": q, "k": k, "v": k.clone(), **scales, "sinks": torch.ones(2), "blocks": _lists(),
        "out": _ones(1, 128, 2, 64),
    }  # fmt: skip


def _append_kv() -> dict[str, Any]:
    new, cache = _ones(2, 3, 2, 16), _ones(4, 8, 2, 16, dtype=E4M3)
    scales = {name: torch.ones(2) for name in _KV_SCALES}
    slots = torch.arange(6).view(2, 3)
    return {
        "k": new,
        "v": new.clone(),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "slot_mapping": slots,
        **scales,
    }


def _lengths() -> dict[str, Any]:
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    return {"cache_seqlens": torch.tensor([0, 7], dtype=torch.int32), "block_table": table}


_KV_SCALES, _CACHES = ("k_scale", "v_scale"), ("k_cache", "v_cache")
_LISTS = ("blocks.counts", "blocks.indices", "blocks.full_counts", "blocks.full_indices")
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_QKV = ("q", "k", "v")
_DESCALES = ("q_descale", "k_descale", "v_descale")
_SCALES = ("scale_a", "scale_b")


def _attention_decode() -> dict[str, Any]:
    cache = {name: _ones(6, 16, 2, 64, dtype=E4M3) for name in _CACHES}
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    scales = {name: torch.ones(2) for name in _KV_SCALES}
    return {
        "q": _ones(2, 1, 4, 64), **cache, **scales, "seqused_k": lengths, "block_table": table,
        "sinks": torch.ones(4), "out": _ones(2, 1, 4, 64),
    }  # fmt: skip


def _attention_decode_packed() -> dict[str, Any]:
    arguments = _attention_decode()
    del arguments["sinks"]
    ends = torch.tensor([0, 1, 4], dtype=torch.int32)
    packed = {"q": _ones(4, 4, 64), "cu_seqlens_q": ends, "max_seqlen_q": 3, "out": _ones(4, 4, 64)}
    return {**arguments, **packed}


OPERATIONS: Sequence[Operation] = (
    Operation("gemm", _gemm, ("a", "b", *_LINEAR), ("out",)),
    Operation("gemm", lambda: _own_epilogue(_gemm()), ("a", "b", "epilogue_args[0]")),
    Operation("gemm_gated", _gated, ("a", "b", "c", "bias"), ("out", "preact_out")),
    Operation("gemm_reduce", _reduced, ("a", "b", *_LINEAR), ("out", "reduced_out")),
    Operation(
        "gemm_reduce", lambda: {**_own_epilogue(_gemm()), "reduce": "sum"}, ("a", "b", "epilogue_args[0]")
    ),
    Operation("scaled_gemm", _scaled, ("a", "b", *_SCALES, "scale_result", *_LINEAR), ("amax", "out")),
    Operation("scaled_gemm", lambda: _own_epilogue(_scaled()), ("a", "b", *_SCALES, "epilogue_args[0]")),
    Operation("grouped_gemm", _grouped, ("a", "b", "offs", "bias", "residual"), ("out",)),
    Operation("grouped_gemm", lambda: _own_epilogue(_grouped()), ("a", "offs", "epilogue_args[0]")),
    Operation(
        "scaled_grouped_gemm", _scaled_grouped,
        ("a", "b", *_SCALES, "offs", "scale_result", "bias", "residual"), ("amax", "out"),
    ),
    Operation(
        "scaled_grouped_gemm", lambda: _own_epilogue(_scaled_grouped()), (*_SCALES, "epilogue_args[0]")
    ),
    Operation("bsr_gemm", _bsr, ("b", *_LINEAR), ("out",)),
    Operation("bsr_gemm", lambda: {**_bsr(), "a": _ones(48, 64), "b": _sparse(), **_turned()}, ("a",)),
    Operation("bsr_gemm", lambda: {**_epilogue_of_bsr(_bsr())}, ("epilogue_args[0]",)),
    Operation("bsr_scaled_gemm", _bsr_scaled, ("b", *_SCALES, *_LINEAR), ("out",)),
    Operation(
        "bsr_scaled_gemm",
        lambda: {**_bsr_scaled(), "a": _ones(48, 64, dtype=E4M3), "b": _sparse(E4M3), **_turned(),
                 "scale_a": torch.ones(48, 1), "scale_b": torch.ones(2)},
        ("a",),
    ),
    Operation("bsr_scaled_gemm", lambda: _epilogue_of_bsr(_bsr_scaled()), ("epilogue_args[0]",)),
    Operation(
        "bsr_sddmm", lambda: {"a": _ones(64, 48), "b": _ones(48, 64), "pattern": _sparse()}, ("a", "b")
    ),
    Operation(
        "BsrTensor", lambda: _parts_of_sparse(BF16), ("crow_indices", "col_indices", "values"),
        call=_bsr_of_parts,
    ),
    Operation("quantize", lambda: {"x": _ones(32, 64), "scale": torch.ones(())}, ("x", "scale")),
    Operation(
        "quantize",
        lambda: {"x": _ones(32, 64), "scaling": "row", "out": (_ones(32, 64, dtype=E4M3), torch.ones(32, 1))},
        ("x",), ("out[0]", "out[1]"),
    ),
    Operation("quantize_qkv", lambda: {name: _ones(1, 128, 2, 64) for name in _QKV}, _QKV),
    Operation("append_kv", _append_kv, ("k", "v", "slot_mapping", *_KV_SCALES), _CACHES),
    Operation(
        "append_kv",
        lambda: {**_append_kv(), "slot_mapping": None, **_lengths()},
        ("cache_seqlens", "block_table"), _CACHES,
    ),
    Operation(
        "merge_states", lambda: {"out": _ones(2, 3, 2, 16), "lse": torch.ones(2, 3, 2)}, ("out", "lse")
    ),
    Operation("attention_decode", _attention_decode, tuple(_attention_decode())[:8], ("out",)),
    Operation("attention_decode", _attention_decode_packed, ("q", "cu_seqlens_q"), ("out",)),
    Operation(
        "scaled_linear", lambda: {"x": _ones(32, 64), "weight": _ones(48, 64), "bias": _ones(48)},
        ("x", "weight", "bias"),
    ),
    Operation("attention", _attention, (*_QKV, "mask", "sinks", *_LISTS, "aux[0]"), ("out",)),
    Operation("attention", lambda: {name: _attention()[name] for name in _QKV}, _QKV),
    Operation(
        "attention_varlen", lambda: {**_packed(_attention()), "max_seqlen_k": 128},
        (*_QKV, *_SEQUENCES, "mask", "sinks", *_LISTS, "aux[0]"), ("out",),
    ),
    Operation("attention_varlen", _in_pages, ("k", "v", "block_table")),
    Operation(
        "scaled_dot_product_attention",
        lambda: {**{name: _ones(1, 2, 128, 64) for name in ("query", "key", "value")},
                 "attn_mask": torch.ones(128, 128)},
        ("query", "key", "value", "attn_mask"),
    ),
    Operation("attention_fp8", _attention_fp8, (*_QKV, *_DESCALES, "sinks", *_LISTS), ("out",)),
    Operation(
        "attention_fp8_varlen", lambda: _packed(_attention_fp8()),
        (*_QKV, *_DESCALES, *_SEQUENCES, "sinks", *_LISTS), ("out",),
    ),
)  # fmt: skip
NO_TENSORS = {
    "Sm80AttentionConfig", "Sm90AttentionConfig", "Sm80GemmConfig", "Sm90GemmConfig", "GemmConfig",
    "Schedule", "LinearEpilogue", "checked", "sm_margin", "kernel_function", "register_epilogue",
    "register_torch_attention", "register_transformers_attention",
    "register_transformers_paged_attention",
}  # fmt: skip
"""Public names that no tensor is given to."""
_SUPPORTS = (
    "supports", "gemm_gated_supports", "gemm_reduce_supports", "scaled_gemm_supports",
    "grouped_gemm_supports", "scaled_grouped_gemm_supports",
    "bsr_supports", "bsr_scaled_supports", "quantize_supports", "attention_supports",
    "attention_fp8_supports", "attention_decode_supports",
)  # fmt: skip
ELSEWHERE = {
    "BlockLists": "a record of tensors, which attention is given",
    "autotune_gemm": "calls gemm, on a GPU",
    "advise": "makes its own operands",
    "BsrLinear": "calls bsr_gemm",
    "ScaledLinear": "calls scaled_linear",
    **dict.fromkeys(_SUPPORTS, "asks what a call would be refused for"),
}


def _turned() -> dict[str, Any]:
    """For a dense factor on the left."""
    return {"bias": _ones(64), "c": _ones(48, 64), "residual": _ones(48, 64), "out": _ones(48, 64)}


def _epilogue_of_bsr(arguments: dict[str, Any]) -> dict[str, Any]:
    kept = {name: arguments[name] for name in ("a", "b", "scale_a", "scale_b") if name in arguments}
    return {**kept, "epilogue": _twice, "epilogue_args": (_ones(64, 48),)}
