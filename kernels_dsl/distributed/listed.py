"""Lists of blocks and mask functions of a whole sequence, and what of them is a part's.

A part counts its rows from its own first ones: lists get other numbers, and mask functions are given the
places in the whole.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernels_dsl.distributed.parts import Limits, Origin, Part, Rows, Sharing, part_of
from kernels_dsl.distributed.sequence import Span, chunks_of
from kernels_dsl.ops.attention.arguments import UNLIMITED, AttentionArguments, Extras, aux_of, describe
from kernels_dsl.ops.attention.functions import unwrapped
from kernels_dsl.ops.attention.operation import refuse_gradient
from kernels_dsl.sparse.attention_lists import unwritten
from kernels_dsl.sparse.block_lists import BlockLists
from kernels_dsl.sparse.torch_masks import of_block_mask
from lowering.records import frozen

MaskFunction = Callable[..., Any]
_KEPT_FUNCTIONS = 256


class Masking(NamedTuple):
    """The mask of a call of `attention` beside its window."""

    blocks: BlockLists | None
    mask_mod: MaskFunction | None
    aux: tuple[Any, ...]
    limits: Limits

    def of_part(self, part: Part) -> Masking:
        """The mask of a launch of a part's rows; `part.limits` may be below 0, which no kernel takes."""
        blocks = None if self.blocks is None else _blocks_of(self.blocks, part)
        places = (part.origin.q, part.origin.k) if part.origin is not None else (0, 0)
        if all(limit is None or limit >= 0 for limit in part.limits):
            if self.mask_mod is None:
                return Masking(blocks, None, (), part.limits)
            return Masking(blocks, _placed(self.mask_mod), (*self.aux, *places), part.limits)
        left, right = (UNLIMITED if limit is None else limit for limit in part.limits)
        return Masking(blocks, _within(self.mask_mod), (*self.aux, *places, left, right), Limits())

    def of_heads(self, first: int, heads: int, device: torch.device) -> Masking:
        """The mask of a launch of some heads."""
        blocks, mask_mod, aux = self.blocks, self.mask_mod, self.aux
        if blocks is not None:
            lists = [
                x if x is None or x.shape[1] == 1 else x[:, first : first + heads] for x in blocks.tensors
            ]
            blocks = _lists(lists, blocks.block)
        if mask_mod is not None:
            mask_mod, aux = (
                _of_heads(mask_mod),
                (*aux, torch.tensor([first], dtype=torch.int32, device=device)),
            )
        return Masking(blocks, mask_mod, aux, self.limits)

    def digests(self) -> dict[str, Any]:
        """All that ranks must give alike, as short text. Reads the lists: waits for the GPU."""
        found: dict[str, Any] = {"blocks": None if self.blocks is None else "BlockLists"}
        if self.mask_mod is not None:
            found["mask_mod"] = getattr(self.mask_mod, "__qualname__", type(self.mask_mod).__name__)
        for place, x in enumerate(self.aux):
            found[f"aux[{place}]"] = _digest(x) if isinstance(x, torch.Tensor) else x
        if self.blocks is None:
            return found
        found["blocks.block"] = self.blocks.block
        for name, pair in zip(("", "full_"), _pairs(self.blocks)):
            if pair is None:
                continue
            counts, indices = pair
            found[f"blocks.{name}counts"] = _digest(counts)
            found[f"blocks.{name}indices"] = _digest(torch.where(_listed(counts, indices), indices, -1))
        return found


def _digest(x: torch.Tensor) -> str:
    data = x.detach().cpu().contiguous().view(torch.uint8) if x.numel() else x.new_empty(0, device="cpu")
    digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]
    return f"{x.dtype} {tuple(x.shape)} with the contents {digest}"


@functools.lru_cache(_KEPT_FUNCTIONS)
def _placed(mask_mod: MaskFunction) -> MaskFunction:
    """`mask_mod` for rows that count from others: the last of `aux` are the places of the first ones."""

    def mask(b: Any, h: Any, i: Any, j: Any, *aux: Any) -> Any:
        return mask_mod(b, h, i + aux[-2], j + aux[-1], *aux[:-2])

    return mask


