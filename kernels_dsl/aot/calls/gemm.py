"""Common calls of the dense and grouped products."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from kernels_dsl.aot.calls.call import BF16, DTYPES, FP32, Arguments, Call, Source
from kernels_dsl.ops.gemm.gated import gemm_gated
from kernels_dsl.ops.gemm.gemm import gemm
from kernels_dsl.ops.gemm.grouped import grouped_gemm
from kernels_dsl.ops.gemm.reduced import gemm_reduce

Size = tuple[int, int, int]
"""Rows, outputs and inputs of a layer: M, N, K."""
ROWS = (1, 5, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LAYERS = (
    (4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192),
    (2048, 2048), (5120, 5120), (1024, 8192), (10240, 8192), (8192, 28672),
)  # fmt: skip
"""Outputs and inputs of linear layers of models with 1 to 70 billion parameters."""
MORE_LAYERS = (
    (3584, 18944), (18944, 3584), (3584, 3584), (27648, 5120), (5120, 27648), (128256, 4096), (1024, 4096),
    (3072, 3072),
)  # fmt: skip
_PLAIN: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("bf16", "nt"): (*LAYERS, *MORE_LAYERS), ("bf16", "nn"): LAYERS,
    ("fp16", "nt"): LAYERS, ("fp16", "nn"): (),
}  # fmt: skip
"""dtype and layout of a product without an epilogue -> layers: weights as `w.t()` (nt) or row-major."""


def sizes(layers: Iterable[tuple[int, int]], rows: Iterable[int] = ROWS) -> list[Size]:
    """Products of activations of so many tokens with these layers."""
    return [(tokens, *layer) for layer, tokens in itertools.product(layers, rows)]


SQUARES = [(n, n, n) for n in (128, 512, 2048, 4096, 8192)]
SHOWN = [(n, n, n) for n in (128, 4096)]
"""Of calls in the documentation, with an activation alone."""
FEWEST = sizes(((4096, 4096),), (5, 16, 256, 4096))
"""Of calls with a reduction."""
TRAINED = sizes(
    ((4096, 4096), (14336, 4096), (4096, 14336), (2048, 2048), (5120, 5120)), (512, 1024, 2048, 4096, 8192)
)
_GROUPS = 8
_EXPERTS = ((2048, 768), (14336, 4096), (4096, 14336), (2048, 2048), (1536, 4096), (768, 2048))
_GROUPED = [(rows, *layer) for layer in _EXPERTS for rows in (64, 512, 4096, 32768)]
EPILOGUES: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "bias gelu": {"bias": True, "activation": "gelu"},
    "silu": {"activation": "silu"},
    "residual": {"residual": True},
}
_REDUCTIONS = (("sum", -1), ("sum_squares", -1), ("max", -1), ("abs_max", -1), ("sum", -2))


def text(size: Iterable[int]) -> str:
    """ "64x4096x4096"."""
    return "x".join(map(str, size))


def product(
    source: Source,
    size: Size,
    dtype: torch.dtype,
    layout: str = "nt",
    lead: tuple[int, ...] = (),
    **more: Any,
) -> Arguments:
    """a and b of a product, batched where `lead` is (batch,). `more`: further arguments; True for a bias or a
    residual makes it."""
    rows, outputs, inputs = size
    b = source.values(*lead, *((outputs, inputs) if layout == "nt" else (inputs, outputs)), dtype=dtype)
    shapes = {"bias": (outputs,), "residual": (*lead, rows, outputs)}
    for name in shapes.keys() & more.keys():
        more[name] = source.values(*shapes[name], dtype=dtype)
    return {"a": source.values(*lead, rows, inputs, dtype=dtype), "b": b.mT if layout == "nt" else b, **more}


def products() -> Iterator[Call]:
    """Layers with and without what their epilogues may have, other products, batches, gradients."""
    for (name, layout), layers in _PLAIN.items():
        for size in dict.fromkeys([*sizes(layers), *SQUARES]):
            make = partial(product, size=size, dtype=DTYPES[name], layout=layout)
            yield Call("gemm", gemm, f"{name} {layout} {text(size)}", make)
    for layout, size in itertools.product(("nt", "nn"), SQUARES[1:4]):
        make = partial(product, size=size, dtype=FP32, layout=layout)
        yield Call("gemm", gemm, f"fp32 {layout} {text(size)}", make)
    for (name, dtype), layout, size in itertools.product(DTYPES.items(), ("nt", "nn"), SQUARES[:3]):
        make = partial(product, size=size, dtype=dtype, layout=layout, lead=(16,))
        yield Call("gemm", gemm, f"{name} {layout} 16x{text(size)}", make)
    for words, more in EPILOGUES.items():
        for size in sizes(LAYERS) if words == "bias" else sizes(LAYERS, ROWS[::2]):
            make = partial(product, size=size, dtype=BF16, **more)
            yield Call("gemm", gemm, f"bf16 nt {words} {text(size)}", make)
    for size in SHOWN:
        make = partial(product, size=size, dtype=BF16, activation="gelu")
        yield Call("gemm", gemm, f"bf16 nt gelu {text(size)}", make)
    for (name, dtype), size in itertools.product(DTYPES.items(), TRAINED):
        make = partial(product, size=size, dtype=dtype)
        yield Call("gemm", gemm, f"{name} nt {text(size)}", make, ("a", "b"))
        if size[0] == TRAINED[0][0]:
            biased = partial(make, bias=True)
            yield Call("gemm", gemm, f"{name} nt bias {text(size)}", biased, ("a", "b", "bias"))


def fused_products() -> Iterator[Call]:
    """Gated ones, of weights with alternating columns, and those that reduce rows or columns."""
    for (name, dtype), size in itertools.product(DTYPES.items(), sizes(LAYERS[:8], ROWS[::2])):
        yield Call(
            "gemm_gated", gemm_gated, f"{name} nt {text(size)}", partial(product, size=size, dtype=dtype)
        )
    for (name, dtype), size in itertools.product(DTYPES.items(), TRAINED):
        make = partial(product, size=size, dtype=dtype)
        yield Call("gemm_gated", gemm_gated, f"{name} nt {text(size)}", make, ("a", "b"))
    for (reduce, dim), size in itertools.product(_REDUCTIONS, FEWEST):
        make = partial(product, size=size, dtype=BF16, reduce=reduce, dim=dim)
        yield Call("gemm_reduce", gemm_reduce, f"bf16 nt {reduce} {dim} {text(size)}", make)
    make = partial(product, size=TRAINED[0], dtype=BF16, reduce="sum_squares")
    yield Call("gemm_reduce", gemm_reduce, f"bf16 nt sum_squares {text(TRAINED[0])}", make, ("a", "b"))


def group_ends(source: Source, rows: int) -> torch.Tensor:
    """Ends of groups of equal size, for all rows."""
    return source.integers(rows * (n + 1) // _GROUPS for n in range(_GROUPS))


def _grouped(source: Source, size: Size, dtype: torch.dtype, layout: str) -> Arguments:
    made = product(source, size, dtype, layout, (_GROUPS,))
    return {**made, "a": source.values(size[0], size[2], dtype=dtype), "offs": group_ends(source, size[0])}


def grouped_products() -> Iterator[Call]:
    """Products of experts. Of any number: their kernels do not depend on it."""
    for (name, dtype), layout, size in itertools.product(DTYPES.items(), ("nt", "nn"), _GROUPED):
        make = partial(_grouped, size=size, dtype=dtype, layout=layout)
        yield Call("grouped_gemm", grouped_gemm, f"{name} {layout} {_GROUPS} of {text(size)}", make)
