"""Options of calls of attention besides q, k and v: windows, masks, sinks, functions; and its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import kernels_dsl
from reference.attention import Masking, masked_scores
from reference.inputs import case_seed, normal
from tests.fuzz.attention_functions import FUNCTIONS
from tests.fuzz.draw import Draw
from tests.fuzz.memory import PLAIN, Arena, Layout

MASK_DTYPES = (torch.bool, torch.bool, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Extents:
    """Sizes of a call. Of packed sequences `batch` is their number, and lengths those of the longest."""

    batch: int
    q_len: int
    k_len: int
    kv_heads: int
    group: int
    dim: int
    dim_v: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group


@dataclass(frozen=True)
class MaskTensor:
    """A mask of `rank` modes, `ones` of which (of B, H, Sq, Sk) have size 1."""

    dtype: torch.dtype
    ones: tuple[bool, bool, bool, bool]
    rank: int
    layout: Layout

    def shape(self, sizes: Extents) -> tuple[int, ...]:
        """Its shape for a call of these sizes."""
        full = (sizes.batch, sizes.heads, sizes.q_len, sizes.k_len)
        return tuple(1 if one else size for one, size in zip(self.ones, full))[4 - self.rank :]


@dataclass(frozen=True)
class Options:
    """Masking and scores of a call.

    `unlimited`: how a window says that a side has no limit. `sinks`: their dtype, None for none. `functions`:
    a name in `FUNCTIONS`; `wrapped`: passed through `kernel_function`. `number`: an argument of one.
    """

    causal: bool
    left: int | None
    right: int | None
    unlimited: int | None
    alignment: str
    softcap: float
    scale: float | None
    mask: MaskTensor | None
    sinks: torch.dtype | None
    functions: str | None
    wrapped: bool
    number: int

    @property
    def features(self) -> list[str]:
        """For coverage."""
        names = ["causal"] if self.causal else []
        names += ["window"] if (self.left, self.right) != (None, None) else []
        names += [self.alignment] if self.causal or "window" in names else []
        names += ["softcap"] if self.softcap else []
        names += ["sinks"] if self.sinks is not None else []
        names += ["scale"] if self.scale is not None else []
        if self.mask is not None:
            names += ["boolean mask" if self.mask.dtype == torch.bool else "additive mask"]
        if self.functions is not None:
            names += [f"functions {self.functions}"] + (["kernel_function"] if self.wrapped else [])
        return names

    @property
    def packable(self) -> bool:
        """Several heads can share a tile."""
        return self.mask is None and self.sinks is None and self.functions is None

    def keywords(self) -> dict[str, Any]:
        """Arguments that are no tensors."""
        found: dict[str, Any] = {"causal": True} if self.causal else {}
        if (self.left, self.right) != (None, None):
            found["window"] = tuple(self.unlimited if x is None else x for x in (self.left, self.right))
        found.update({"alignment": self.alignment} if self.alignment != "bottom_right" else {})
        found.update({"softcap": self.softcap} if self.softcap else {})
        found.update({"scale": self.scale} if self.scale is not None else {})
        return found


@dataclass(frozen=True)
class Given:
    """A call's options as tensors and functions. `options`: what they were made of."""

    options: Options
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    aux: tuple[Any, ...] = ()

    def keywords(self) -> dict[str, Any]:
        """The arguments of the call."""
        found = self.options.keywords()
        found.update({"mask": self.mask} if self.mask is not None else {})
        found.update({"sinks": self.sinks} if self.sinks is not None else {})
        if self.options.functions is not None:
            functions = FUNCTIONS[self.options.functions]
            wrap = kernels_dsl.kernel_function if self.options.wrapped else lambda function: function
            found.update({"score_mod": wrap(functions.score)} if functions.score else {})
            found.update({"mask_mod": wrap(functions.mask)} if functions.mask else {})
            found.update({"aux": self.aux} if self.aux else {})
        return found


