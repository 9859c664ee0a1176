"""Lists of key blocks for a case: written at random, or by the library's builders, or of a `BlockMask`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch

from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.sparse import attention_blocks as builders
from kernels_dsl.sparse.block_lists import BlockLists
from tests.fuzz.attention_functions import FUNCTIONS
from tests.fuzz.attention_options import Extents, Given, Options, filled
from tests.fuzz.draw import Draw
from tests.fuzz.memory import PLAIN, Arena, Layout

BLOCKS = ((64, 64), (128, 128), (128, 64), (64, 128), (256, 128))
DENSE_KINDS = ("random", "random", "window", "topk", "documents", "BlockMask")
PACKED_KINDS = ("random", "random", "topk")
Lists = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ListsOf:
    """Lists of blocks of `block` (queries, keys). `pairs`: "partial", "full" or "both"; `lead`: whether they
    differ by batch, by head; `extra`: entries that no count reaches; `tight`: rows of lists are not padded to
    16 bytes; `most`: a limit of entries, or of top k. `dtype`: of scores. `layout`: of scores and indices."""

    kind: str
    block: tuple[int, int]
    pairs: str
    lead: tuple[bool, bool]
    extra: int
    tight: bool
    most: int | None
    dtype: torch.dtype
    layout: Layout

    @property
    def features(self) -> list[str]:
        """For coverage."""
        return ["BlockLists" if self.kind == "random" else f"{self.kind} lists", f"blocks {self.block}"]


@dataclass(frozen=True)
class Made:
    """make: the argument `blocks`, made anew in each call. on_cpu: the same lists, for the reference.
    `listed`: whether they change what the call's other masks hide. `compared`: a builder of the library makes
    them."""

    make: Callable[[], Any]
    on_cpu: Callable[[], BlockLists]
    listed: bool
    compared: bool


def draw_lists(
    draw: Draw, kinds: tuple[str, ...], config: AttentionConfig | None, odds: float
) -> ListsOf | None:
    """Lists for a call, or None. Blocks are whole tiles of `config`."""
    pick = draw.kernel
    wanted, kind = pick.random() < odds, pick.choice(kinds)
    block = pick.choice(BLOCKS)
    if config is not None:
        block = (lcm(64, config.tile_m), lcm(64, config.tile_n))
        block = (block[0] * pick.choice((1, 1, 2)), block[1] * pick.choice((1, 1, 2)))
    drawn = ListsOf(
        kind, block, pick.choice(("partial", "full", "both")), (pick.random() < 0.5, pick.random() < 0.5),
        extra=draw.data.choice((0, 0, 4, 8)), tight=pick.random() < 0.2,
        most=draw.data.choice((None, 1, 2, 5)),
        dtype=pick.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        layout=draw.layout(4, negate=False, expand=False, steps=False) if pick.random() < 0.4 else PLAIN,
    )  # fmt: skip
    return drawn if wanted else None


def lay_out(lists: ListsOf, given: Given, sizes: Extents, arena: Arena, seeds: Draw) -> Made:
    """The lists of a call in `arena`."""
    options = given.options
    rows, columns = (-(-n // b) for n, b in zip((sizes.q_len, sizes.k_len), lists.block))
    lead = tuple(n if given else 1 for n, given in zip((sizes.batch, sizes.heads), lists.lead))
    device = seeds.settings.device
    if lists.kind == "random":
        shape = (*lead, rows, columns)
        made = _random(lists, shape, arena, seeds)
        return Made(lambda: made, lambda: made, listed=True, compared=False)
    if lists.kind == "topk":
        seed = seeds.value_seed()
        scores = arena.input(
            "scores", filled(device, _scores((*lead, rows, columns), lists.dtype), seed), lists.layout
        )
        most = lists.most if lists.most is not None else columns
        keywords: dict[str, Any] = {
            "causal": options.causal, "block": lists.block, "q_len": sizes.q_len, "k_len": sizes.k_len,
        }  # fmt: skip
        return Made(
            lambda: builders.topk_blocks(scores, most, **keywords),
            lambda: builders.topk_blocks(scores.cpu(), most, **keywords), listed=True, compared=True,
        )  # fmt: skip
    if lists.kind == "documents":
        numbers = given.aux[0]
        keywords = {"causal": options.causal, "block": lists.block, "max_blocks": lists.most}
        return Made(
            lambda: builders.document_blocks(numbers, **keywords),
            lambda: builders.document_blocks(numbers.cpu(), **keywords), listed=True, compared=True,
        )  # fmt: skip
    if lists.kind == "BlockMask":
        return _block_mask(lists, options, sizes, device)
    return _window(lists, options, sizes, device)


def _block_mask(lists: ListsOf, options: Options, sizes: Extents, device: str) -> Made:
    """torch's lists of a mask function; the call gets no function beside them."""
    from torch.nn.attention.flex_attention import create_block_mask

    assert options.functions is not None
    made = create_block_mask(
        FUNCTIONS[options.functions].mask, sizes.batch if lists.lead[0] else None,
        sizes.heads if lists.lead[1] else None, sizes.q_len, sizes.k_len, device=device,
        BLOCK_SIZE=lists.block,
    )  # fmt: skip
    return Made(lambda: made, lambda: builders.from_block_mask(made), listed=True, compared=False)


