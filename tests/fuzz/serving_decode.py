"""Cases of `attention_decode`: caches of any form, lengths of 0, tables that say nonsense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reference.attention import Masking
from reference.inputs import normal
from tests.fuzz import attention_contents as contents
from tests.fuzz import serving_pages as pages
from tests.fuzz.attention_contents import Operands
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout, same_bits
from tests.fuzz.planted import Operations
from tests.fuzz.serving_pages import Cached, CacheForm, Sequences

NAMES = ("q", "k_cache", "v_cache", "seqused_k", "block_table", "window", "softcap", "sinks", "k_scale",
         "v_scale", "scale", "decode_equals_prefill", "out")  # fmt: skip
_MOST_SMALL_KEYS = 400


@dataclass(frozen=True)
class Scores:
    """Options of a call beside its tensors. `sinks`: their dtype, None for none. `fixed`: queries have the
    same bits alone and among others."""

    causal: bool
    left: int | None
    right: int | None
    softcap: float
    scale: float | None
    sinks: torch.dtype | None
    fixed: bool = False

    def keywords(self) -> dict[str, Any]:
        """Arguments that are no tensors."""
        found: dict[str, Any] = {"causal": self.causal, "softcap": self.softcap, "scale": self.scale}
        if self.fixed:
            found["decode_equals_prefill"] = True
        if (self.left, self.right) != (None, None):
            found["window"] = (self.left, self.right)
        return found

    def draw_sinks(self, arena: Arena, heads: int, seeds: Draw, device: str) -> torch.Tensor | None:
        """Sinks of so many heads, where there are some."""
        if self.sinks is None:
            return None
        kind, seed = self.sinks, seeds.value_seed()
        return arena.input("sinks", lambda g: normal((heads,), kind, seed=seed + g, device=device))

    def masking(self, sinks: torch.Tensor | None) -> Masking:
        """The reference's."""
        return Masking(self.left, 0 if self.causal else self.right, softcap=self.softcap, sinks=sinks)


