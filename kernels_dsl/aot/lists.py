"""The kernels that make block lists, for compiling ahead of time, see `aot`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels_dsl.aot.recorded import Kernel, kernel_of
from kernels_dsl.config.lists import DocumentSpec, WindowSpec, topk_spec
from kernels_dsl.sparse import attention_lists as lists
from lowering import recording

_BLOCK = (128, 128)
_ROWS, _ENTRIES = 64, 32  # only alignment counts
_COLUMNS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def iter_lists(arch: str) -> Iterator[Kernel]:
    """Those for blocks of 128 × 128, float32 scores, sequences of up to 524288."""
    names = []
    with recording.record(arch) as calls:
        for left in (True, False):
            names.append("window" if left else "causal")
            spec = WindowSpec(_BLOCK, left, True)
            lists.window_lists(spec, _ROWS, (_ENTRIES, _ENTRIES), (1, 1, 0, 0, 0), torch.device("cpu"))
        for dtype in (torch.int32, torch.int64):
            names.append(f"documents {str(dtype).removeprefix('torch.')}")
            documents = torch.empty(2, 512, dtype=dtype)
            lists.document_lists(DocumentSpec(_BLOCK, True), documents, _ROWS, _ENTRIES)
        for columns in _COLUMNS:
            for causal in (False, True):
                names.append(f"top-k of {columns}" + " causal" * causal)
                spec_of_topk = topk_spec(columns, causal, _BLOCK)
                assert spec_of_topk is not None
                lists.topk_lists(spec_of_topk, torch.empty(2, 2, _ROWS, columns), _ENTRIES, 1, 0)
    for name, call in zip(names, calls, strict=True):
        yield kernel_of(f"lists {name}", call)
