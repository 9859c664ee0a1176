"""Builders of lists of key blocks that query blocks attend to.

They are a small kernel each, without any host synchronisation: the lists' sizes follow from arguments
alone, so that they work in CUDA graphs. They cost O(query blocks * listed blocks). Where there is no GPU, and
under torch.compile, the same lists are made by torch operations.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks import options
from kernels_dsl.checks.eager_path import runs_kernels
from kernels_dsl.config.lists import DocumentSpec, WindowSpec, topk_spec
from kernels_dsl.sparse import attention_lists
from kernels_dsl.sparse.block_lists import ALIGNMENTS, DEFAULT_BLOCK, BlockLists, block_sizes
from kernels_dsl.sparse.block_lists import from_block_mask as from_block_mask

_SCORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _lists_of_ranges(
    begin: torch.Tensor,
    end: torch.Tensor,
    whole: tuple[torch.Tensor, torch.Tensor],
    widths: tuple[int, int],
    block: tuple[int, int],
) -> BlockLists:
    """Lists of the blocks in [begin, end) of each query block, those in `whole` unmasked.

    All are int tensors (…, query blocks); `widths` bound the blocks of a list that are not whole, and whole.
    """
    whole_begin = torch.maximum(torch.minimum(whole[0], end), begin)
    whole_end = torch.maximum(torch.minimum(whole[1], end), whole_begin)
    steps, full_steps = (torch.arange(width, device=begin.device) for width in widths)
    before = whole_begin - begin
    partial = torch.where(
        steps < before[..., None], begin[..., None] + steps, whole_end[..., None] + steps - before[..., None]
    )
    full = whole_begin[..., None] + full_steps
    partial_count = before + (end - whole_end)
    return BlockLists(partial_count.int(), partial.int(), (whole_end - whole_begin).int(), full.int(), block)


def window_blocks(
    q_len: int,
    k_len: int,
    *,
    left: int | None,
    right: int | None = 0,
    block: tuple[int, int] = DEFAULT_BLOCK,
    alignment: str = "bottom_right",
    device: torch.device | str = "cuda",
) -> BlockLists:
    """Blocks of a sliding window: i + shift - left <= j <= i + shift + right; None is without limit.

    shift is k_len - q_len, or 0 for the alignment "top_left". Shapes (1, 1, query blocks[, entries]).
    """
    bq, bk = block_sizes("block", block)
    q_len, k_len = options.integer("q_len", q_len, least=0), options.integer("k_len", k_len, least=0)
    left = None if left is None else options.integer("left", left, least=0)
    right = None if right is None else options.integer("right", right, least=0)
    options.one_of("alignment", alignment, ALIGNMENTS)
    shift = 0 if alignment == "top_left" else k_len - q_len
    blocks = -(-k_len // bk)
    width = blocks
    if left is not None and right is not None:
        width = min(blocks, (left + right + bq) // bk + 2)
    edges = (left is not None) + (right is not None)
    cut = min(width, edges * ((bq + 2 * bk - 3) // bk))
    widths = (attention_lists.padded(max(1, cut)), attention_lists.padded(max(1, width)))
    device = torch.device(device)
    if runs_kernels(device) and q_len > 0:
        spec = WindowSpec((bq, bk), left is not None, right is not None)
        keys = (q_len, k_len, shift, left or 0, right or 0)
        pairs = attention_lists.window_lists(spec, -(-q_len // bq), widths, keys, device)
        counts, indices, full_counts, full_indices = (x[None, None] for pair in pairs for x in pair)
        return BlockLists(counts, indices, full_counts, full_indices, block)
    first = torch.arange(-(-q_len // bq), device=device) * bq
    last = (first + bq).clamp(max=q_len) - 1
    zero, all_keys = torch.zeros_like(first), torch.full_like(first, k_len)
    end = all_keys if right is None else (last + shift + right + 1).clamp(0, k_len)
    whole_end = all_keys if right is None else (first + shift + right + 1).clamp(0, k_len)
    begin = zero if left is None else (first + shift - left).clamp(0, k_len)
    whole_begin = zero if left is None else (last + shift - left).clamp(0, k_len)
    first_block = begin // bk
    end_block = torch.maximum((end + bk - 1) // bk, first_block)
    whole = ((whole_begin + bk - 1) // bk, torch.where(whole_end == k_len, blocks, whole_end // bk))
    shaped = [x.view(1, 1, -1) for x in (first_block, end_block, *whole)]
    return _lists_of_ranges(shaped[0], shaped[1], (shaped[2], shaped[3]), widths, block)


def causal_blocks(
    q_len: int,
    k_len: int,
    *,
    block: tuple[int, int] = DEFAULT_BLOCK,
    alignment: str = "bottom_right",
    device: torch.device | str = "cuda",
) -> BlockLists:
    """Blocks of a causal mask. Shapes (1, 1, query blocks[, key blocks])."""
    return window_blocks(q_len, k_len, left=None, right=0, block=block, alignment=alignment, device=device)


def document_blocks(
    documents: torch.Tensor,
    *,
    causal: bool = True,
    block: tuple[int, int] = DEFAULT_BLOCK,
    max_blocks: int | None = None,
) -> BlockLists:
    """Blocks in which a query and a key can be of one document.

    documents: (B, S) integers that do not fall along S. All blocks are listed as partial: use them with
    `mask_mod=document_mask, aux=(documents as int32,)`. `max_blocks` bounds the entries of a query block
    (default: all key blocks); more than that are cut off.
    """
    options.boolean("causal", causal)
    bq, bk = block_sizes("block", block)
    max_blocks = None if max_blocks is None else options.integer("max_blocks", max_blocks, least=0)
    if not isinstance(documents, torch.Tensor):
        raise TypeError(f"documents is a {type(documents).__name__}, must be a torch.Tensor")
    if documents.dim() != 2 or documents.is_floating_point():
        raise ValueError(f"documents is {documents.dtype} {tuple(documents.shape)}, must be integers (B, S)")
    length = documents.shape[1]
    width = -(-length // bk) if max_blocks is None else max_blocks
    if runs_kernels(documents.device) and documents.dtype in (torch.int32, torch.int64) and width:
        rows = -(-length // bq)
        if rows * documents.shape[0]:
            spec = DocumentSpec((bq, bk), causal)
            counts, indices = attention_lists.document_lists(spec, documents.resolve_neg(), rows, width)
            return BlockLists(counts[:, None], indices[:, None], None, None, block)
    documents = documents.contiguous()
    first = torch.arange(-(-length // bq), device=documents.device) * bq
    last = (first + bq).clamp(max=length) - 1
    begin = torch.searchsorted(documents, documents[:, first].contiguous())
    end = torch.searchsorted(documents, documents[:, last].contiguous(), right=True)
    if causal:
        end = torch.minimum(end, last + 1)
    begin_block, end_block = begin // bk, (end + bk - 1) // bk
    counts = (end_block - begin_block).clamp(max=width)
    indices = begin_block[..., None] + torch.arange(width, device=documents.device)
    return BlockLists(counts.int()[:, None], indices.int()[:, None], None, None, block)


def document_mask(b: Any, h: Any, i: Any, j: Any, documents: Any) -> Any:
    """A `mask_mod`: query i and key j are of one document. documents: int32 (B, S)."""
    return documents[b, i] == documents[b, j]


def topk_blocks(
    scores: torch.Tensor,
    k: int,
    *,
    causal: bool = False,
    block: tuple[int, int] = DEFAULT_BLOCK,
    k_len: int | None = None,
    q_len: int | None = None,
) -> BlockLists:
    """For each query block the `k` key blocks of the highest score, in rising order.

    scores: (B, H, query blocks, key blocks). With `causal` only blocks that start at or before the last
    query's diagonal (bottom-right) are taken, and they are listed as partial, so that the causal mask of the
    call reaches them; otherwise as full. Blocks of score -inf or NaN are never taken.
    """
    options.boolean("causal", causal)
    k, (bq, bk) = options.integer("k", k, least=0), block_sizes("block", block)
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores is a {type(scores).__name__}, must be a torch.Tensor")
    if scores.dim() < 2:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, must be (B, H, query blocks, key blocks)")
    q_blocks, k_blocks = scores.shape[-2:]
    q_len = q_blocks * bq if q_len is None else options.integer("q_len", q_len, least=0)
    k_len = k_blocks * bk if k_len is None else options.integer("k_len", k_len, least=0)
    taking = min(k, k_blocks)
    spec = topk_spec(k_blocks, causal, block)
    if spec is not None and taking > 0 and scores.dim() == 4 and scores.numel():
        if scores.dtype in _SCORE_DTYPES and runs_kernels(scores.device):
            scores = scores.detach().resolve_neg()
            pair = attention_lists.topk_lists(spec, scores, taking, q_len, k_len - q_len)
            return BlockLists(*pair, block=block) if causal else BlockLists(None, None, *pair, block)
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if causal:
        last = (torch.arange(1, q_blocks + 1, device=scores.device) * block[0]).clamp(max=q_len) - 1
        starts = torch.arange(k_blocks, device=scores.device) * block[1]
        scores = scores.masked_fill(starts > (last + (k_len - q_len))[:, None], -torch.inf)
    values, indices = scores.topk(taking, dim=-1)
    taken = values > -torch.inf
    indices = torch.where(taken, indices, k_blocks).sort(dim=-1).values.int()
    counts = taken.sum(dim=-1, dtype=torch.int32)
    if causal:
        return BlockLists(counts, indices, None, None, block)
    return BlockLists(None, None, counts, indices, block)