@dataclass(frozen=True)
class DecodeCase:
    """One call. `hide`: keys before every query's window hold NaN, and their pages are none. `alone`: one
    sequence is decoded again by itself, on a copy of its keys, and must have the same bits; with
    `scores.fixed` its last query alone."""

    draw: Draw = field(repr=False)
    sequences: Sequences
    form: CacheForm
    queries: int
    group: int
    dtype: torch.dtype
    q: Layout
    out: Layout | None
    scores: Scores
    return_lse: bool
    hide: bool
    alone: int | None
    mode: Mode

    def __str__(self) -> str:
        return "decode " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        s, names = self.sequences, ["attention_decode", f"mode {self.mode.value}", *self.form.features]
        names += ["decode from pages" if s.page else "decode from slots"]
        names += ["length 0"] if 0 in s.lengths else []
        names += ["table of nonsense"] if s.wild else []
        names += ["keys hidden by a window"] if self._hidden() is not None else []
        names += ["same bits alone"] if self.alone is not None else []
        names += ["sinks"] if self.scores.sinks else []
        names += ["decode_equals_prefill"] if self.scores.fixed else []
        return tuple(names + (["log-sum-exp"] if self.return_lse else []))

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.form.heads * self.group

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("decode values", self.draw.number, settings), Operations(settings)
        cached = pages.lay_out(arena, self.sequences, self.form, seeds, self._hidden())
        shape = (len(self.sequences.lengths), self.queries, self.heads, self.form.dim)
        seed, dtype = seeds.value_seed(), self.dtype
        q = arena.input("q", lambda g: normal(shape, dtype, seed=seed + g, device=settings.device), self.q)
        sinks = self.scores.draw_sinks(arena, self.heads, seeds, settings.device)
        out = None if self.out is None else arena.output("out", shape, self.dtype, self.out)
        options = {**cached.keywords(), **self.scores.keywords(), "sinks": sinks}
        whole = {**options, "out": out, "return_lse": self.return_lse}
        return Call(
            run=self._run(operations, q, cached, options, whole),
            check=lambda found: self._check(found, q, cached, sinks),
            arguments=NAMES,
            supports=None
            if self.mode is Mode.GRAPH
            else lambda: operations.attention_decode_supports(q, cached.k, cached.v, **whole),
        )

    @property
    def _again(self) -> slice:
        """Queries of the sequence that is decoded again."""
        return slice(-1, None) if self.scores.fixed else slice(None)

    def _hidden(self) -> tuple[int, ...] | None:
        """Keys at the start of each sequence that no query sees."""
        if not self.hide or self.scores.left is None or self.sequences.wild or not self.sequences.page:
            return None
        before = self.queries + self.scores.left
        return tuple(max(length - before, 0) for length in self.sequences.lengths)

    def _run(
        self,
        operations: Operations,
        q: torch.Tensor,
        cached: Cached,
        options: dict[str, Any],
        whole: dict[str, Any],
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        def run() -> tuple[torch.Tensor, ...]:
            found = operations.attention_decode(q, cached.k, cached.v, **whole)
            results = tuple(found) if self.return_lse else (found,)
            return results if self.alone is None else (*results, *self._alone(operations, q, cached, options))

        return run

    def _alone(
        self, operations: Operations, q: torch.Tensor, cached: Cached, options: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """The result of one sequence or of its last query, on a cache that has its keys alone."""
        b, size = self.alone, self.sequences.page
        assert b is not None
        own = dict(options)
        length = cached.lengths()[b]
        k, v = (x.contiguous()[None] for x in cached.raw(b, length))
        if size:  # in pages of its own
            count = -(-length // size)
            k, v = (_in_pages(x[0], count, size) for x in (k, v))
            own["block_table"] = torch.arange(count, dtype=torch.int32, device=q.device)[None]
        own["seqused_k"] = torch.tensor([length], dtype=torch.int32, device=q.device)
        for name in ("k_scale", "v_scale"):
            if name in own and own[name].dim() == 2:
                own[name] = own[name][b : b + 1]
        found = operations.attention_decode(
            q[b : b + 1, self._again].clone(), k, v, **own, return_lse=self.return_lse
        )  # fmt: skip
        return tuple(found) if self.return_lse else (found,)

    def _check(
        self, found: tuple[torch.Tensor, ...], q: torch.Tensor, cached: Cached, sinks: torch.Tensor | None
    ) -> None:
        out, lse = found[0], found[1] if self.return_lse else None
        assert out.shape == q.shape and out.dtype == q.dtype
        if self.alone is not None:
            b, count = self.alone, len(found) // 2
            own = [x[b : b + 1] for x in found[:count]]
            own = [own[0][:, self._again], *(x[:, :, self._again] for x in own[1:])]
            for x, y in zip(own, found[count:]):
                assert same_bits(x, y), f"sequence {b} has other bits alone"
        q, rules = q.resolve_neg(), self.scores.masking(sinks)
        for b, length in enumerate(cached.lengths()):
            pair = cached.exact(b, length)
            rows = Operands(q[b : b + 1], *(x[None] for x in pair))
            try:
                own_lse = None if lse is None else lse[b : b + 1]
                contents.check(out[b : b + 1], own_lse, rows, rules, self.scores.scale)
            except AssertionError as error:
                raise AssertionError(f"sequence {b} of {length} keys") from error


def _in_pages(rows: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """Keys or values (n, heads, D) as pages (count, size, heads, D)."""
    pages_of = rows.new_zeros((count, size, *rows.shape[1:]))
    pages_of.view(count * size, *rows.shape[1:])[: rows.shape[0]] = rows
    return pages_of


def draw_scores(draw: Draw) -> Scores:
    """Options of a call."""
    pick, data = draw.kernel, draw.data
    causal, left, right = pick.random() < 0.7, pick.random() < 0.3, pick.random() < 0.2
    widths = (0, 1, 5, 17, 64, 100, 300, 2000)
    return Scores(
        causal, data.choice(widths) if left else None, data.choice(widths) if right else None,
        data.choice((2.0, 30.0)) if pick.random() < 0.2 else 0.0, data.choice((None, None, 0.3, 0.01)),
        draw.often(None, torch.float32, torch.bfloat16, torch.float16, odds=0.8),
        fixed=causal and pick.random() < 0.2,
    )  # fmt: skip


def draw_decode(draw: Draw) -> DecodeCase:
    """A case of `attention_decode`."""
    pick, data = draw.kernel, draw.data
    dtype = pick.choice(pages.DTYPES)
    sequences, form = pages.draw_sequences(draw), pages.draw_form(draw, dtype)
    group = pick.choice((1, 1, 2, 4) if draw.settings.small else (1, 1, 2, 4, 5, 8, 16))
    queries = data.choice((0, 1, 1, 1, 1, 1, 2, 2, 3, 7, 16, 40))
    if draw.settings.small:
        sequences = pages.within(sequences, _MOST_SMALL_KEYS // (form.heads * max(form.dim // 64, 1)))
    scores, mode = draw_scores(draw), draw.mode()
    if not scores.causal and scores.right == 0:
        scores = replace(scores, right=None)
    count, alone = len(sequences.lengths), data.random() < 0.35
    of_alone = data.randrange(count) if alone and count and mode is not Mode.GRAPH and form.heads else None
    return DecodeCase(
        draw, sequences, form, queries, group, dtype, draw.layout(4),
        draw.layout(4, negate=False, expand=False) if pick.random() < 0.5 else None, scores,
        pick.random() < 0.6, data.random() < 0.4, of_alone, mode,
    )  # fmt: skip
