"""Cases of `append_kv`, bit by bit: slots that are none, lengths and tables that say nonsense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from reference.inputs import normal
from reference.tolerance import check_exact
from tests.fuzz import serving_pages as pages
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.serving_pages import E4M3, CacheForm

NAMES = ("k", "v", "k_cache", "v_cache", "slot_mapping", "cache_seqlens", "block_table", "k_scale", "v_scale")
PLACES = ("slots", "lengths", "table")
_LARGEST = 448.0
_WILD = (-1, -1, -7, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class AppendCase:
    """One call. `tokens`: (T,) or (B, S). `places`: "slots", "lengths" of sequences that are a page each, or
    "table". `cache`: pages and tokens of a page. `dim_v`: of values. `index`: dtype of slots. `odd`: another
    layout of the caches than the form's. `wild`: odds of a place that is outside."""

    draw: Draw = field(repr=False)
    tokens: tuple[int, ...]
    cache: tuple[int, int]
    form: CacheForm
    dim_v: int
    dtype: torch.dtype
    k: Layout
    v: Layout
    places: str
    index: torch.dtype
    odd: Layout | None
    wild: float
    mode: Mode

    def __str__(self) -> str:
        return "append " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["append_kv", f"mode {self.mode.value}", f"append by {self.places}", *self.form.features]
        names += ["places outside"] if self.wild else []
        return tuple(names + (["empty"] if 0 in (*self.tokens, *self.cache) else []))

    @property
    def slots(self) -> int:
        """Slots of a cache."""
        return self.cache[0] * self.cache[1]

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("append values", self.draw.number, settings), Operations(settings)
        device, form = settings.device, self.form

        def new(name: str, dim: int, layout: Layout) -> torch.Tensor:
            seed, shape = seeds.value_seed(), (*self.tokens, form.heads, dim)
            return arena.input(
                name, lambda g: normal(shape, self.dtype, seed=seed + g, device=device, scale=200.0), layout
            )

        k, v = new("k", form.dim, self.k), new("v", self.dim_v, self.v)
        given = self._places(arena, seeds)

        shapes = [(*self.cache, form.heads, dim) for dim in (form.dim, self.dim_v)]

        def written(shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
            def mask() -> torch.Tensor:
                rows = torch.zeros(self.slots, dtype=torch.bool)
                where = self._slots(given).flatten()
                rows[where[where >= 0]] = True
                return rows.view(*self.cache, 1, 1).expand(shape)

            return mask

        if form.turns and self.dim_v == form.dim:
            shape, layout = (2, *shapes[0]), form.layout(own=False)
            k_cache, v_cache = arena.output("caches", shape, form.dtype, layout, written(shape)).unbind(0)
        else:
            layout = self.odd or form.layout(own=True)
            k_cache, v_cache = (
                arena.output(name, shape, form.dtype, layout, written(shape))
                for name, shape in zip(("k_cache", "v_cache"), shapes)
            )
        scales = {
            name: pages.scale_of(arena, name, kind, 0, form, seeds)
            for name, kind in (("k_scale", form.scale_k), ("v_scale", form.scale_v))
        }

        def run() -> tuple[torch.Tensor, ...]:
            operations.append_kv(k, v, k_cache, v_cache, **given, **scales)
            return k_cache, v_cache

        return Call(
            run=run,
            check=lambda found: self._check(found, k, v, given, scales),
            arguments=NAMES,
        )

    def _places(self, arena: Arena, seeds: Draw) -> dict[str, torch.Tensor]:
        seed = seeds.value_seed()

        def wild(values: torch.Tensor, generation: int) -> torch.Tensor:
            picks = torch.Generator().manual_seed(seed + generation)
            chosen = torch.tensor([*_WILD, self.slots])[torch.randint(0, 6, values.shape, generator=picks)]
            return torch.where(torch.rand(values.shape, generator=picks) < self.wild, chosen, values)

        if self.places == "slots":

            def mapping(generation: int) -> torch.Tensor:
                picks, count = (
                    torch.Generator().manual_seed(seed + 7 + generation),
                    torch.Size(self.tokens).numel(),
                )
                order = torch.randperm(self.slots, generator=picks)[:count]
                padded = torch.cat([order, torch.full((count - len(order),), -1)])
                return wild(padded.view(self.tokens), generation).to(self.index)

            return {"slot_mapping": arena.input("slot_mapping", mapping, self.form.index)}
        (batch, new), (count, size) = self.tokens, self.cache
        each = count // max(batch, 1) if self.places == "table" else 1

        def lengths(generation: int) -> torch.Tensor:
            picks = torch.Generator().manual_seed(seed + 3 + generation)
            most = max(each * size - new, 0)
            return wild(torch.randint(0, most + 1, (batch,), generator=picks), generation).to(torch.int32)

        def table(generation: int) -> torch.Tensor:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 5 + generation))
            return wild(order[: batch * each].view(batch, each), generation + 2).to(torch.int32)

        found = {"cache_seqlens": arena.input("cache_seqlens", lengths, self.form.index)}
        return (
            {**found, "block_table": arena.input("block_table", table, self.form.index)}
            if self.places == "table"
            else found
        )

    def _slots(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """The slot of each token, -1 where it has none."""
        pages_, size = self.cache
        if "slot_mapping" in given:
            slots = given["slot_mapping"].cpu().long()
            return torch.where((slots >= 0) & (slots < self.slots), slots, -1)
        batch, new = self.tokens
        positions = given["cache_seqlens"].cpu().long()[:, None] + torch.arange(new)
        if size == 0:
            return torch.full_like(positions, -1)
        table = given["block_table"].cpu().long() if "block_table" in given else torch.arange(batch)[:, None]
        entries = positions.div(size, rounding_mode="floor")
        inside = (given["cache_seqlens"].cpu()[:, None] >= 0) & (entries < table.shape[1])
        if not table.shape[1]:
            return torch.full_like(positions, -1)
        page = table.gather(1, entries.clamp(0, table.shape[1] - 1))
        inside &= (page >= 0) & (page < pages_)
        return torch.where(inside, page * size + positions % size, -1)

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        k: torch.Tensor,
        v: torch.Tensor,
        given: dict[str, torch.Tensor],
        scales: dict[str, Any],
    ) -> None:
        """The rows that were written; the others are compared with what was there, byte by byte."""
        slots = self._slots(given).flatten().to(k.device)
        kept = slots >= 0
        for name, cache, new in (("k", found[0], k), ("v", found[1], v)):
            values, scale = new.resolve_neg().flatten(0, -3)[kept], scales[f"{name}_scale"]
            if cache.dtype == E4M3:
                values = values.float() if scale is None else values.float() / scale.reshape(-1, 1)
                values = values.clamp(-_LARGEST, _LARGEST).to(E4M3)
            where = slots[kept]
            rows = cache[where // max(self.cache[1], 1), where % max(self.cache[1], 1)]
            check_exact(rows.float(), values.float(), case=f"{name}_cache")


def draw_append(draw: Draw) -> AppendCase:
    """A case of `append_kv`."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    dtype = pick.choice(pages.DTYPES)
    form = pages.draw_form(draw, dtype, fp8=0.5)
    same = pick.random() < 0.7
    dim_v = form.dim if same else data.choice((1, 8, 20, 64, 72))
    places = pick.choice(("slots", *PLACES))
    batch = draw.extent((1, 2, 3) if small else (1, 2, 3, 8, 40))
    new = draw.extent((1, 1, 2, 7, 17) if small else (1, 1, 2, 7, 64, 300))
    size = data.choice((1, 5, 8, 16, 32, 64))
    count = draw.extent((1, 2, 5, 9) if small else (1, 5, 16, 100))
    if places == "lengths":
        count = max(count, batch)  # a page for each sequence
    tokens = (batch, new) if places != "slots" or pick.random() < 0.5 else (batch * new,)
    wild = data.choice((0.0, 0.0, 0.2))
    rank, odd = len(tokens) + 2, draw.layout(4, negate=False, expand=False)
    return AppendCase(
        draw, tokens, (count, size), form, dim_v, dtype, draw.layout(rank), draw.layout(rank), places,
        pick.choice((torch.int32, torch.int64)), odd if pick.random() < 0.4 else None, wild, draw.mode(),
    )  # fmt: skip
