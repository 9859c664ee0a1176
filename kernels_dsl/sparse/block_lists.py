"""Lists of key blocks that query blocks attend to. `attention_blocks` builds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels_dsl.checks import options
from lowering.records import frozen

DEFAULT_BLOCK = (128, 128)
ALIGNMENTS = ("bottom_right", "top_left")


@frozen
class BlockLists:
    """Key blocks of each query block, each of `block` (queries, keys).

    counts: int32 (B or 1, H or 1, query blocks). indices: int32, one mode more; in any order, each block at
    most once, garbage after the count. Elements of these blocks are masked by whatever mask the call has;
    those of `full_counts` and `full_indices` are not. Either pair may be None.
    """

    counts: torch.Tensor | None
    indices: torch.Tensor | None
    full_counts: torch.Tensor | None = None
    full_indices: torch.Tensor | None = None
    block: tuple[int, int] = DEFAULT_BLOCK

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """(counts, indices, full counts, full indices)."""
        return self.counts, self.indices, self.full_counts, self.full_indices

    def check_indices(self, k_len: int) -> None:
        """ValueError for a count or a block index out of range, or a block that is listed twice for a query
        block. Reads the lists: a host synchronisation. `kernels_dsl.checked` does it before each call."""
        blocks = -(-k_len // self.block[1])
        found = []
        for name, counts, indices in (
            ("", self.counts, self.indices),
            ("full_", self.full_counts, self.full_indices),
        ):
            if counts is None or indices is None or counts.numel() == 0:
                continue
            if int(counts.min()) < 0 or int(counts.max()) > indices.shape[-1]:
                raise ValueError(
                    f"{name}counts go from {int(counts.min())} to {int(counts.max())}, must be from 0 to "
                    f"{indices.shape[-1]}"
                )
            listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
            wrong = listed & ((indices < 0) | (indices >= blocks))
            if bool(wrong.any()):
                place = tuple(int(i) for i in wrong.nonzero()[0])
                raise ValueError(
                    f"{name}indices{list(place)} is {int(indices[place])}, must be from 0 to {blocks - 1}"
                )
            found.append(torch.where(listed, indices, -1))
        if found:
            lead = torch.broadcast_shapes(*(x.shape[:2] for x in found))
            rows = torch.cat([x.expand(*lead, *x.shape[2:]) for x in found], dim=-1).sort(dim=-1).values
            twice = (rows[..., 1:] == rows[..., :-1]) & (rows[..., 1:] >= 0)
            if bool(twice.any()):
                place = tuple(int(i) for i in twice.nonzero()[0])
                raise ValueError(
                    f"block {int(rows[place])} is listed twice at {list(place[:3])}, must be listed once at "
                    "most"
                )


def block_sizes(name: str, block: object) -> tuple[int, int]:
    """The sizes (queries, keys) of listed blocks, or a TypeError or ValueError that names them."""
    if not isinstance(block, Sequence) or isinstance(block, str) or len(block) != 2:
        raise TypeError(f"{name} is {block!r}, must be (queries, keys)")
    queries, keys = (options.integer(f"{name}[{i}]", size, least=1) for i, size in enumerate(block))
    return queries, keys


def from_block_mask(block_mask: Any) -> BlockLists:
    """The lists of a torch `BlockMask`, as they are. Its `mask_mod` is not part of them."""
    q_block, k_block = block_mask.BLOCK_SIZE
    return BlockLists(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        (int(q_block), int(k_block)),
    )
