"""Builders of block lists under their documented path: those of `kernels_dsl.sparse.attention_blocks`."""

from __future__ import annotations

from kernels_dsl.sparse.attention_blocks import causal_blocks as causal_blocks
from kernels_dsl.sparse.attention_blocks import document_blocks as document_blocks
from kernels_dsl.sparse.attention_blocks import document_mask as document_mask
from kernels_dsl.sparse.attention_blocks import topk_blocks as topk_blocks
from kernels_dsl.sparse.attention_blocks import window_blocks as window_blocks
from kernels_dsl.sparse.block_lists import BlockLists as BlockLists
from kernels_dsl.sparse.block_lists import block_sizes as block_sizes
from kernels_dsl.sparse.block_lists import from_block_mask as from_block_mask
