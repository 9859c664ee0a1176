"""Cases of FlashAttention's functions under its names: dense and packed, operands in one tensor, ALiBi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from kernels_dsl import flash_attn
from kernels_dsl.flash_attn import cute
from reference.attention import Masking
from reference.inputs import normal
from tests.fuzz import attention_contents as contents
from tests.fuzz.attention_contents import Operands
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import PLAIN, Arena

DENSE = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "cute.flash_attn_func")
PACKED = ("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func",
          "cute.flash_attn_varlen_func")  # fmt: skip
NAMES = (*DENSE, *PACKED)


@dataclass(frozen=True)
class FlashCase:
    """One call of `name`. `lengths`: (queries, keys) of each sequence, all alike if dense. `right`: of the
    window; `alibi`: 0, or the modes of its slopes."""

    draw: Draw = field(repr=False)
    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    dim: int
    dtype: torch.dtype
    causal: bool
    window: tuple[int, int] | None
    softcap: float
    alibi: int
    with_lse: bool
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return (self.name, f"mode {self.mode.value}", *(["ALiBi"] if self.alibi else []))

    @property
    def packed(self) -> bool:
        """The sequences lie one after the other."""
        return self.name in PACKED

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, (heads, kv_heads) = Draw("flash values", self.draw.number, settings), self.heads

        def tensor(name: str, rows: int, *shape: int) -> torch.Tensor:
            seed = seeds.value_seed()
            lead = (rows,) if self.packed else (len(self.lengths), rows // max(len(self.lengths), 1))
            fill = lambda g: normal((*lead, *shape), self.dtype, seed=seed + g, device=settings.device)  # noqa: E731
            return arena.input(name, fill, PLAIN)

        totals = [sum(x) for x in zip(*self.lengths)] or [0, 0]
        if "qkvpacked" in self.name:
            given = (tensor("qkv", totals[0], 3, heads, self.dim),)
            rows = Operands(*given[0].unbind(-3))
        elif "kvpacked" in self.name:
            given = tensor("q", totals[0], heads, self.dim), tensor("kv", totals[1], 2, kv_heads, self.dim)
            rows = Operands(given[0], *given[1].unbind(-3))
        else:
            pair = [tensor(name, totals[1], kv_heads, self.dim) for name in "kv"]
            given = rows = Operands(tensor("q", totals[0], heads, self.dim), *pair)
        slopes = None
        if self.alibi:
            shape = (heads,) if self.alibi == 1 else (len(self.lengths), heads)
            picks = seeds.value_seed()
            slopes = arena.input(
                "alibi_slopes",
                lambda g: torch.rand(shape, generator=torch.Generator().manual_seed(picks + g)) + 0.1,
            )
        starts = self._starts(arena) if self.packed else []
        return Call(
            run=self._run(given, slopes, starts),
            check=lambda found: self._check(found, rows, slopes),
            arguments=("q", "k", "v", "qkv", "kv", "window", "softcap"),
        )

    def _starts(self, arena: Arena) -> list[torch.Tensor]:
        """cu_seqlens of queries and keys; one of both where they lie in one tensor."""

        def sums(which: int) -> Callable[[int], torch.Tensor]:
            values = list(accumulate((x[which] for x in self.lengths), initial=0))
            return lambda _: torch.tensor(values, dtype=torch.int32)

        names = ("cu_seqlens",) if "qkvpacked" in self.name else ("cu_seqlens_q", "cu_seqlens_k")
        return [arena.input(name, sums(which)) for which, name in enumerate(names)]

    def _run(
        self, given: Any, slopes: torch.Tensor | None, starts: list[torch.Tensor]
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        of_cute = self.name.startswith("cute.")
        function = getattr(cute if of_cute else flash_attn, self.name.removeprefix("cute."))
        options: dict[str, Any] = {"causal": self.causal, "softcap": self.softcap}
        if self.window is not None:
            options["window_size"] = self.window
        if of_cute:
            options["return_lse"] = self.with_lse
        else:
            options.update(return_attn_probs=self.with_lse, alibi_slopes=slopes)
        longest = [max(x) for x in zip(*self.lengths)] or [0, 0]
        if of_cute and self.packed:
            options.update(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=longest[0])
            arguments = tuple(given)
        else:
            arguments = (*given, *starts, *longest[: len(starts)])

        def run() -> tuple[torch.Tensor, ...]:
            found = function(*arguments, **options)
            return tuple(found)[:2] if self.with_lse else (found[0] if of_cute else found,)

        return run

    def _check(self, found: tuple[torch.Tensor, ...], rows: Operands, slopes: torch.Tensor | None) -> None:
        out, lse = found[0], found[1] if self.with_lse else None
        assert out.shape == rows.q.shape and out.dtype == self.dtype
        ends = [list(accumulate((x[which] for x in self.lengths), initial=0)) for which in (0, 1)]
        for b, (queries, keys) in enumerate(self.lengths):
            if not queries:
                continue
            of_q, of_k = (slice(e[b], e[b + 1]) for e in ends)
            one = slice(b, b + 1)
            if self.packed:
                own = Operands(rows.q[None, of_q], rows.k[None, of_k], rows.v[None, of_k])
                own_out, own_lse = out[None, of_q], None if lse is None else lse[None, :, of_q]
            else:
                own = Operands(*(x[one] for x in rows))
                own_out, own_lse = out[one], None if lse is None else lse[one]
            bias = None
            if slopes is not None:
                slope = slopes[b] if slopes.dim() == 2 else slopes
                i, j = torch.arange(queries, device=out.device), torch.arange(keys, device=out.device)
                bias = -slope[:, None, None] * (i[:, None] + keys - queries - j).abs()
            left, right = (None if x == -1 else x for x in self.window or (-1, -1))
            rules = Masking(left, 0 if self.causal else right, softcap=self.softcap, bias=bias)
            contents.check(own_out, own_lse, own, rules, None)


def draw_flash(draw: Draw) -> FlashCase:
    """A call of one of FlashAttention's functions."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    name = data.choice(NAMES)
    pool = (1, 5, 17, 64, 70) if small else (1, 17, 64, 129, 300, 700)
    count = data.choice((0, 1, 2)) if small else data.choice((0, 1, 2, 3, 9))
    if name in PACKED:
        lengths = [(data.choice((0, *pool)), data.choice((0, *pool))) for _ in range(count)]
    else:
        lengths = [(draw.extent(pool), draw.extent(pool))] * count
    together = "qkvpacked" in name
    lengths = [(q, q if together else k) for q, k in lengths]
    kv_heads, group = data.choice((1, 2)), 1 if together else pick.choice((1, 1, 2))
    window = None
    if pick.random() < 0.3:
        window = (data.choice((0, 5, 100)), data.choice((0, 5, 100)))
    alibi = pick.choice((0, 0, 1, 2)) if not name.startswith("cute.") else 0
    return FlashCase(
        draw, name, tuple(lengths), (kv_heads * group, kv_heads), pick.choice((32, 64, 128)),
        pick.choice((torch.bfloat16, torch.float16)), pick.random() < 0.5, window,
        2.0 if pick.random() < 0.15 else 0.0, alibi, pick.random() < 0.5, draw.mode(graph=False),
    )  # fmt: skip
