"""Our operations across the ranks of `torch.distributed`: sequences and layers that they share.

Nothing here brings a runtime of its own: collectives are PyTorch's, over a process group of the caller's.
"""

from kernels_dsl.distributed.attention import context_parallel_attention
from kernels_dsl.distributed.bsr_linear import BsrColwiseParallel, BsrRowwiseParallel, shard_bsr
from kernels_dsl.distributed.overlapped import all_gather_gemm, gemm_reduce_scatter
from kernels_dsl.distributed.sequence import shard_sequence, unshard_sequence
from kernels_dsl.distributed.torch_context import torch_context_parallel

__all__ = [
    "BsrColwiseParallel",
    "BsrRowwiseParallel",
    "all_gather_gemm",
    "context_parallel_attention",
    "gemm_reduce_scatter",
    "shard_bsr",
    "shard_sequence",
    "torch_context_parallel",
    "unshard_sequence",
]