def _window(lists: ListsOf, options: Options, sizes: Extents, device: str) -> Made:
    """Lists that leave out only what the window hides anyway."""
    right = 0 if options.causal else options.right
    lengths = (sizes.q_len, sizes.k_len)
    keywords: dict[str, Any] = {"block": lists.block, "alignment": options.alignment}
    if options.left is None and right == 0:
        build = lambda place: builders.causal_blocks(*lengths, device=place, **keywords)  # noqa: E731
    else:
        window = {"left": options.left, "right": right}
        build = lambda place: builders.window_blocks(*lengths, device=place, **window, **keywords)  # noqa: E731
    # Other masks have no say in blocks that the window does not cut.
    listed = options.mask is not None or options.functions is not None
    return Made(lambda: build(device), lambda: build("cpu"), listed=listed, compared=True)


def _random(lists: ListsOf, shape: tuple[int, ...], arena: Arena, seeds: Draw) -> BlockLists:
    """Each block is listed as partial, as full, or not at all; indices in any order, poison after them."""
    device, seed, columns = seeds.settings.device, seeds.value_seed(), shape[-1]
    odds = (0.15, 0.5, 0.95)[seed % 3]

    def pair(generation: int, full: bool) -> Lists:
        generator = torch.Generator().manual_seed(seed + generation)
        listed = torch.rand(shape, generator=generator) < odds
        listed &= torch.rand((*shape[:-1], 1), generator=generator) < 0.85  # rows of nothing
        kind = torch.rand(shape, generator=generator) < 0.5
        order = torch.rand(shape, generator=generator)
        mine = listed & (kind == full) if lists.pairs == "both" else listed
        counts = mine.sum(dim=-1, dtype=torch.int32)
        indices = torch.where(mine, order, 2.0).argsort(dim=-1).int()
        indices[torch.arange(columns) >= counts[..., None]] = 0x5A5A5A5A
        extra = lists.extra + (0 if lists.tight else -columns % 4)
        more = torch.full((*shape[:-1], extra), 0x5A5A5A5A, dtype=torch.int32)
        return counts, torch.cat([indices, more], dim=-1)

    found: list[torch.Tensor | None] = []
    for name, full in (("", False), ("full_", True)):
        if lists.pairs not in ("both", "full" if full else "partial"):
            found += [None, None]
            continue
        for place, part in enumerate(("counts", "indices")):
            fill = lambda generation, full=full, place=place: pair(generation, full)[place].to(device)  # noqa: E731
            layout = lists.layout if part == "indices" else Layout(gap=0 if lists.tight else -shape[2] % 4)
            found.append(arena.input(f"blocks.{name}{part}", fill, layout))
    return BlockLists(found[0], found[1], found[2], found[3], lists.block)


def _scores(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Generator, int], torch.Tensor]:
    """No two finite scores of a row are equal; some are -inf or NaN."""

    def make(generator: torch.Generator, _: int) -> torch.Tensor:
        place = {"generator": generator, "device": generator.device}
        ranks = torch.rand(shape, **place).argsort(dim=-1).float() - shape[-1] // 2
        ranks = ranks.masked_fill(torch.rand(shape, **place) < 0.1, -torch.inf)
        return ranks.masked_fill(torch.rand(shape, **place) < 0.05, torch.nan).to(dtype)

    return make


def canonical(lists: BlockLists) -> tuple[torch.Tensor, ...]:
    """Counts and indices with -1 in place of what lies after the counts, to be compared."""
    found = []
    for counts, indices in (lists.tensors[:2], lists.tensors[2:]):
        if counts is not None and indices is not None:
            steps = torch.arange(indices.shape[-1], device=indices.device)
            found += [counts, torch.where(steps < counts[..., None], indices, -1)]
    return tuple(found)


def spread(lists: BlockLists, sizes: Extents, device: str | torch.device) -> Lists:
    """(partial, full): booleans (B or 1, H or 1, Sq, Sk), which keys the lists name."""
    return (
        _elements(lists.tensors[:2], lists.block, sizes, device),
        _elements(lists.tensors[2:], lists.block, sizes, device),
    )


def _elements(
    pair: tuple[torch.Tensor | None, ...], block: tuple[int, int], sizes: Extents, device: str | torch.device
) -> torch.Tensor:
    counts, indices = pair
    if counts is None or indices is None:
        return torch.zeros((1, 1, sizes.q_len, sizes.k_len), dtype=torch.bool, device=device)
    counts, indices = counts.to(device), indices.to(device)
    columns = -(-sizes.k_len // block[1])
    listed = torch.arange(indices.shape[-1], device=device) < counts[..., None]
    places = torch.where(listed, indices, columns).long()
    blocks = torch.zeros((*counts.shape, columns + 1), dtype=torch.bool, device=device)
    blocks = blocks.scatter_(-1, places, True)[..., :columns]
    rows = blocks.repeat_interleave(block[0], dim=-2)[..., : sizes.q_len, :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : sizes.k_len]


def fit(lists: ListsOf, options: Options) -> Options:
    """`options` with what these lists go with."""
    if lists.kind == "documents":
        return replace(options, functions="documents")
    if lists.kind == "BlockMask":
        return replace(options, functions="near")
    return options


def check_built(found: tuple[torch.Tensor, ...], made: Made) -> BlockLists:
    """Compare what a builder made on the device with what it makes on the CPU, by torch; returns that."""
    expected = made.on_cpu()
    if made.compared:
        for x, y in zip(found, canonical(expected), strict=True):
            width = min(x.shape[-1], y.shape[-1]) if x.dim() == 4 else x.shape[-1]
            assert torch.equal(x[..., :width].cpu(), y[..., :width]), "lists differ from those made by torch"
    return expected
