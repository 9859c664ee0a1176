"""The few kernels that most programs need: those that calls of language models make, in bf16 and fp16.

Linear layers, attention of prompts and of decoding, the writes into its cache, fp8 layers, and layers with
block-sparse weights. The calls are recorded, as for the whole list, with the configurations that the tables
choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels_dsl.aot.bsr import BsrKind, bsr_kernel, list_kernels
from kernels_dsl.aot.recorded import Kernel, kernel_of, recorded
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.attention.arguments import AttentionArguments, AttentionOptions
from kernels_dsl.ops.attention.operation import ATTENTION
from kernels_dsl.ops.gemm.gemm import gemm
from kernels_dsl.ops.quantize.quantize import quantize
from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm
from kernels_dsl.ops.serving.append_kv import append_kv
from kernels_dsl.ops.serving.decode import attention_decode

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ROWS = (1, 16, 64, 256, 1024, 4096, 16384)
_LAYERS = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
"""Outputs and inputs of linear layers of models with 8 and 70 billion parameters."""
_LENGTHS = ((1, 512), (1, 4096), (1, 32768), (16, 1024))
"""Batch and length."""
_HEADS, _KV_HEADS = 32, 8
_SEQUENCES = ((1, 4096), (1, 32768), (16, 4096), (64, 2048))
"""Sequences that are decoded, and the keys of each."""
_PAGE = 16
_SCALINGS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("1x128", "128x128")}
"""Recipe of fp8 layers -> scales of activations and of weights."""
_SPARSE_BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128))

_Call = tuple[str, Callable[[], object]]


def _products() -> Iterator[_Call]:
    for dtype, (outputs, inputs), rows in itertools.product(_DTYPES, _LAYERS, _ROWS):
        x, weight = (torch.empty(n, inputs, dtype=_DTYPES[dtype]) for n in (rows, outputs))
        yield f"{dtype} nt {rows}x{outputs}x{inputs}", partial(gemm, x, weight.t())


def _attentions() -> Iterator[_Call]:
    choices = itertools.product(_DTYPES, (64, 128), (False, True), (False, True), _LENGTHS)
    for dtype, dim, causal, lse, (batch, length) in choices:
        q, k = (torch.empty(batch, length, heads, dim, dtype=_DTYPES[dtype]) for heads in (_HEADS, _KV_HEADS))
        call = AttentionArguments(q, k, k, AttentionOptions(causal=causal), return_lse=lse)
        words = f"{dtype} d{dim}" + " causal" * causal + " lse" * lse
        yield f"{words} {batch}x{length}", partial(ATTENTION.run, call)


def _decodes() -> Iterator[_Call]:
    """Decoding from dense caches and pages of 16 keys, and the write of a step's keys into the pages."""
    for dtype, dim, paged in itertools.product(_DTYPES, (64, 128), (False, True)):
        kind = _DTYPES[dtype]
        for batch, keys in _SEQUENCES:
            q = torch.empty(batch, 1, _HEADS, dim, dtype=kind)
            pages = keys // _PAGE
            shape = (batch * pages, _PAGE) if paged else (batch, keys)
            cache = torch.empty(*shape, _KV_HEADS, dim, dtype=kind)
            table = torch.zeros(batch, pages, dtype=torch.int32) if paged else None
            used = torch.zeros(batch, dtype=torch.int32)
            call = partial(attention_decode, q, cache, cache, seqused_k=used, block_table=table)
            yield f"{dtype} d{dim}" + " paged" * paged + f" {batch}x{keys}", call
        if paged:
            new = torch.empty(64, _KV_HEADS, dim, dtype=kind)
            k_cache, v_cache = (torch.empty(64, _PAGE, _KV_HEADS, dim, dtype=kind) for _ in range(2))
            slots = torch.zeros(64, dtype=torch.int64)
            yield f"{dtype} d{dim} paged", partial(append_kv, new, new.clone(), k_cache, v_cache, slots)


def _scaled_layer(recipe: str, outputs: int, inputs: int, rows: int) -> None:
    of_x, of_weight = _SCALINGS[recipe]
    x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16) for n in (rows, outputs))
    (x8, x_scale), (weight8, scale) = quantize(x, scaling=of_x), quantize(weight, scaling=of_weight)
    scale = scale.mT if scale.dim() == 2 else scale
    scaled_gemm(x8, weight8.mT, x_scale, scale, use_fast_accum=recipe != "block")


def _scaled_layers() -> Iterator[_Call]:
    for recipe, (outputs, inputs), rows in itertools.product(_SCALINGS, _LAYERS, _ROWS):
        words = f"{recipe} {rows}x{outputs}x{inputs}"
        yield words, partial(_scaled_layer, recipe, outputs, inputs, rows)


_MAKERS: dict[str, Sequence[Callable[[], Iterator[_Call]]]] = {
    "gemm": (_products,),
    "attention": (_attentions, _decodes),
    "fp8": (_scaled_layers,),
}
OPS = (*_MAKERS, "bsr")


def _sparse_layers(arch: str) -> Iterator[Kernel]:
    """Products with block-sparse weights on either side, of activations in rows, and of their lists."""
    for dtype, block, dense_left in itertools.product(_DTYPES, _SPARSE_BLOCKS, (False, True)):
        yield bsr_kernel(BsrKind(block, dtype, dense_left=dense_left), arch)
    yield from list_kernels(arch)


def common_kernels(arch: str, ops: Sequence[str]) -> Iterator[Kernel]:
    """Those kernels of `ops`, each once, named by its function and the first call that needs it."""
    seen: set[str] = set()
    for op in ops:
        if op == "fp8" and not DEVICES_BY_ARCH[arch].has_fp8:
            continue
        for maker in _MAKERS.get(op, ()):
            for words, call in maker():
                for made in recorded(arch, call):
                    key = made.function.key(*made.args, arch=arch, **made.constants)
                    if key not in seen:
                        seen.add(key)
                        yield kernel_of(f"{made.function.name} {words}", made)
    if "bsr" in ops:
        yield from _sparse_layers(arch)
