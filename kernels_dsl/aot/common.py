"""The few kernels that most programs need: those that calls of language models make, in bf16 and fp16.

The calls are recorded, as for the whole list, with the configurations that the tables choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels_dsl.aot.recorded import Kernel, kernel_of, recorded
from kernels_dsl.ops.attention.arguments import AttentionArguments, AttentionOptions
from kernels_dsl.ops.attention.operation import ATTENTION
from kernels_dsl.ops.gemm.gemm import gemm

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ROWS = (1, 16, 64, 256, 1024, 4096, 16384)
_LAYERS = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
"""Outputs and inputs of linear layers of models with 8 and 70 billion parameters."""
_LENGTHS = ((1, 512), (1, 4096), (1, 32768), (16, 1024))
"""Batch and length."""
_HEADS, _KV_HEADS = 32, 8

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


_MAKERS = {"gemm": _products, "attention": _attentions}
OPS = tuple(_MAKERS)


def common_kernels(arch: str, ops: Sequence[str]) -> Iterator[Kernel]:
    """Those kernels of `ops`, each once, named by its function and the first call that needs it."""
    seen: set[str] = set()
    for op in ops:
        for words, call in _MAKERS[op]() if op in _MAKERS else ():
            for made in recorded(arch, call):
                key = made.function.key(*made.args, arch=arch, **made.constants)
                if key not in seen:
                    seen.add(key)
                    yield kernel_of(f"{made.function.name} {words}", made)
