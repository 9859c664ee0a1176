"""torch.sparse_bsr tensors as this library's matrices, which keep plans of calls."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kernels_dsl.sparse.pattern import version as pattern_version
from kernels_dsl.sparse.tensor import BsrTensor

_FROM_TORCH = WeakIdKeyDictionary()
_NOT_THERE = None, None

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled


def from_torch(matrix: torch.Tensor) -> BsrTensor:
    """The `BsrTensor` of a torch.sparse_bsr tensor, kept until that changes or dies unless gradients flow."""
    if _is_compiling() or (matrix.requires_grad and _grad_enabled()):
        return BsrTensor.from_torch(matrix)
    found, version = _FROM_TORCH.get(matrix, _NOT_THERE)
    now = pattern_version(matrix)  # copy_ and resize_as_sparse_ change indices in place
    if found is None or version != now:
        found = BsrTensor.from_torch(matrix.detach())
        _FROM_TORCH[matrix] = found, now
    return found
