"""FlashInfer's wrappers for attention to a cache of pages, by its names, on this library's kernels.

A script changes one import: `from kernels_dsl.flashinfer import BatchDecodeWithPagedKVCacheWrapper`. `plan`
turns FlashInfer's lists of pages into a table and lengths on the GPU, and `run` is one launch:
`attention_decode`, or `attention_varlen` for prompts. The workspace is not used. Log-sum-exps have base 2, as
there.

What has no counterpart is refused by name: positions (`pos_encoding_mode`), custom masks, scores of several
items, head dimensions of V of their own, backends of other GPUs.
"""

from kernels_dsl.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from kernels_dsl.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
]
