"""Caches of keys and values of several sequences, in pages or not, and what a call sees of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from reference.inputs import case_seed, normal
from tests.fuzz.draw import Draw
from tests.fuzz.memory import PLAIN, Arena, Layout

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16)
SMALL_LENGTHS = (0, 0, 1, 3, 16, 33, 64, 65, 130, 200)
LARGE_LENGTHS = (0, 0, 1, 16, 63, 64, 65, 127, 129, 500, 1000, 1025, 2100, 4097)
PAGES = (1, 5, 8, 16, 16, 32, 64, 128)
_NONSENSE = (-1, -7, 2**31 - 1, -(2**31), 99999)
SCALES = ("none", "one", "head", "sequence")


@dataclass(frozen=True)
class Sequences:
    """The keys of each sequence, in `page`-sized pages found by a table of `room` entries a sequence.

    page: 0 for a cache without pages, with room for `room` keys. In generation 1 the lengths come in reverse
    and the pages in another order. `spare`: pages that no sequence has. `wild`: entries of the table and
    lengths may say anything. `shared`: the first pages of all sequences are the same.
    """

    lengths: tuple[int, ...]
    page: int
    room: int
    spare: int
    wild: bool
    shared: bool
    seed: int

    def turned(self, generation: int) -> tuple[int, ...]:
        """The lengths of a generation."""
        return self.lengths if generation == 0 else self.lengths[::-1]

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        return self.room * self.page if self.page else self.room

    @property
    def pages(self) -> int:
        """Pages of the cache; of one without, sequences."""
        if not self.page:
            return len(self.lengths)
        return sum(-(-n // self.page) for n in self.lengths) + self.spare

    @property
    def size(self) -> int:
        """Keys of a page."""
        return self.page or self.room

    def table(self, generation: int, hidden: tuple[int, ...] | None = None) -> torch.Tensor:
        """Pages of each sequence, int32 (sequences, room); entries that are not read say nonsense. hidden:
        keys at the start of each that no query sees."""
        picks = torch.Generator().manual_seed(case_seed("table", self.seed, generation))
        order = torch.randperm(self.pages, generator=picks).tolist()
        wild = torch.randint(0, len(_NONSENSE), (len(self.lengths), max(self.room, 1)), generator=picks)
        table = torch.tensor(_NONSENSE)[wild][:, : self.room].clone()
        for b, length in enumerate(self.turned(generation)):
            unseen = 0 if hidden is None else hidden[b] // self.page
            count = -(-length // self.page)
            own = [order.pop() for _ in range(count)]
            table[b, unseen:count] = torch.tensor(own[unseen:], dtype=torch.int64)
        if self.shared and hidden is None and self.room and min(self.lengths, default=0) >= self.page:
            table[:, 0] = table[0, 0]
        if self.wild and table.numel():
            some = torch.rand(table.shape, generator=picks) < 0.3
            table = torch.where(some, torch.tensor(_NONSENSE)[wild][:, : self.room], table)
        return table.to(torch.int32)

    def used(self, generation: int) -> torch.Tensor:
        """Lengths as the call gets them."""
        lengths = torch.tensor(self.turned(generation), dtype=torch.int64)
        if self.wild and len(lengths):
            lengths[-1] = _NONSENSE[self.seed % len(_NONSENSE)]
        return lengths.to(torch.int32)

    def counted(self, generation: int, hidden: tuple[int, ...] | None = None) -> torch.Tensor:
        """The places that hold keys, bool (pages, keys of a page); all of a wild table."""
        if self.wild:
            return torch.ones((self.pages, self.size), dtype=torch.bool)
        return self._places([
            range(0 if hidden is None else hidden[b], length)
            for b, length in enumerate(self.turned(generation))
        ], generation, hidden)  # fmt: skip

    def last(self, count: int, generation: int) -> torch.Tensor:
        """The places of the last `count` keys of each sequence, like `counted`."""
        return self._places([range(n - count, n) for n in self.turned(generation)], generation, None)

    def _places(self, keys: list[range], generation: int, hidden: tuple[int, ...] | None) -> torch.Tensor:
        found = torch.zeros((self.pages, self.size), dtype=torch.bool)
        table = self.table(generation, hidden) if self.page else None
        for b, some in enumerate(keys):
            positions = torch.tensor(some, dtype=torch.int64)
            if table is None:
                found[b, positions] = True
            else:
                found[table[b, positions // self.page].long(), positions % self.page] = True
        return found


@dataclass(frozen=True)
class CacheForm:
    """Dtypes and memory of caches. `order`: "nhd", or "hnd" where heads come before keys. `turns`: keys and
    values take turns in one tensor, page by page. `gap`: bytes of poison after each row, a multiple of 16.
    `scale_k`, `scale_v`: of `SCALES`. `powers`: scales are powers of 2. `index`: the layout of
    tables, lengths and scales, in the order of their modes."""

    heads: int
    dim: int
    dtype: torch.dtype
    order: str
    turns: bool
    gap: int
    scale_k: str
    scale_v: str
    powers: bool
    index: Layout

    @property
    def features(self) -> list[str]:
        """For coverage."""
        names = ["fp8 cache", f"k_scale {self.scale_k}"] if self.dtype == E4M3 else ["16-bit cache"]
        names += ["strided tables"] if self.index != PLAIN else []
        return names + [f"order {self.order}"] + (["keys and values in turn"] if self.turns else [])

    def layout(self, own: bool) -> Layout:
        """Of one cache, or of both in one tensor, whose first mode says which."""
        modes = (0, 1, 2, 3) if self.order == "nhd" else (0, 2, 1, 3)
        gap = self.gap // self.dtype.itemsize
        if own:
            return Layout(modes, gap=gap)
        return Layout((1, 0, *(mode + 1 for mode in modes[1:])), gap=gap)


@dataclass(frozen=True)
class Cached:
    """Caches in an arena, and the tensors that say where keys are. `used`, `table`: None where not given.
    `appended`: keys that a call adds to each sequence beyond `used`."""

    sequences: Sequences
    k: torch.Tensor
    v: torch.Tensor
    used: torch.Tensor | None
    table: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    appended: int = 0

    def keywords(self) -> dict[str, Any]:
        """The arguments that say where keys are, and the scales."""
        found = {"seqused_k": self.used, "block_table": self.table, "k_scale": self.k_scale,
                 "v_scale": self.v_scale}  # fmt: skip
        return {name: x for name, x in found.items() if x is not None}

    def lengths(self) -> list[int]:
        """Keys that count of each sequence, by what the tensors hold now."""
        if self.used is None:
            return [self.sequences.size] * self.k.shape[0]
        room = self.sequences.capacity if self.k.shape[0] else 0
        return [min(max(length + self.appended, 0), room) for length in self.used.tolist()]

    def raw(self, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence, (keys, heads, D) in the caches' dtype."""
        if self.table is None:
            return self.k[b, :length], self.v[b, :length]
        positions, size = torch.arange(length, device=self.k.device), self.sequences.size
        page = self.table[b].long().clamp(0, max(self.k.shape[0] - 1, 0))[positions // size]
        return self.k[page, positions % size], self.v[page, positions % size]

    def exact(self, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same times its scales, float64; 0 for what is NaN, which no query may see."""
        pair = []
        for x, scale in zip(self.raw(b, length), (self.k_scale, self.v_scale)):
            x = x.double().nan_to_num(0.0)
            if scale is not None:
                own = scale[b] if scale.dim() == 2 else scale
                x = x * own.double().expand(x.shape[1])[:, None]
            pair.append(x)
        return pair[0], pair[1]


def lay_out(
    arena: Arena,
    sequences: Sequences,
    form: CacheForm,
    seeds: Draw,
    hidden: tuple[int, ...] | None = None,
    appended: int = 0,
) -> Cached:
    """Caches in `arena`, NaN in all places that hold no key. hidden: as in `Sequences.table`, in generation
    0; in generation 1 nothing is hidden. appended: the last keys of each sequence, which the call writes."""
    device, seed, shape = seeds.settings.device, seeds.value_seed(), (sequences.pages, sequences.size)

    def unseen(generation: int) -> tuple[int, ...] | None:
        return hidden if generation == 0 else None

    @lru_cache(2)
    def lost(generation: int) -> torch.Tensor:
        counted = sequences.counted(generation, unseen(generation))
        if appended:
            counted &= ~sequences.last(appended, generation)
        return ~counted[:, :, None, None]

    def values(which: int, generation: int) -> torch.Tensor:
        made = normal((*shape, form.heads, form.dim), torch.float32, seed=seed + which + 2 * generation)
        return made.masked_fill(lost(generation), torch.nan).to(device)

    now = 0

    def laid(name: str, make: Callable[[int], torch.Tensor], layout: Layout) -> torch.Tensor:
        def contents(generation: int) -> torch.Tensor:
            nonlocal now
            now = generation
            return make(generation).to(form.dtype)

        if not appended:
            return arena.input(name, contents, layout)
        whole = make(0).shape
        changed = lambda: sequences.last(appended, now)[:, :, None, None].expand(whole)  # noqa: E731
        return arena.changed(name, contents, changed, layout)

    if form.turns:
        both = laid("caches", lambda g: torch.stack([values(0, g), values(1, g)]), form.layout(own=False))
        k, v = both.unbind(0)
    else:
        k, v = (
            laid(name, lambda g, which=which: values(which, g), form.layout(own=True))
            for which, name in enumerate(("k_cache", "v_cache"))
        )
    table = None
    if sequences.page:
        table = arena.input("block_table", lambda g: sequences.table(g, unseen(g)), form.index)
    full = table is None and not appended and all(n == sequences.room for n in sequences.lengths)
    used = None if full else arena.input("seqused_k", lambda g: sequences.used(g) - appended, form.index)
    scales = [
        scale_of(arena, name, kind, len(sequences.lengths), form, seeds)
        for name, kind in (("k_scale", form.scale_k), ("v_scale", form.scale_v))
    ]
    return Cached(sequences, k, v, used, table, *scales, appended=appended)


def scale_of(
    arena: Arena, name: str, kind: str, batch: int, form: CacheForm, seeds: Draw
) -> torch.Tensor | None:
    """A scale of kind `kind`; with no `batch`, one a head at most."""
    if kind == "none" or form.dtype != E4M3:
        return None
    each = (batch, form.heads) if batch else (form.heads,)
    shape = {"one": (), "head": (form.heads,), "sequence": each}[kind]
    seed = seeds.value_seed()

    def make(generation: int) -> torch.Tensor:
        picks = torch.Generator().manual_seed(seed + generation)
        if form.powers:
            return torch.exp2(torch.randint(-2, 2, shape, generator=picks).float())
        return torch.rand(shape, generator=picks) + 0.25

    return arena.input(name, make, form.index)


def starts_of(queries: tuple[int, ...], generation: int) -> torch.Tensor:
    """The starts of packed sequences with so many queries, int32; in generation 1 in reverse."""
    order = queries if generation == 0 else queries[::-1]
    return torch.tensor(list(accumulate(order, initial=0)), dtype=torch.int32)


def draw_sequences(draw: Draw, least: int = 0, wild: float = 0.12) -> Sequences:
    """Sequences of a call, at least `least` keys each. wild: odds of tables and lengths that say nonsense."""
    data, small = draw.data, draw.settings.small
    pool = SMALL_LENGTHS if small else LARGE_LENGTHS
    count = data.choice((0, 1, 1, 2, 3) if small else (0, 1, 2, 3, 5, 8, 17, 40))
    lengths = tuple(max(data.choice(pool), least) for _ in range(count))
    lengths = (0,) * count if data.random() < 0.05 and not least else lengths
    paged = draw.kernel.random() < 0.7
    page = data.choice(PAGES) if paged else 0
    if not paged and data.random() < 0.3:
        lengths = (max(lengths, default=0),) * count
    longest = max(lengths, default=0)
    room = -(-longest // page) + data.choice((0, 0, 1, 3)) if paged else longest + data.choice((0, 0, 7))
    return Sequences(
        lengths, page, room, spare=data.choice((0, 1, 3)), wild=data.random() < wild,
        shared=data.random() < 0.15, seed=draw.value_seed(),
    )  # fmt: skip


def draw_form(draw: Draw, dtype: torch.dtype, fp8: float = 0.4) -> CacheForm:
    """Caches beside queries of `dtype`; `fp8`: odds of e4m3."""
    pick, data = draw.kernel, draw.data
    quantised = pick.random() < fp8
    step = 16 if quantised else 8
    padded = pick.choice(
        (32, 64, 64, 128, 128) if draw.settings.small else (32, 64, 64, 96, 128, 128, 192, 256)
    )
    dim = padded if data.random() < 0.6 else data.randrange(padded - 32 + step, padded + 1, step)
    return CacheForm(
        data.choice((1, 1, 2)) if draw.settings.small else data.choice((1, 1, 2, 4, 8)), dim,
        E4M3 if quantised else dtype, pick.choice(("nhd", "nhd", "hnd")), pick.random() < 0.25,
        pick.choice((0, 0, 0, 16, 32)), pick.choice(SCALES), pick.choice(SCALES), pick.random() < 0.5,
        pick.choice((PLAIN, PLAIN, Layout(gap=3, offset=1), Layout(step=2))),
    )  # fmt: skip


def within(sequences: Sequences, most: int) -> Sequences:
    """Fewer sequences, with at most `most` keys in all."""
    lengths = sequences.lengths
    while sum(lengths) > most and len(lengths) > 1:
        lengths = lengths[1:]
    return replace(sequences, lengths=lengths)
