"""The kernels that make block lists, for compiling ahead of time, see `aot`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kernels_dsl.config.lists import DocumentSpec, WindowSpec, topk_spec
from kernels_dsl.ops.attention.lists import FUNCTIONS

Kernel = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
_BLOCK = (128, 128)
_ROWS, _ENTRIES = 64, 32  # only alignment counts
_COLUMNS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def iter_lists() -> Iterator[Kernel]:
    """(name, jit function, arguments on the meta device, configuration): blocks of 128 × 128, float32 scores,
    sequences of up to 524288."""
    pair = _meta(_ROWS), _meta(_ROWS, _ENTRIES)
    for left in (True, False):
        name = "window" if left else "causal"
        spec: Any = WindowSpec(_BLOCK, left, True)
        yield f"lists {name}", FUNCTIONS["window"], (*pair, *pair, 1, 1, 0, 0, 0), {"spec": spec}
    pair = _meta(2, _ROWS), _meta(2, _ROWS, _ENTRIES)
    for dtype in (torch.int32, torch.int64):
        spec = DocumentSpec(_BLOCK, True)
        name = f"lists documents {str(dtype).removeprefix('torch.')}"
        yield name, FUNCTIONS["documents"], (_meta(2, 512, dtype=dtype), *pair), {"spec": spec}
    pair = _meta(2, 2, _ROWS), _meta(2, 2, _ROWS, _ENTRIES)
    for columns in _COLUMNS:
        for causal in (False, True):
            spec = topk_spec(columns, causal, _BLOCK)
            scores = _meta(2, 2, _ROWS, columns, dtype=torch.float32)
            name = f"lists top-k of {columns}{' causal' * causal}"
            yield name, FUNCTIONS["topk"], (scores, *pair, 1, 0), {"spec": spec}
