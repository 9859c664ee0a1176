"""Launches of the kernels that make block lists, for `blocks`."""

from __future__ import annotations

import torch

import lowering
from kernels_dsl.config.lists import DocumentSpec, TopkSpec, WindowSpec

_FOLDER = "kernels_dsl.kernels.lists"
FUNCTIONS = {
    "window": lowering.jit(f"{_FOLDER}.ranges:window_lists", name="window_lists"),
    "documents": lowering.jit(f"{_FOLDER}.ranges:document_lists", name="document_lists"),
    "topk": lowering.jit(f"{_FOLDER}.topk:topk_lists", name="topk_lists"),
}
Pair = tuple[torch.Tensor, torch.Tensor]


def padded(entries: int) -> int:
    """`entries` rounded up to 16 bytes, so that kernels that read lists are compiled for one alignment."""
    return -(-entries // 4) * 4


def unwritten(device: torch.device, lead: tuple[int, ...], entries: int) -> Pair:
    """Counts and indices, not yet written."""
    rows = lead[-1]
    counts = torch.empty((*lead[:-1], padded(rows)), dtype=torch.int32, device=device)[..., :rows]
    return counts, torch.empty((*lead, padded(entries)), dtype=torch.int32, device=device)[..., :entries]


def window_lists(
    spec: WindowSpec,
    rows: int,
    widths: tuple[int, int],
    keys: tuple[int, int, int, int, int],
    device: torch.device,
) -> tuple[Pair, Pair]:
    """Partial and whole blocks of `rows` query blocks, with room for `widths` entries.

    `keys`: queries, keys, what is added to a query's place for its diagonal, the window's left and right.
    """
    partial, full = (unwritten(device, (rows,), width) for width in widths)
    FUNCTIONS["window"](*partial, *full, *keys, spec=spec)
    return partial, full


def document_lists(spec: DocumentSpec, documents: torch.Tensor, rows: int, width: int) -> Pair:
    """Lists of `rows` query blocks of each sequence, with room for `width` entries."""
    pair = unwritten(documents.device, (documents.shape[0], rows), width)
    FUNCTIONS["documents"](documents, *pair, spec=spec)
    return pair


def topk_lists(spec: TopkSpec, scores: torch.Tensor, k: int, q_len: int, shift: int) -> Pair:
    """The `k` best columns of each row of scores (B, H, rows, columns)."""
    pair = unwritten(scores.device, tuple(scores.shape[:-1]), k)
    FUNCTIONS["topk"](scores, *pair, q_len, shift, spec=spec)
    return pair
