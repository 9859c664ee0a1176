"""Cases of `attention_fp8_varlen`: packed sequences, some empty, rows of none, keys that do not count."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.config.attention_table import AttentionConfig
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_attention import NAMES, draw_dims
from tests.fuzz.fp8_attention_parts import (
    Factor,
    Masks,
    check_attention,
    draw_factors,
    draw_masks,
    exact_of,
    values,
)
from tests.fuzz.fp8_forced import attention_name
from tests.fuzz.fp8_values import Fill
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler
from tests.ops.attention import attention_fp8_cases as cases

_NAMES = (*NAMES, "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "seqused_k")
_LENGTHS = (0, 0, 1, 2, 17, 63, 64, 65, 100, 128, 129, 200, 333, 513)
_WRONG = ("q_descale", "out", "cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True)
class VarlenCase:
    """One call. `lengths`: of each sequence's queries and keys. `gap`: keys of NaN after each sequence, which
    do not count. `extra`: rows of no sequence at the end. `slack`: max_seqlen_q above the longest. `wrong`:
    the argument that is not what it must be."""

    draw: Draw = field(repr=False)
    lengths: tuple[tuple[int, int], ...]
    gap: int
    extra: int
    slack: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    layouts: tuple[Layout, Layout, Layout]
    out: Layout | None
    factors: tuple[Factor, Factor, Factor]
    masks: Masks
    lse: bool
    config: AttentionConfig | None
    wrong: str | None
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["attention_fp8_varlen", f"mode {self.mode.value}"]
        names += [f"packed {attention_name(self.config)}"] if self.config is not None else []
        names += [f"packed factor {factor.kind}" for factor in self.factors]
        names += ["packed gaps"] if self.gap else []
        names += ["packed rows of no sequence"] if self.extra else []
        names += ["packed lse"] if self.lse else []
        return tuple(names + (["empty"] if not any(q for q, _ in self.lengths) else []))

    def _of(self, generation: int) -> list[tuple[int, int]]:
        """Lengths of each sequence: in generation 1 the same ones in another order."""
        return list(self.lengths) if generation == 0 else list(reversed(self.lengths))

    def _starts(self, i: int, generation: int) -> torch.Tensor:
        """Starts of the sequences of queries (0) or keys (1), and the end of the last one."""
        sizes = [pair[i] + (self.gap if i else 0) for pair in self._of(generation)]
        return torch.tensor([0, *sizes]).cumsum(0).int()

    def _keys(self, fill: Fill) -> Fill:
        """`fill` with NaN in the rows between sequences."""

        def filled(generation: int) -> torch.Tensor:
            made = fill(generation)
            starts = self._starts(1, generation).tolist()
            for start, (_, length) in zip(starts, self._of(generation)):
                made.view(torch.uint8)[start + length : start + length + self.gap] = 0x7F
            return made

        return filled

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, device = Draw("fp8 packed values", self.draw.number, self.draw.settings), settings.device
        operations, count = Operations(settings), len(self.lengths)
        totals = [int(self._starts(i, 0)[-1]) + self.extra for i in (0, 1)]
        tensors, descales = [], []
        for i, name in enumerate("qkv"):
            heads, dim = self.heads[min(i, 1)], self.dims[i // 2]
            fill = values((totals[min(i, 1)], heads, dim), self.factors[i], seeds.value_seed(), device)
            tensors.append(arena.input(name, self._keys(fill) if i else fill, self.layouts[i]))
            of = self.factors[i].shape(count, heads, self.heads[1], 0)
            if self.wrong == f"{name}_descale":
                of = (count, heads + 1)
            descales.append(self.factors[i].make(arena, f"{name}_descale", of, seeds.value_seed()))
        options = self.masks.options | dict(zip(("q_descale", "k_descale", "v_descale"), descales))
        seqlens = [
            arena.input(f"cu_seqlens_{'qk'[i]}", lambda g, i=i: self._starts(i, g).to(device)) for i in (0, 1)
        ]
        for i in (0, 1):
            if self.wrong == f"cu_seqlens_{'qk'[i]}":
                seqlens[i] = seqlens[i].to(torch.int64)
        if self.gap:
            options["seqused_k"] = arena.input(
                "seqused_k",
                lambda g: torch.tensor([k for _, k in self._of(g)], dtype=torch.int32, device=device),
            )
        sinks = None
        if self.masks.sinks:
            fill = filler((self.heads[0],), torch.float32, seeds.value_seed(), device, False)
            sinks = options["sinks"] = arena.input("sinks", fill)
        options |= {"return_lse": True} if self.lse else {}
        options |= {"config": self.config} if self.config is not None else {}
        longest = max((q for q, _ in self.lengths), default=0) + self.slack

        def written() -> torch.Tensor:
            mask = torch.zeros(totals[0], self.heads[0], self.dims[1], dtype=torch.bool)
            mask[: totals[0] - self.extra] = True
            return mask

        out = None
        if self.out is not None or self.wrong == "out":
            shape = (totals[0] + (self.wrong == "out"), self.heads[0], self.dims[1])
            own = self.out or Layout()
            out = arena.output("out", shape, torch.bfloat16, own, None if self.wrong == "out" else written)
            options["out"] = out

        def run() -> tuple[torch.Tensor, ...]:
            found = operations.attention_fp8_varlen(*tensors, *seqlens, longest, **options)
            found = found if self.lse else (found,)
            assert out is None or found[0] is out
            return found

        def supports() -> str | None:
            named = {"cu_seqlens_q": seqlens[0], "cu_seqlens_k": seqlens[1], "max_seqlen_q": longest}
            return operations.attention_fp8_supports(*tensors, **named, **options)

        return Call(
            run=run,
            check=lambda found: self._check(found, tensors, descales, seqlens, sinks),
            arguments=_NAMES,
            supports=None if self.mode is Mode.GRAPH else supports,
            must_refuse=self.wrong,
            may_refuse=self.config is not None,
            # Rows of no sequence hold whatever was there, but for a caller's output.
            repeats=self.extra == 0 or (out is not None and not self.lse),
        )

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        tensors: list[torch.Tensor],
        descales: list[torch.Tensor | None],
        seqlens: list[torch.Tensor],
        sinks: torch.Tensor | None,
    ) -> None:
        starts = [x.tolist() for x in seqlens]
        given = (
            0 if starts[0] == self._starts(0, 0).tolist() and starts[1] == self._starts(1, 0).tolist() else 1
        )
        masking = self.masks.masking(sinks)
        device = str(tensors[0].device)
        q, k, v = tensors
        count = len(self.lengths)
        longest = max((length for length, _ in self.lengths), default=0) + self.slack
        keys = (count, len(k), *k.shape[1:]), (count, len(v), *v.shape[1:])
        walk = None
        if (self.config is not None or sinks is None) and count and longest:
            shapes = ((count, longest, *q.shape[1:]), *keys)
            config = self.config or cases.chosen(shapes, masking, device)
            walk = cases.walk_of(config, self.lse, rising=False)
        for n, (q_len, k_len) in enumerate(self._of(given)):
            if q_len == 0:
                continue
            rows = slice(starts[0][n], starts[0][n] + q_len)
            columns = slice(starts[1][n], starts[1][n] + k_len)
            own = [None if x is None else x if x.numel() == 1 else x[n : n + 1] for x in descales]
            exact = [
                exact_of(x[None, part], factor)
                for x, part, factor in zip(tensors, (rows, columns, columns), own)
            ]
            lse = found[1][None, :, rows] if self.lse else None
            check_attention((found[0][None, rows], lse), exact, masking, self.masks.scale, walk)


def draw_varlen(draw: Draw, config: AttentionConfig | None) -> VarlenCase:
    """A case of `attention_fp8_varlen`, with a configuration or without."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    if isinstance(config, Sm90AttentionConfig) and (config.turns_v or config.later_v):
        config = None
    masks, dims, factors = draw_masks(draw, config), draw_dims(draw, config), draw_factors(draw, False)
    count = data.choice((1, 2, 3) if small else (1, 2, 3, 5, 20))
    pool = _LENGTHS[:9] if small else _LENGTHS[:10] if count > 5 else _LENGTHS
    lengths = tuple((data.choice(pool), data.choice(pool)) for _ in range(count))
    if pick.random() < 0.3:
        lengths = tuple((q, q) for q, _ in lengths)
    kv_heads = data.choice((1, 2) if small else (1, 2, 4))
    layouts = tuple(draw.layout(3, negate=False) for _ in range(3))
    out = draw.layout(3, negate=False, expand=False) if pick.random() < 0.6 else None
    wrong = data.choice(_WRONG) if config is None and data.random() < 0.03 else None
    if wrong == "q_descale":
        factors = (Factor("head", ()), *factors[1:])
    gap = pick.choice((0, 0, 13))
    if gap:  # NaN of rows that nobody may read would be in all rows of a mode of stride 0
        q, *others = layouts
        layouts = q, *(replace(x, expanded=tuple(mode for mode in x.expanded if mode)) for x in others)
    lse = pick.random() < 0.5
    options: dict[str, Any] = {
        "gap": gap,
        "extra": data.choice((0, 0, 0, 7)),
        "slack": data.choice((0, 0, 5)),
    }
    return VarlenCase(
        draw, lengths, **options, heads=(kv_heads * pick.choice((1, 2, 4)), kv_heads), dims=dims,
        layouts=(layouts[0], layouts[1], layouts[2]), out=out, factors=factors, masks=masks, lse=lse,
        config=config, wrong=wrong, mode=draw.mode(),
    )  # fmt: skip