@functools.lru_cache(_KEPT_FUNCTIONS)
def _within(mask_mod: MaskFunction | None) -> MaskFunction:
    """The same in a window whose left and right come last."""
    placed = None if mask_mod is None else _placed(mask_mod)

    def mask(b: Any, h: Any, i: Any, j: Any, *aux: Any) -> Any:
        window = (j >= i - aux[-2]) & (j <= i + aux[-1])
        return window if placed is None else window & placed(b, h, i, j, *aux[:-2])

    return mask


@functools.lru_cache(_KEPT_FUNCTIONS)
def _of_heads(mask_mod: MaskFunction) -> MaskFunction:
    """`mask_mod` for heads that count from another, which the last of `aux` holds."""

    def mask(b: Any, h: Any, i: Any, j: Any, *aux: Any) -> Any:
        return mask_mod(b, h + aux[-1][0], i, j, *aux[:-1])

    return mask


def _pairs(blocks: BlockLists) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Counts and indices of the masked and of the full blocks, of the same first modes."""
    found: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    pairs = (blocks.counts, blocks.indices), (blocks.full_counts, blocks.full_indices)
    for counts, indices in pairs:
        if counts is None or indices is None:
            found.append(None)
            continue
        lead = torch.broadcast_shapes(counts.shape, indices.shape[:-1])
        found.append((counts.expand(lead), indices.expand(*lead, indices.shape[-1])))
    return found


def _lists(tensors: Sequence[torch.Tensor | None], block: tuple[int, int]) -> BlockLists:
    counts, indices, full_counts, full_indices = tensors
    return BlockLists(counts, indices, full_counts, full_indices, block)


def _listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """bool, like indices: the entries that count."""
    return torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]


def _blocks_of(blocks: BlockLists, part: Part) -> BlockLists:
    """The lists of a part, which starts with whole blocks."""
    assert part.origin is not None
    block_q, block_k = blocks.block
    row, first = part.origin.q // block_q, part.origin.k // block_k
    rows = -(-(part.q.end - part.q.start) // block_q)
    width = -(-(part.k.end - part.k.start) // block_k)
    lists: list[torch.Tensor | None] = []
    for pair in _pairs(blocks):
        if pair is None:
            lists += [None, None]
            continue
        counts, indices = (x[:, :, row : row + rows] for x in pair)
        inside = _listed(counts, indices) & (indices >= first) & (indices < first + width)
        entries = min(width, indices.shape[-1])
        order = inside.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)[..., :entries]
        new_counts, new_indices = unwritten(indices.device, tuple(counts.shape), max(entries, 1))
        new_counts.copy_(inside.sum(-1))
        new_indices[..., :entries] = indices.gather(-1, order) - first
        lists += [new_counts, new_indices]
    return _lists(lists, blocks.block)


def masking_of(
    blocks: Any, mask_mod: Any, aux: Any, limits: Limits, whole: tuple[torch.Tensor, ...]
) -> Masking | None:
    """The mask of a call beside its window; None where there is none.

    whole: q, k and v as of the whole sequence. TypeError, ValueError or RuntimeError as `attention` raises.
    """
    rows = whole[0].shape[1], whole[1].shape[1]
    mask_mod, lists = of_block_mask(blocks, unwrapped(mask_mod), rows)
    extras = Extras(blocks=lists, aux=aux_of(aux))
    q, k, v = whole
    call = AttentionArguments(q, k, v, extras=extras, mask_mod=mask_mod)
    if mask_mod is None and extras.aux:
        raise ValueError("aux is given, must be empty without mask_mod, whose arguments it is")
    if mask_mod is None and lists is None:
        return None
    describe(call)
    refuse_gradient(call)
    return Masking(lists, mask_mod, extras.in_memory().aux, limits)


def whole_sequence(tensors: Sequence[torch.Tensor], size: int) -> tuple[torch.Tensor, ...]:
    """Tensors of the shapes that those of `size` ranks have together, without memory of their own."""
    return tuple(x[:, :1].expand(-1, size * x.shape[1], -1, -1) if x.shape[1] else x for x in tensors)


class Chunks(NamedTuple):
    """The chunks of a sequence, and the rows of q and of k that each has."""

    number: int
    q: int
    k: int


def chunks_of_call(q: torch.Tensor, k: torch.Tensor, size: int, order: str) -> Chunks:
    """Those of ranks with such rows."""
    each = len(chunks_of(0, size, order))
    return Chunks(size * each, q.shape[1] // each, k.shape[1] // each)


def check_masking(masking: Masking, starts: object, chunks: Chunks, method: str, asks: bool) -> None:
    """ValueError or TypeError for a mask that ranks cannot share so; `asks`: for gradients too."""
    if starts is not None:
        name = "mask_mod" if masking.blocks is None else "blocks"
        raise ValueError(f"{name} is given beside cu_seqlens, must be None")
    if method == "ulysses":
        for place, x in enumerate(masking.aux):
            if asks and not isinstance(x, torch.Tensor):
                found = f"aux[{place}] is a {type(x).__name__}"
                raise TypeError(f'{found}, must be a torch.Tensor for gradients with "ulysses"')
    if masking.blocks is None or method == "ulysses":
        return
    block_q, block_k = masking.blocks.block
    for name, rows, block in (("q", chunks.q, block_q), ("k", chunks.k, block_k)):
        if rows % block and (name == "q" or method == "ring"):
            raise ValueError(
                f"{name} has {rows} rows in a rank's chunk, must be a multiple of {block}: those of a block"
            )


Ranges = tuple[tuple[Rows | None, ...], ...]


def ranges_of(blocks: BlockLists, chunks: Chunks) -> Ranges:
    """The keys of each chunk that queries of each chunk have blocks of, by the place in the whole; None for
    none. Waits for the GPU."""
    block_q, block_k = blocks.block
    rows, columns, most = chunks.q // block_q, chunks.k // block_k, chunks.number * chunks.k // block_k
    bounds: torch.Tensor | None = None
    for pair in _pairs(blocks):
        if pair is None:
            continue
        counts, indices = pair
        owner = torch.where(_listed(counts, indices), indices // columns, chunks.number).clamp(
            0, chunks.number
        )
        owner, place = (x.movedim(2, 0).reshape(chunks.number, -1).long() for x in (owner, indices))
        if bounds is None:
            bounds = place.new_full((2, chunks.number, chunks.number + 1), most)
        for bound, sign in zip(bounds, (1, -1)):  # the first one, and the last one with its sign turned
            bound.scatter_reduce_(1, owner, place * sign, "amin")
    assert bounds is not None and rows
    table = bounds[..., :-1].tolist()
    return tuple(
        tuple(
            None if first == most else Rows(first * block_k, (1 - last) * block_k)
            for first, last in zip(firsts, lasts)
        )
        for firsts, lasts in zip(*table)
    )


@frozen
class MaskedSharing(Sharing):
    """That of calls with lists of blocks or a mask function, whose parts know their places in the whole."""

    ranges: Ranges | None
    """None: without lists of blocks, or where all keys are there."""
    listed: bool
    """There are lists of blocks."""

    def _between(self, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> list[Part]:
        pairs = [(q, k) for q in q_spans for k in k_spans]
        found = [self._listed_part(q, k) if self.listed else part_of(q, k, self.limits) for q, k in pairs]
        placed = []
        for (q, k), part in zip(pairs, found):
            if part is not None:
                origin = Origin(q.start + part.q.start - q.local, k.start + part.k.start - k.local)
                placed.append(part._replace(origin=origin))
        return placed

    def _listed_part(self, q: Span, k: Span) -> Part | None:
        """Whole blocks: a window hides nothing of full ones."""
        rows: Rows | None = Rows(k.start, k.start + k.length)
        if self.ranges is not None:
            rows = self.ranges[q.start // q.length][k.start // k.length]
        if rows is None:
            return None
        shift, (left, right) = q.start - rows.start, self.limits
        limits = Limits(None if left is None else left - shift, None if right is None else right + shift)
        to_k = k.local - k.start
        return Part(Rows(q.local, q.local + q.length), Rows(rows.start + to_k, rows.end + to_k), limits)