def filled(device: str, make: Callable[[torch.Generator, int], torch.Tensor], seed: int) -> Any:
    """`fill` for `Arena.input` by a generator on the device."""

    def fill(generation: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(case_seed("fill", seed, generation))
        return make(generator, generation)

    return fill


def give(options: Options, sizes: Extents, arena: Arena, seeds: Draw) -> Given:
    """Lay out the tensors of `options` for a call of these sizes."""
    device = seeds.settings.device
    mask = sinks = None
    if options.mask is not None:
        shape, dtype, seed = options.mask.shape(sizes), options.mask.dtype, seeds.value_seed()
        make = _boolean(shape, seed) if dtype == torch.bool else _additive(shape, dtype)
        mask = arena.input("mask", filled(device, make, seed), options.mask.layout)
    if options.sinks is not None:
        seed, dtype = seeds.value_seed(), options.sinks
        sinks = arena.input("sinks", lambda g: normal((sizes.heads,), dtype, seed=seed + g, device=device))
    functions = FUNCTIONS[options.functions] if options.functions else None
    kinds = functions.aux if functions is not None else ()
    aux = tuple(_aux(i, kind, options, sizes, arena, seeds) for i, kind in enumerate(kinds))
    return Given(options, mask, sinks, aux)


def _aux(index: int, kind: str, options: Options, sizes: Extents, arena: Arena, seeds: Draw) -> Any:
    seed, device, name = seeds.value_seed(), seeds.settings.device, f"aux[{index}]"
    if kind == "number":
        return options.number
    if kind == "slopes":
        slopes = lambda g, _: torch.rand(sizes.heads, generator=g, device=device) + 0.25  # noqa: E731
        return arena.input(name, filled(device, slopes, seed))
    return arena.input(name, documents(sizes, device, seed))


def documents(sizes: Extents, device: str, seed: int, dtype: torch.dtype = torch.int32) -> Any:
    """`fill` of documents: integers (B, longest sequence) that do not fall."""
    shape = (sizes.batch, max(sizes.q_len, sizes.k_len, 1))

    def make(generator: torch.Generator, _: int) -> torch.Tensor:
        numbers = torch.randint(0, 5, shape, generator=generator, device=device)
        return numbers.sort(dim=-1).values.to(dtype)

    return filled(device, make, seed)


def _boolean(shape: tuple[int, ...], seed: int) -> Callable[[torch.Generator, int], torch.Tensor]:
    """Booleans, with rows that are all false."""
    odds = (0.1, 0.5, 0.9)[seed % 3]

    def make(generator: torch.Generator, _: int) -> torch.Tensor:
        mask = torch.rand(shape, generator=generator, device=generator.device) < odds
        if len(shape) >= 2 and shape[-2] > 1:
            rows = torch.rand((*shape[:-1], 1), generator=generator, device=generator.device) < 0.1
            mask &= ~rows
        return mask

    return make


def _additive(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Generator, int], torch.Tensor]:
    """Normal numbers, with minus infinity at some places and in whole rows."""

    def make(generator: torch.Generator, _: int) -> torch.Tensor:
        place = {"generator": generator, "device": generator.device}
        values = torch.randn(shape, **place)
        values = values.masked_fill(torch.rand(shape, **place) < 0.1, -torch.inf)
        if len(shape) >= 2 and shape[-2] > 1:
            values = values.masked_fill(torch.rand((*shape[:-1], 1), **place) < 0.05, -torch.inf)
        return values.to(dtype)

    return make


