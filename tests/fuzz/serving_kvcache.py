"""Cases of `flash_attn_with_kvcache`: new keys written first, few queries and many, tables by all names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl import flash_attn
from reference.inputs import normal
from reference.tolerance import check_exact
from tests.fuzz import attention_contents as contents
from tests.fuzz import serving_pages as pages
from tests.fuzz.attention_contents import Operands
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.serving_decode import Scores, draw_scores
from tests.fuzz.serving_pages import E4M3, Cached, CacheForm, Sequences

NAMES = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "cache_batch_idx", "block_table", "page_table",
         "softmax_scale", "window_size", "softcap", "sinks", "k_descale", "v_descale")  # fmt: skip
TABLES = ("block_table", "page_table", "cache_batch_idx")


@dataclass(frozen=True)
class KvCacheCase:
    """One call. `new`: keys that it writes to each sequence first. `table`: of `TABLES`, the name by which it
    gets the pages. `number`: all lengths are the same and given as a number."""

    draw: Draw = field(repr=False)
    sequences: Sequences
    form: CacheForm
    queries: int
    group: int
    new: int
    dtype: torch.dtype
    q: Layout
    k: Layout
    table: str
    number: bool
    scores: Scores
    return_lse: bool
    mode: Mode

    def __str__(self) -> str:
        return "kvcache " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["flash_attn_with_kvcache", f"mode {self.mode.value}", *self.form.features]
        names += ["new keys"] if self.new else []
        names += [f"pages by {self.table}"] if self.sequences.page else []
        names += ["lengths as a number"] if self.number else []
        names += ["many queries"] if self.queries * self.group > 64 else []
        return tuple(names)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, device, form = Draw("kvcache values", self.draw.number, settings), settings.device, self.form
        cached = pages.lay_out(arena, self.sequences, form, seeds, appended=self.new)
        batch, heads = len(self.sequences.lengths), form.heads * self.group

        def rows(name: str, count: int, heads: int, layout: Layout) -> torch.Tensor:
            seed, shape = seeds.value_seed(), (batch, count, heads, form.dim)
            return arena.input(
                name, lambda g: normal(shape, self.dtype, seed=seed + g, device=device), layout
            )

        q = rows("q", self.queries, heads, self.q)
        sinks = self.scores.draw_sinks(arena, heads, seeds, device)
        options = self._options(cached, sinks)
        new = None
        if self.new:
            new = rows("k", self.new, form.heads, self.k), rows("v", self.new, form.heads, self.k)
            options.update(k=new[0], v=new[1])
        return Call(
            run=self._run(q, cached, options),
            check=lambda found: self._check(found, q, cached, new, sinks),
            arguments=NAMES,
        )

    def _options(self, cached: Cached, sinks: torch.Tensor | None) -> dict[str, Any]:
        scores = self.scores
        options: dict[str, Any] = {
            "causal": scores.causal, "softcap": scores.softcap, "softmax_scale": scores.scale, "sinks": sinks,
            "window_size": tuple(-1 if x is None else x for x in (scores.left, scores.right)),
            "k_descale": cached.k_scale, "v_descale": cached.v_scale,
            "return_softmax_lse": self.return_lse,
        }  # fmt: skip
        if cached.table is not None:
            by_number = self.table == "cache_batch_idx"
            options[self.table] = cached.table[:, 0] if by_number else cached.table
        if cached.used is not None:
            lengths = self.sequences.lengths
            options["cache_seqlens"] = lengths[0] - self.new if self.number else cached.used
        return options

    def _run(
        self, q: torch.Tensor, cached: Cached, options: dict[str, Any]
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        def run() -> tuple[torch.Tensor, ...]:
            found = flash_attn.flash_attn_with_kvcache(q, cached.k, cached.v, **options)
            return tuple(found) if self.return_lse else (found,)

        return run

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        q: torch.Tensor,
        cached: Cached,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        sinks: torch.Tensor | None,
    ) -> None:
        out, lse = found[0], found[1] if self.return_lse else None
        assert out.shape == q.shape and out.dtype == q.dtype
        rules, q = self.scores.masking(sinks), q.resolve_neg()
        for b, length in enumerate(cached.lengths()):
            if new is not None:
                self._check_appended(b, length, cached, new)
            rows = Operands(q[b : b + 1], *(x[None] for x in cached.exact(b, length)))
            try:
                own_lse = None if lse is None else lse[b : b + 1]
                contents.check(out[b : b + 1], own_lse, rows, rules, self.scores.scale)
            except AssertionError as error:
                raise AssertionError(f"sequence {b} of {length} keys") from error

    def _check_appended(
        self, b: int, length: int, cached: Cached, new: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """The new keys are in the cache, bit by bit."""
        scales = (cached.k_scale, cached.v_scale)
        for name, stored, x, scale in zip(("k", "v"), cached.raw(b, length), new, scales):
            values = x[b].resolve_neg()
            if stored.dtype == E4M3:
                values = values.float() if scale is None else values.float() / scale.reshape(-1, 1)
                values = values.clamp(-448.0, 448.0).to(E4M3)
            check_exact(stored[length - self.new :].float(), values.float(), case=f"{name}_cache")


def draw_kvcache(draw: Draw) -> KvCacheCase:
    """A case of `flash_attn_with_kvcache`."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    dtype = pick.choice(pages.DTYPES)
    form = pages.draw_form(draw, dtype)
    appends = pick.random() < 0.5
    new = data.choice((1, 1, 3, 7)) if appends else 0
    sequences = replace(pages.draw_sequences(draw, least=new), shared=False)
    sequences = replace(sequences, wild=sequences.wild and not new)
    number = pick.random() < 0.2 and not sequences.wild and len(sequences.lengths) > 0
    table = pick.choice(TABLES)
    if table == "cache_batch_idx" and sequences.page:  # the cache of a sequence is one page
        page = max(max(sequences.lengths, default=0), 1)
        sequences = replace(sequences, page=page, room=1)
    if small:
        sequences = pages.within(sequences, 300 // (form.heads * max(form.dim // 64, 1)))
    if number:
        sequences = replace(sequences, lengths=(max(sequences.lengths),) * len(sequences.lengths))
    group = pick.choice((1, 1, 2, 4))
    queries = data.choice((0, 1, 1, 1, 2, 2, 7, 40 if small else 300))
    if appends and form.dtype == E4M3:  # scales of sequences are for reading alone
        form = replace(form, **{n: "head" for n in ("scale_k", "scale_v") if getattr(form, n) == "sequence"})
    scores = draw_scores(draw)
    if scores.causal:
        scores = replace(scores, right=None)
    return KvCacheCase(
        draw, sequences, form, queries, group, new, dtype, draw.layout(4), draw.layout(4), table, number,
        scores, pick.random() < 0.5, draw.mode(graph=False),
    )  # fmt: skip
