"""Common calls of block-sparse products and layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels_dsl.aot.calls.call import BF16, DTYPES, Arguments, Call, Source
from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.ops.bsr.scaled import bsr_scaled_gemm
from kernels_dsl.ops.quantize.quantize import quantize
from kernels_dsl.sparse.pattern import pattern_of
from kernels_dsl.sparse.tensor import BsrTensor

_BLOCKS = (16, 32, 64, 128)
_DENSITY = 0.25
_SIZES = ((16, 2048, 2048), (512, 2048, 2048), (4096, 4096, 2048))
"""Tokens, outputs and inputs of layers."""
_SMALL = (16, (512, 512, 512))
"""Block and size of one in which few blocks share a row of the dense matrix."""
_TOKENS = (16, 512, 4096)
_WIDTH = 2048


def mask(rows: int, columns: int) -> torch.Tensor:
    """Kept blocks, the same in each process; at least one in each row."""
    generator = torch.Generator().manual_seed(rows * 65537 + columns)
    kept = torch.rand(rows, columns, generator=generator) < _DENSITY
    kept[:, 0] = True
    return kept


def matrix(source: Source, rows: int, columns: int, block: int, dtype: torch.dtype = BF16) -> BsrTensor:
    """A matrix as of `BsrTensor.from_dense`, which knows its longest lists."""
    kept = mask(rows // block, columns // block)
    first = source.integers([0, *kept.sum(1).cumsum(0).tolist()])
    across = source.integers(kept.nonzero()[:, 1].tolist())
    values = source.values(len(across), block, block, dtype=dtype)
    found = BsrTensor(first, across, values, (rows, columns))
    longest = int(kept.sum(1).max()), int(kept.sum(0).max())
    pattern_of(first, across, *kept.shape).longest = longest
    return found


def _loaded(found: BsrTensor) -> BsrTensor:
    """The same of new index tensors: nothing is known of them."""
    return BsrTensor(found.crow_indices.clone(), found.col_indices.clone(), found.values, found.shape)


def _weight_right(
    source: Source,
    size: tuple[int, int, int],
    block: int,
    dtype: torch.dtype,
    known: bool = True,
    **more: Any,
) -> Arguments:
    tokens, outputs, inputs = size
    weight = matrix(source, outputs, inputs, block, dtype)
    if more.get("bias") is True:
        more["bias"] = source.values(outputs, dtype=dtype)
    return {
        "a": source.values(tokens, inputs, dtype=dtype),
        "b": (weight if known else _loaded(weight)).t(),
        **more,
    }


def _weight_left(
    source: Source, size: tuple[int, int, int], block: int, dtype: torch.dtype, turned: bool = False
) -> Arguments:
    tokens, outputs, inputs = size
    weight = matrix(source, outputs, inputs, block, dtype)
    rows = outputs if turned else inputs
    return {"a": weight.t() if turned else weight, "b": source.values(rows, tokens, dtype=dtype)}


def _weight_plain(source: Source, size: tuple[int, int, int], block: int, dtype: torch.dtype) -> Arguments:
    """A weight that is stored as (inputs, outputs)."""
    tokens, outputs, inputs = size
    weight = matrix(source, inputs, outputs, block, dtype)
    return {"a": source.values(tokens, inputs, dtype=dtype), "b": weight}


def products() -> Iterator[Call]:
    """`bsr_gemm` with the matrix on either side, with gradients, with an epilogue; `bsr_sddmm`."""
    for (name, dtype), (block, size) in itertools.product(
        DTYPES.items(), [*itertools.product(_BLOCKS, _SIZES), _SMALL]
    ):
        words = f"{name} {block}x{block} {'x'.join(map(str, size))}"
        right = partial(_weight_right, size=size, block=block, dtype=dtype)
        yield Call("bsr_gemm", bsr_gemm, f"x @ w.t() {words}", right)
        yield Call("bsr_gemm", bsr_gemm, f"x @ w.t() {words}", right, ("a", "b"))
        yield Call("bsr_gemm", bsr_gemm, f"x @ w.t() unknown {words}", partial(right, known=False))
        left = partial(_weight_left, size=size, block=block, dtype=dtype)
        yield Call("bsr_gemm", bsr_gemm, f"w @ x {words}", left)
        yield Call("bsr_gemm", bsr_gemm, f"w @ x {words}", left, ("a", "b"))
        yield Call("bsr_gemm", bsr_gemm, f"w.t() @ x {words}", partial(left, turned=True))
        yield Call(
            "bsr_gemm",
            bsr_gemm,
            f"x @ w {words}",
            partial(_weight_plain, size=size, block=block, dtype=dtype),
        )
        yield Call("bsr_sddmm", bsr_sddmm, words, partial(_sampled, size=size, block=block, dtype=dtype))
    for block, activation in itertools.product(_BLOCKS, (None, "gelu")):
        make = partial(
            _weight_right, size=_SIZES[2], block=block, dtype=BF16, bias=True, activation=activation
        )
        yield Call("bsr_gemm", bsr_gemm, f"x @ w.t() bf16 {block}x{block} bias {activation or ''}", make)


def _sampled(source: Source, size: tuple[int, int, int], block: int, dtype: torch.dtype) -> Arguments:
    tokens, outputs, inputs = size
    made = {
        "a": source.values(outputs, tokens, dtype=dtype),
        "b": source.values(inputs, tokens, dtype=dtype).t(),
    }
    return {**made, "pattern": matrix(source, outputs, inputs, block, dtype)}


def _layer(x: torch.Tensor, layer: BsrLinear) -> torch.Tensor:
    y: torch.Tensor = layer(x)
    return y


def _of_layer(source: Source, tokens: int, block: int, width: int = _WIDTH) -> Arguments:
    weight = matrix(source, width, width, block)
    return {"x": source.values(tokens, width), "layer": BsrLinear(weight, source.values(width))}


def _scaled(source: Source, block: int, tokens: int, left: bool, width: int = _WIDTH) -> Arguments:
    """fp8 values with a scale a block, dense factors with one scale."""
    found = matrix(source, width, width, block)
    values, scales = quantize(found.values, scaling="matrix")
    sparse = found.with_values(values)
    x, scale = quantize(source.values(tokens, width))
    if left:
        return {"a": x, "b": sparse.t(), "scale_a": scale, "scale_b": scales}
    return {"a": sparse, "b": x.t(), "scale_a": scales, "scale_b": scale}


def layers() -> Iterator[Call]:
    """`BsrLinear`, and the products of fp8 ones."""
    for block, tokens in itertools.product(_BLOCKS, _TOKENS):
        make = partial(_of_layer, tokens=tokens, block=block)
        yield Call("BsrLinear", _layer, f"bf16 {block}x{block} {tokens}", make)
        yield Call("BsrLinear", _layer, f"bf16 {block}x{block} {tokens}", make, ("x", "layer"))
    for block, left, tokens in itertools.product((32, 64, 128), (True, False), _TOKENS):
        make = partial(_scaled, block=block, tokens=tokens, left=left)
        words = f"{'x @ w.t()' if left else 'w @ x'} {block}x{block} {tokens}"
        yield Call("bsr_scaled_gemm", bsr_scaled_gemm, words, make, fp8=True)