@dataclass(frozen=True)
class Part:
    """The part of a call that a reference is computed for: all of a dense one, or one sequence. `sequence`:
    its number, None for a dense call."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    sequence: int | None = None


class Piece(NamedTuple):
    """The rows of queries and of keys that attention is taken of at a time: all of a dense call, or those of
    one sequence. `spread`: the keys that lists name, as for `masking`."""

    queries: slice
    keys: slice
    part: Part
    spread: tuple[torch.Tensor, torch.Tensor] | None = None


def masking(given: Given, part: Part, lists: tuple[torch.Tensor, torch.Tensor] | None = None) -> Masking:
    """The reference's masking. lists: booleans (B or 1, H or 1, Sq, Sk), which keys lie in blocks that are
    listed as partial and as full; None where lists only leave out what is masked anyway."""
    options, mask = given.options, of_part(given.mask, part)
    boolean = mask is not None and mask.dtype == torch.bool
    functions = _bound(given, part)
    hidden = Masking(
        left=options.left,
        right=0 if options.causal else options.right,
        top_left=options.alignment == "top_left",
        allowed=mask if boolean else None,
        mask_mod=functions[1],
    )
    scores = {
        "softcap": options.softcap,
        "bias": None if boolean or mask is None else mask,
        "sinks": given.sinks,
        "score_mod": functions[0],
    }
    if lists is None:
        return Masking(hidden.left, hidden.right, hidden.top_left, allowed=hidden.allowed,
                       mask_mod=hidden.mask_mod, **scores)  # fmt: skip
    partial, full = lists
    visible = _visible(hidden, part, partial.device)
    return Masking(allowed=full | (partial & visible), **scores)


def of_part(mask: torch.Tensor | None, part: Part) -> torch.Tensor | None:
    """The mask with four modes, cut to one sequence."""
    if mask is None:
        return None
    mask = mask.resolve_neg()
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if part.sequence is None:
        return mask
    if mask.shape[0] > 1:
        mask = mask[part.sequence : part.sequence + 1]
    mask = mask[:, :, : part.q_len] if mask.shape[2] > 1 else mask
    return mask[..., : part.k_len] if mask.shape[3] > 1 else mask


def _bound(given: Given, part: Part) -> tuple[Any, Any]:
    """Score and mask function with their extra arguments, and places of the whole call."""
    if given.options.functions is None:
        return None, None
    functions, first = FUNCTIONS[given.options.functions], part.sequence or 0
    aux = given.aux
    score, mask = functions.score, functions.mask
    return (
        None if score is None else lambda s, b, h, i, j: score(s, b + first, h, i, j, *aux),
        None if mask is None else lambda b, h, i, j: mask(b + first, h, i, j, *aux),
    )


def _visible(hidden: Masking, part: Part, device: torch.device) -> torch.Tensor:
    """The (b, h, i, j) that are not hidden."""
    q = torch.zeros((part.batch, part.q_len, part.heads, 1), device=device)
    k = torch.zeros((part.batch, part.k_len, part.heads, 1), device=device)
    return masked_scores(q, k, hidden, 1.0) > -torch.inf


def draw_options(draw: Draw) -> Options:
    """Options of a call."""
    pick, data = draw.kernel, draw.data
    right, left = pick.random() < 0.5, pick.random() < 0.25
    alignment = pick.choice(("bottom_right", "bottom_right", "top_left"))
    # A causal mask is a window of width 0, to the kernel.
    widths = (0, 1, 5, 17, 64, 100, 300, 2000)
    causal = right and data.random() < 0.6
    softcap = pick.random() < 0.2
    with_mask, mask = pick.random() < 0.22, draw_mask(draw)
    sinks = draw.often(None, torch.float32, torch.bfloat16, torch.float16, odds=0.85)
    functions = pick.choice(tuple(FUNCTIONS)) if pick.random() < 0.22 else None
    wrapped = pick.random() < 0.5
    scale = data.choice((None, None, 0.3, 1.0, 0.01))
    return Options(
        causal=causal,
        left=data.choice(widths) if left else None,
        right=data.choice(widths) if right and not causal else None,
        unlimited=data.choice((None, -1, 1 << 40)),
        alignment=alignment,
        softcap=data.choice((2.0, 3.0)) if softcap else 0.0,
        scale=scale,
        mask=mask if with_mask else None,
        sinks=sinks,
        functions=functions,
        wrapped=wrapped,
        number=data.choice((1, 2, 3, 7)),
    )


def plain(options: Options, keep_mask: bool = False) -> Options:
    """The part of `options` that PyTorch's function has: causal or a mask, and a scale."""
    return replace(
        options, left=None, right=None, softcap=0.0, sinks=None, functions=None,
        mask=options.mask if keep_mask and not options.causal else None,
    )  # fmt: skip


def draw_mask(draw: Draw) -> MaskTensor:
    """A mask of any shape that broadcasts."""
    pick = draw.kernel
    dtype = pick.choice(MASK_DTYPES)
    rank = pick.choice((0, 1, 2, 2, 3, 4, 4, 4, 4))
    ones = tuple(place < 4 - rank or pick.random() < 0.3 for place in range(4))
    layout = draw.layout(rank, negate=dtype != torch.bool) if rank else PLAIN
    return MaskTensor(dtype, ones, rank, layout)  # type: ignore[arg-type]
