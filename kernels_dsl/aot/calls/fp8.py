"""Common calls of fp8: quantisation, products with scales, layers, attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels_dsl.aot.calls.attention import HEADS, packed, qkv
from kernels_dsl.aot.calls.call import BF16, Arguments, Call, Source
from kernels_dsl.aot.calls.gemm import LAYERS, ROWS, Size, group_ends, sizes, text
from kernels_dsl.nn.scaled_linear import RECIPES, scaled_linear
from kernels_dsl.ops.attention.attention_fp8 import attention_fp8, attention_fp8_varlen
from kernels_dsl.ops.attention.fp8_inputs import quantize_qkv
from kernels_dsl.ops.gemm.grouped import scaled_grouped_gemm
from kernels_dsl.ops.quantize.quantize import quantize
from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm

CUBES = [(n, n, n) for n in (512, 1024, 2048, 4096, 8192)]
"""Of products that add in float32, as `scaled_gemm` does unless told otherwise."""
_TRAINED = ((2048, 4096, 4096), (4096, 14336, 4096))
_EXPERTS = [(rows, *layer) for layer in ((2048, 768), (14336, 4096)) for rows in (64, 512, 4096, 32768)]
_TRANSPOSES: tuple[tuple[bool | str, str], ...] = (False, ""), (True, " transposed"), ("both", " both")
_GROUPS = 8
_WIDTHS = (768, 1024, 2048, 3072, 5120, 8192, 11008, 18944, 28672)


def _values(source: Source, rows: int, columns: int, **more: Any) -> Arguments:
    return {"x": source.values(rows, columns), **more}


def _of_width(source: Source, lead: tuple[int, ...], columns: int, scaling: str) -> Arguments:
    return {"x": source.values(*lead, columns), "scaling": scaling, "transpose": False}


def quantisations() -> Iterator[Call]:
    """`quantize` with each kind of scale, of few and many rows, also transposed."""
    kinds = ("tensor", "row", "1x128", "128x128")
    for scaling, columns in itertools.product(kinds, _WIDTHS):
        for lead in ((16,), (300,), (4096,), (_GROUPS, 2048)):
            make = partial(_of_width, lead=lead, columns=columns, scaling=scaling)
            yield Call("quantize", quantize, f"{scaling} {text((*lead, columns))}", make, fp8=True)
    for scaling, (transpose, words), rows in itertools.product(kinds, _TRANSPOSES, (16, 64, 4096)):
        make = partial(_values, rows=rows, columns=4096, scaling=scaling, transpose=transpose)
        yield Call("quantize", quantize, f"{scaling}{words} {rows}x4096", make, fp8=True)
    for dim, scaling in itertools.product((64, 128), ("head", "block")):
        make = partial(qkv, batch=1, length=4096, dim=dim, scaling=scaling)
        yield Call("quantize_qkv", quantize_qkv, f"d{dim} {scaling}", make, fp8=True)


def _scaled(source: Source, size: Size, recipe: str, accurate: bool = False) -> Arguments:
    """Activations and weight as `scaled_linear` makes them."""
    rows, outputs, inputs = size
    of_x, of_weight = RECIPES[recipe]
    a, scale_a = quantize(source.values(rows, inputs), scaling=of_x)
    b, scale_b = quantize(source.values(outputs, inputs), scaling=of_weight)
    scale_b = scale_b.mT if scale_b.dim() == 2 else scale_b
    fast = recipe != "block" and not accurate
    return {"a": a, "b": b.mT, "scale_a": scale_a, "scale_b": scale_b, "use_fast_accum": fast}


def _grouped(source: Source, size: Size, recipe: str) -> Arguments:
    rows, outputs, inputs = size
    of_x, of_weight = RECIPES[recipe]
    a, scale_a = quantize(source.values(rows, inputs), scaling=of_x)
    b, scale_b = quantize(source.values(_GROUPS, outputs, inputs), scaling=of_weight)
    scales = {"scale_a": scale_a, "scale_b": scale_b.mT}
    return {
        "a": a,
        "b": b.mT,
        **scales,
        "offs": group_ends(source, rows),
        "use_fast_accum": recipe != "block",
    }


def _layer(source: Source, size: Size, dtype: torch.dtype, bias: bool, recipe: str) -> Arguments:
    rows, outputs, inputs = size
    made = {
        "x": source.values(rows, inputs, dtype=dtype),
        "weight": source.values(outputs, inputs, dtype=dtype),
    }
    return {**made, "bias": source.values(outputs, dtype=dtype) if bias else None, "recipe": recipe}


def products() -> Iterator[Call]:
    """`scaled_gemm` of layers, `scaled_grouped_gemm` of experts, `scaled_linear` with gradients."""
    odd = [("block", size) for size in sizes(LAYERS[:4], (2, 5, 777))]  # of another alignment of scales
    for recipe, size in [*itertools.product(RECIPES, sizes(LAYERS, ROWS[::2])), *odd]:
        yield Call(
            "scaled_gemm",
            scaled_gemm,
            f"{recipe} {text(size)}",
            partial(_scaled, size=size, recipe=recipe),
            fp8=True,
        )
    for recipe, size in itertools.product(("tensor", "row"), CUBES):
        make = partial(_scaled, size=size, recipe=recipe, accurate=True)
        yield Call("scaled_gemm", scaled_gemm, f"{recipe} accurate {text(size)}", make, fp8=True)
    for recipe, size in itertools.product(("row", "block"), _EXPERTS):
        make = partial(_grouped, size=size, recipe=recipe)
        yield Call(
            "scaled_grouped_gemm", scaled_grouped_gemm, f"{recipe} {_GROUPS} of {text(size)}", make, fp8=True
        )
    for recipe, bias, size in itertools.product(RECIPES, (False, True), _TRAINED):
        make = partial(_layer, size=size, dtype=BF16, bias=bias, recipe=recipe)
        wanted = ("x", "weight", "bias") if bias else ("x", "weight")
        words = f"bf16 {recipe}" + " bias" * bias + f" {text(size)}"
        yield Call("scaled_linear", scaled_linear, words, make, wanted, fp8=True)
        yield Call("scaled_linear", scaled_linear, words, make, fp8=True)


def _attention(source: Source, batch: int, length: int, dim: int, scaling: str, **more: Any) -> Arguments:
    return {**quantize_qkv(**qkv(source, batch, length, dim), scaling=scaling), **more}


def _packed(source: Source, lengths: tuple[int, ...], dim: int, **more: Any) -> Arguments:
    """Values without scales."""
    made = packed(source, lengths, dim, torch.float8_e4m3fn, HEADS, **more)
    del made["max_seqlen_k"]
    return made


def attentions() -> Iterator[Call]:
    """`attention_fp8` and `attention_fp8_varlen`."""
    sizes_of_all = ((1, 100), (1, 512), (4, 512), (1, 2048), (1, 4096), (1, 16384), (16, 1024))
    for dim, causal, (batch, length) in itertools.product((64, 128, 256), (False, True), sizes_of_all):
        make = partial(_attention, batch=batch, length=length, dim=dim, scaling="head", causal=causal)
        words = f"d{dim}" + " causal" * causal + f" {batch}x{length}"
        yield Call("attention_fp8", attention_fp8, words, make, fp8=True)
    for dim, causal in itertools.product((64, 128), (False, True)):
        make = partial(_attention, batch=1, length=4096, dim=dim, scaling="block", causal=causal)
        yield Call("attention_fp8", attention_fp8, f"d{dim} block" + " causal" * causal, make, fp8=True)
    for dim, causal, lengths in itertools.product((64, 128), (False, True), ((100, 412), (1000, 24, 3072))):
        make = partial(_packed, lengths=lengths, dim=dim, causal=causal)
        words = f"d{dim}" + " causal" * causal + f" {lengths}"
        yield Call("attention_fp8_varlen", attention_fp8_varlen, words, make, fp8=True)
