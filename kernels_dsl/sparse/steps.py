"""Steps from a product's tensors to those that its kernel takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels_dsl.config.bsr import ALIGN
from kernels_dsl.sparse.tensor import BsrTensor


def one_block(block_k: int, dense_left: bool, contiguous: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """For K = 0: a dense matrix of one block of zeros along K, which no list names."""

    def zeros(dense: torch.Tensor) -> torch.Tensor:
        shape = list(dense.shape)
        shape[-1 if dense_left else -2] = block_k
        if contiguous == "column":
            return dense.new_zeros(*shape[:-2], shape[-1], shape[-2]).mT
        # Rows that end on 16 bytes: the padding is cut off again by the view.
        wide = -(-shape[-1] // 8) * 8
        return dense.new_zeros(*shape[:-1], wide)[..., : shape[-1]]

    return zeros


def values_step(sparse: BsrTensor, turned: bool) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The step that prepares the values for the launch; None for nothing. `turned`: blocks are transposed."""
    values = sparse.values
    if sparse.nnz == 0:
        block = sparse.block[::-1] if turned else sparse.block
        shape = (*values.shape[:-3], 1, *block)
        return lambda x: x.new_zeros(shape)
    if turned:
        return lambda x: x.mT.contiguous()
    if values.is_contiguous() and values.data_ptr() % ALIGN == 0:
        return None
    return lambda x: x.clone(memory_format=torch.contiguous_format)
