"""The relation of a block-sparse product's tensors to what its kernels compute: plain frozen data."""

from __future__ import annotations

from lowering.records import frozen


@frozen
class BsrLayout:
    """Orientation of a call: part of the kernel's key.

    `block`: rows and columns of a block as it is stored.
    The lists go over the blocks of the result: `transposed` False, a list is a block row of the sparse
    matrix and its blocks are used as they are; True, a list is a block column and its blocks are
    transposed. `dense_left`: the dense matrix is the left factor, so the lists are those of the result's
    block columns. `operand_modes`: as in `kernels_dsl.config.gemm.EntryLayout`.
    `scaled`: a scale a kept block comes before the epilogue's operands.
    """

    block: tuple[int, int]
    transposed: bool = False
    dense_left: bool = False
    operand_modes: tuple[str, ...] = ()
    scaled: bool = False


@frozen
class BsrProblem:
    """One product: D (m, n) over l batches, of nnz blocks of (block_mn, block_k) and a dense matrix.

    `block_mn` is a block's extent along D's blocked mode, `block_k` along the contraction, of extent k.
    `sparse_k_major`, `dense_k_major`: K is the contiguous mode. dtypes: "bf16", "fp16", "fp32", and "fp8" of
    the factors, which have a scale a block then.
    `d_align`: bytes that D's address and row pitch are aligned to. `operand_bytes`: of elementwise operands.
    """

    m: int
    n: int
    k: int
    nnz: int
    block_mn: int
    block_k: int
    l: int = 1
    dtype: str = "bf16"
    d_dtype: str = "bf16"
    sparse_k_major: bool = True
    dense_k_major: bool = False
    dense_left: bool = False
    d_align: int = 16
    operand_bytes: int = 0

    @property
    def other(self) -> int:
        """Extent of D's dense mode."""
        return self.m if self.dense_left else self.n

    @property
    def flops(self) -> int:
        """Useful floating-point operations: those of the kept blocks."""
        return 2 * self.nnz * self.block_mn * self.block_k * self.other * self.l
