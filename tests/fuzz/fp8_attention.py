"""Cases of `attention_fp8`: all kinds of factors, masks, lists, every configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.sparse.block_lists import BlockLists
from reference.attention import allowed_by_lists
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_attention_parts import (
    DIMS,
    Factor,
    Masks,
    check_attention,
    draw_factors,
    draw_masks,
    exact_of,
    values,
)
from tests.fuzz.fp8_forced import attention_name
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler
from tests.ops.attention import attention_fp8_cases as cases

NAMES = ("q", "k", "v", "q_descale", "k_descale", "v_descale", "causal", "window", "alignment", "scale",
         "softcap", "sinks", "blocks", "return_lse", "out", "config")  # fmt: skip
_LARGE = (1, 2, 17, 63, 64, 65, 127, 128, 129, 191, 200, 257, 333, 500, 513, 640)
_LONG = (900, 1100, 1537)
_SMALL = (1, 2, 17, 33, 63, 65, 100, 129)
_WRONG = ("q_descale", "v_descale", "out", "q", "k")


@dataclass(frozen=True)
class AttentionCase:
    """One call. `block`: of lists of key blocks, None without. `wrong`: the argument that is not what it must
    be."""

    draw: Draw = field(repr=False)
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    dims: tuple[int, int]
    layouts: tuple[Layout, Layout, Layout]
    out: Layout | None
    factors: tuple[Factor, Factor, Factor]
    masks: Masks
    block: tuple[int, int] | None
    lse: bool
    config: AttentionConfig | None
    wrong: str | None
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["attention_fp8", f"mode {self.mode.value}"]
        names += [attention_name(self.config)] if self.config is not None else []
        names += [f"attention_fp8 factor {factor.kind}" for factor in self.factors]
        names += ["attention_fp8 lists"] if self.block is not None else []
        names += ["attention_fp8 sinks"] if self.masks.sinks else []
        names += ["attention_fp8 lse"] if self.lse else []
        return tuple(names + (["empty"] if 0 in (self.batch, *self.lengths) else []))

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, device = Draw("fp8 attention values", self.draw.number, self.draw.settings), settings.device
        operations = Operations(settings)
        tensors, descales = [], []
        for i, name in enumerate("qkv"):
            length, heads, dim = self.lengths[min(i, 1)], self.heads[min(i, 1)], self.dims[i // 2]
            shape = (self.batch, length, heads, dim + 8 * (self.wrong == name))
            fill = values(shape, self.factors[i], seeds.value_seed(), device)
            tensors.append(arena.input(name, fill, self.layouts[i]))
            of = self.factors[i].shape(self.batch, heads, self.heads[1], length)
            if self.wrong == f"{name}_descale":
                of = (self.batch, heads + 1)
            descales.append(self.factors[i].make(arena, f"{name}_descale", of, seeds.value_seed()))
        options = self.masks.options
        sinks = None
        if self.masks.sinks:
            fill = filler((self.heads[0],), torch.float32, seeds.value_seed(), device, False)
            sinks = options["sinks"] = arena.input("sinks", fill)
        lists = None if self.block is None else self._lists(arena, seeds.value_seed())
        options |= {"blocks": lists} if lists is not None else {}
        options |= dict(zip(("q_descale", "k_descale", "v_descale"), descales))
        options |= {"return_lse": True} if self.lse else {}
        options |= {"config": self.config} if self.config is not None else {}
        out = None
        if self.out is not None or self.wrong == "out":
            shape = (self.batch, self.lengths[0], self.heads[0], self.dims[1])
            dtype = torch.float16 if self.wrong == "out" else torch.bfloat16
            out = options["out"] = arena.output("out", shape, dtype, self.out or Layout())

        def run() -> tuple[torch.Tensor, ...]:
            found = operations.attention_fp8(*tensors, **options)
            found = found if self.lse else (found,)
            assert out is None or found[0] is out
            return found

        return Call(
            run=run,
            check=lambda found: self._check(found, tensors, descales, sinks, lists),
            arguments=NAMES,
            supports=None
            if self.mode is Mode.GRAPH
            else lambda: operations.attention_fp8_supports(*tensors, **options),
            must_refuse=self.wrong,
            may_refuse=self.config is not None,
        )

    def _lists(self, arena: Arena, seed: int) -> BlockLists:
        """Some key blocks of each query block, in any order; garbage after those that count."""
        assert self.block is not None
        rows, columns = (-(-length // size) for length, size in zip(self.lengths, self.block))
        lead = (self.batch, 1)

        def made(generation: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(seed + generation)
            counts = torch.randint(0, columns + 1, (*lead, rows), generator=generator)
            order = torch.rand((*lead, rows, columns), generator=generator).argsort(-1)
            behind = torch.arange(columns) >= counts[..., None]
            return counts.int(), torch.where(behind, 99, order).int()

        device = arena.device
        return BlockLists(
            arena.input("counts", lambda g: made(g)[0].to(device)),
            arena.input("indices", lambda g: made(g)[1].to(device)),
            block=self.block,
        )

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        tensors: list[torch.Tensor],
        descales: list[torch.Tensor | None],
        sinks: torch.Tensor | None,
        lists: BlockLists | None,
    ) -> None:
        exact = [exact_of(x, factor) for x, factor in zip(tensors, descales)]
        allowed = None
        if lists is not None:
            shape = (self.batch, self.heads[0], *self.lengths)
            allowed = allowed_by_lists(lists.tensors, lists.block, shape).to(tensors[0].device)
        masking = self.masks.masking(sinks, allowed)
        maxima = any(f.kind == "block" and -(-self.lengths[1] // 128) > 1 for f in self.factors[1:])
        maxima = maxima or sinks is not None or lists is not None
        shapes = tuple(tuple(x.shape) for x in tensors)
        device = str(tensors[0].device)
        walk = None
        if self.config is not None or not maxima:
            config = self.config or cases.chosen(shapes, masking, device)
            walk = cases.walk_of(config, self.lse, causal=cases.is_causal(masking))
        lse = found[1] if self.lse else None
        check_attention((found[0], lse), exact, masking, self.masks.scale, walk)


def draw_dims(draw: Draw, config: AttentionConfig | None) -> tuple[int, int]:
    """Head dimensions that fit a configuration: its own, or less."""
    pick, small = draw.kernel, draw.settings.small
    if config is None:
        pool = tuple(dim for dim in DIMS if dim <= 128) if small else DIMS
        dim = pick.choice((64, 128, *pool))
        return dim, draw.often(dim, *pool)
    less = pick.choice((0, 0, 0, 16))
    return max(config.dim - less, 16), max(config.dim_v - less, 16)


def draw_attention(draw: Draw, config: AttentionConfig | None) -> AttentionCase:
    """A case of `attention_fp8`, with a configuration or without."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    masks, dims = draw_masks(draw, config), draw_dims(draw, config)
    hopper = config if isinstance(config, Sm90AttentionConfig) else None
    divides = config is None or 128 % config.tile_n == 0
    blocks = pick.random() < 0.2 and divides and not (hopper is not None and hopper.watch_sums)
    factors = draw_factors(draw, blocks)
    block = None
    if config is None and pick.random() < 0.15:
        block = pick.choice(((64, 64), (128, 128), (128, 64)))
    layouts = tuple(draw.layout(4, negate=False) for _ in range(3))
    out = draw.layout(4, negate=False, expand=False) if pick.random() < 0.5 else None
    lse = pick.random() < 0.5
    pool = _SMALL if small else _LARGE if data.random() < 0.93 else _LONG
    q_len, k_len = draw.extent(pool), draw.extent(pool)
    kv_heads = data.choice((1, 1, 2) if small else (1, 1, 2, 3, 8))
    heads = kv_heads * pick.choice((1, 2) if small else (1, 2, 4))
    batch = data.choice((1, 1, 2) if small else (1, 2, 3, 0))
    while heads * max(batch, 1) * q_len * k_len > (1 << 14 if small else 1 << 22):
        q_len, k_len = (-(-q_len // 2), k_len) if q_len > k_len else (q_len, -(-k_len // 2))
        kv_heads, heads, batch = (1, heads // kv_heads, min(batch, 1))
    wrong = data.choice(_WRONG) if config is None and data.random() < 0.03 else None
    if wrong is not None:
        q_len, k_len, batch = max(q_len, 1), max(k_len, 1), max(batch, 1)
        factors = (Factor("head", ()), Factor("head", ()), Factor("head", ()))
    case = AttentionCase(
        draw, batch, (heads, kv_heads), (q_len, k_len), dims, (layouts[0], layouts[1], layouts[2]), out=out,
        factors=factors, masks=masks, block=block, lse=lse, config=config, wrong=wrong, mode=draw.mode(),
    )  # fmt: skip
    if block is not None and 0 in (q_len, k_len, batch):
        return replace(case, block=None)
    return case
