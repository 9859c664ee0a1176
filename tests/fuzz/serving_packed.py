"""Cases of `attention_varlen` with `block_table`: packed queries, keys in pages, all masks and functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from reference.inputs import normal
from tests.fuzz import attention_configs as configs
from tests.fuzz import attention_contents as contents
from tests.fuzz import attention_options as masks
from tests.fuzz import serving_pages as pages
from tests.fuzz.attention_contents import Operands
from tests.fuzz.attention_options import Extents, Given, Options, Part
from tests.fuzz.attention_packed import NAMES
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import PLAIN, Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.serving_pages import Cached, CacheForm, Sequences

SMALL_QUERIES = (0, 1, 1, 2, 5, 17, 40, 65)
LARGE_QUERIES = (0, 1, 1, 1, 2, 7, 64, 128, 129, 300, 700)
_MOST_SMALL_WORK = 3 * 4096
_MOST_SCORES = 1 << 23


@dataclass(frozen=True)
class PagedCase:
    """One call. `queries`: of each sequence; in generation 1 in reverse. `after`: rows of no sequence."""

    draw: Draw = field(repr=False)
    sequences: Sequences
    form: CacheForm
    queries: tuple[int, ...]
    after: int
    group: int
    dtype: torch.dtype
    q: Layout
    out: Layout | None
    options: Options
    return_lse: bool
    family: str | None
    mode: Mode

    def __str__(self) -> str:
        return "packed in pages " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["attention_varlen block_table", f"mode {self.mode.value}", *self.options.features]
        names += [f"pages of family {self.family}", *self.form.features]
        names += ["table of nonsense"] if self.sequences.wild else []
        return tuple(names + (["log-sum-exp"] if self.return_lse else []))

    @property
    def sizes(self) -> Extents:
        """Of the longest sequence."""
        longest, form = max(self.queries, default=0), self.form
        return Extents(
            len(self.queries), longest, self.sequences.capacity, form.heads, self.group, form.dim, form.dim
        )

    @property
    def rows(self) -> int:
        """Rows of q that are of a sequence."""
        return sum(self.queries)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("paged values", self.draw.number, settings), Operations(settings)
        sizes, device = self.sizes, settings.device
        cached = pages.lay_out(arena, self.sequences, self.form, seeds)
        shape, seed = (self.rows + self.after, sizes.heads, sizes.dim), seeds.value_seed()
        q = arena.input("q", lambda g: normal(shape, self.dtype, seed=seed + g, device=device), self.q)

        def written() -> torch.Tensor:
            mask = torch.zeros(shape, dtype=torch.bool)
            mask[: self.rows] = True
            return mask

        cu_q = arena.input("cu_seqlens_q", partial(pages.starts_of, self.queries))
        given = masks.give(self.options, sizes, arena, seeds)
        out = None if self.out is None else arena.output("out", shape, self.dtype, self.out, written)
        options = {**given.keywords(), "seqused_k": cached.used, "block_table": cached.table}
        options.update(max_seqlen_q=sizes.q_len, return_lse=self.return_lse, out=out, family=self.family)
        options.update({"max_seqlen_k": sizes.k_len} if given.mask is not None else {})

        def run() -> tuple[torch.Tensor, ...]:
            found = operations.attention_varlen(q, cached.k, cached.v, cu_q, **options)
            if not self.return_lse:
                return (found[: self.rows],)
            return found[0][: self.rows], found[1][:, : self.rows]

        def supports() -> str | None:
            return operations.attention_supports(
                q, cached.k, cached.v, layout="thd", cu_seqlens_q=cu_q, **options
            )

        return Call(
            run=run,
            check=lambda found: self._check(found, q, cu_q, cached, given),
            arguments=(*NAMES, "block_table"),
            supports=None if self.mode is Mode.GRAPH else supports,
        )

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        q: torch.Tensor,
        cu_q: torch.Tensor,
        cached: Cached,
        given: Given,
    ) -> None:
        out, lse = found[0], found[1] if self.return_lse else None
        assert tuple(out.shape) == (self.rows, *q.shape[1:]) and out.dtype == self.dtype
        ends, q = cu_q.tolist(), q.resolve_neg()
        for b, length in enumerate(cached.lengths()):
            own = slice(ends[b], ends[b + 1])
            if own.stop == own.start:
                continue
            pair = cached.exact(b, length)
            part = Part(len(self.queries), self.sizes.heads, own.stop - own.start, length, b)
            rows = Operands(q[None, own], *(x[None] for x in pair))
            own_lse = None if lse is None else lse[None, :, own]
            try:
                rules = masks.masking(given, part)
                contents.check(out[None, own], own_lse, rows, rules, self.options.scale)
            except AssertionError as error:
                raise AssertionError(f"sequence {b} of {part.q_len} queries and {length} keys") from error


def draw_queries(draw: Draw, sequences: Sequences, heads: int) -> tuple[int, ...]:
    """Queries of each sequence; in a batch of nonsense and of nothing, too."""
    data, small = draw.data, draw.settings.small
    pool = SMALL_QUERIES if small else LARGE_QUERIES
    queries = [data.choice(pool) for _ in sequences.lengths]
    most = _MOST_SMALL_WORK if small else _MOST_SCORES

    def work() -> int:
        extra = 64 if small else 0
        keys = [sequences.capacity if sequences.wild else n for n in sequences.lengths]
        return heads * sum((i + extra) * (j + extra) for i, j in zip(queries, keys) if i)

    while work() > most and max(queries) > 1:
        queries[queries.index(max(queries))] //= 2
    return tuple(queries)


def draw_paged(draw: Draw) -> PagedCase:
    """A case of `attention_varlen` on pages."""
    pick = draw.kernel
    dtype = pick.choice(pages.DTYPES)
    form = pages.draw_form(draw, dtype, fp8=0.0)
    if form.index.step > 1:  # lengths must be contiguous
        form = replace(form, index=PLAIN)
    sequences = pages.draw_sequences(draw)
    if not sequences.page:
        page = draw.data.choice(pages.PAGES)
        longest = max(sequences.lengths, default=0)
        sequences = replace(sequences, page=page, room=-(-longest // page))
    group = pick.choice((1, 1, 2, 4))
    if draw.settings.small:
        sequences = pages.within(sequences, 300 // (form.heads * max(form.dim // 64, 1)))
    queries = draw_queries(draw, sequences, form.heads * group * max(form.dim // 64, 1))
    options = masks.draw_options(draw)
    return PagedCase(
        draw, sequences, form, queries, draw.data.choice((0, 0, 5)), group, dtype, draw.layout(3),
        draw.layout(3, negate=False, expand=False) if pick.random() < 0.5 else None, options,
        pick.random() < 0.5, pick.choice((None, *configs.families(draw.arch()))), draw.mode(),
    )  # fmt: skip
