"""Cases of `attention_decode` with `cu_seqlens_q`: packed queries, none of a sequence, rows past the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from reference.inputs import normal
from tests.fuzz import attention_contents as contents
from tests.fuzz import serving_pages as pages
from tests.fuzz.attention_contents import Operands
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout, same_bits
from tests.fuzz.planted import Operations
from tests.fuzz.serving_decode import NAMES, Scores, draw_scores
from tests.fuzz.serving_pages import Cached, CacheForm, Sequences

_MOST_SMALL_WORK = 3000


@dataclass(frozen=True)
class PackedDecodeCase:
    """One call. `queries`: of each sequence, in generation 1 in reverse. `after`: rows past the last
    sequence's, which get 0. `more`: by how much `max_seqlen_q` is too large; None: it is not given. `alone`:
    one sequence is decoded again by itself, and must have the same bits."""

    draw: Draw = field(repr=False)
    sequences: Sequences
    form: CacheForm
    queries: tuple[int, ...]
    after: int
    more: int | None
    group: int
    dtype: torch.dtype
    q: Layout
    out: Layout | None
    scores: Scores
    return_lse: bool
    alone: int | None
    mode: Mode

    def __str__(self) -> str:
        return "packed decode " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["attention_decode cu_seqlens_q", f"mode {self.mode.value}", *self.form.features]
        names += ["packed without queries"] if 0 in self.queries else []
        names += ["max_seqlen_q"] if self.more is not None else []
        return tuple(names + (["packed with the same bits alone"] if self.alone is not None else []))

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.form.heads * self.group

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, device = Draw("packed decode values", self.draw.number, settings), settings.device
        operations, heads = Operations(settings), self.heads
        cached = pages.lay_out(arena, self.sequences, self.form, seeds)
        shape, seed = (sum(self.queries) + self.after, heads, self.form.dim), seeds.value_seed()
        q = arena.input("q", lambda g: normal(shape, self.dtype, seed=seed + g, device=device), self.q)
        sinks = self.scores.draw_sinks(arena, heads, seeds, device)
        cu_q = arena.input("cu_seqlens_q", partial(pages.starts_of, self.queries), self.form.index)
        out = None if self.out is None else arena.output("out", shape, self.dtype, self.out)
        options = {**cached.keywords(), **self.scores.keywords(), "sinks": sinks}
        options["return_lse"] = self.return_lse
        if self.more is not None:
            options["max_seqlen_q"] = max(self.queries, default=0) + self.more
        whole = {**options, "cu_seqlens_q": cu_q, "out": out}
        return Call(
            run=self._run(operations, q, cached, options, whole),
            check=lambda found: self._check(found, q, cu_q, cached, sinks),
            arguments=(*NAMES, "cu_seqlens_q", "max_seqlen_q"),
            supports=None
            if self.mode is Mode.GRAPH
            else lambda: operations.attention_decode_supports(q, cached.k, cached.v, **whole),
        )

    def _run(
        self,
        operations: Operations,
        q: torch.Tensor,
        cached: Cached,
        options: dict[str, Any],
        whole: dict[str, Any],
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        def results(found: Any) -> tuple[torch.Tensor, ...]:
            return tuple(found) if self.return_lse else (found,)

        def run() -> tuple[torch.Tensor, ...]:
            found = results(operations.attention_decode(q, cached.k, cached.v, **whole))
            if self.alone is None:
                return found
            b, first = self.alone, sum(self.queries[: self.alone])
            own = {name: x for name, x in options.items() if name != "max_seqlen_q"}
            for name in ("seqused_k", "block_table", "k_scale", "v_scale"):
                if name in own and (own[name].dim() == 2 or name == "seqused_k"):
                    own[name] = own[name][b : b + 1]
            keys = cached.k, cached.v
            if cached.table is None:
                keys = cached.k[b : b + 1], cached.v[b : b + 1]
            starts = torch.tensor([0, self.queries[b]], dtype=torch.int32, device=q.device)
            rows = q[first : first + self.queries[b]].clone()
            return (*found, *results(operations.attention_decode(rows, *keys, cu_seqlens_q=starts, **own)))

        return run

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        q: torch.Tensor,
        cu_q: torch.Tensor,
        cached: Cached,
        sinks: torch.Tensor | None,
    ) -> None:
        out, lse = found[0], found[1] if self.return_lse else None
        assert out.shape == q.shape and out.dtype == q.dtype
        assert lse is None or tuple(lse.shape) == (self.heads, q.shape[0])
        ends, q, rules = cu_q.tolist(), q.resolve_neg(), self.scores.masking(sinks)
        assert not out[ends[-1] :].any(), "rows past the last sequence's are not 0"
        if self.alone is not None:
            own, count = slice(ends[self.alone], ends[self.alone + 1]), len(found) // 2
            assert same_bits(out[own], found[count]), f"sequence {self.alone} has other bits alone"
            assert lse is None or same_bits(lse[:, own], found[-1]), "a log-sum-exp has other bits alone"
        for b, length in enumerate(cached.lengths()):
            rows = slice(ends[b], ends[b + 1])
            if rows.stop == rows.start:
                continue
            operands = Operands(q[None, rows], *(x[None] for x in cached.exact(b, length)))
            try:
                own_lse = None if lse is None else lse[None, :, rows]
                contents.check(out[None, rows], own_lse, operands, rules, self.scores.scale)
            except AssertionError as error:
                raise AssertionError(f"sequence {b} of {rows} and {length} keys") from error


def draw_packed_decode(draw: Draw) -> PackedDecodeCase:
    """A case of `attention_decode` on packed queries."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    dtype = pick.choice(pages.DTYPES)
    sequences, form = pages.draw_sequences(draw), pages.draw_form(draw, dtype)
    group = pick.choice((1, 1, 2, 4))
    wide = form.heads * max(form.dim // 64, 1)
    if small:
        sequences = pages.within(sequences, 300 // wide)
    pool = (0, 1, 1, 1, 2, 5, 17, 40) if small else (0, 1, 1, 1, 2, 7, 16, 64, 130)
    queries = [data.choice(pool) for _ in sequences.lengths]
    keys = [sequences.capacity if sequences.wild else n for n in sequences.lengths]
    most = _MOST_SMALL_WORK if small else 1 << 21
    tiles = lambda: (-(-i * group // 16) * 16 for i in queries)  # noqa: E731
    while wide * sum(i * j for i, j in zip(tiles(), keys)) > most and max(queries) > 1:
        queries[queries.index(max(queries))] //= 2
    count, mode, alone = len(queries), draw.mode(), data.random() < 0.4
    of_alone = data.randrange(count) if alone and count and mode is not Mode.GRAPH else None
    return PackedDecodeCase(
        draw, sequences, form, tuple(queries), data.choice((0, 0, 5)),
        data.choice((None, 0, 3)), group, dtype, draw.layout(3),
        draw.layout(3, negate=False, expand=False) if pick.random() < 0.5 else None, draw_scores(draw),
        pick.random() < 0.6, of_alone, mode,
    )  # fmt: skip
