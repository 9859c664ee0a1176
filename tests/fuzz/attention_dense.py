"""Cases of `attention` and `scaled_dot_product_attention`: a batch of sequences of one length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention import bias as torch_bias

import kernels_dsl
from kernels_dsl.config.attention_table import AttentionConfig
from tests.fuzz import attention_configs as configs
from tests.fuzz import attention_contents as contents
from tests.fuzz import attention_lists as block_lists
from tests.fuzz import attention_options as masks
from tests.fuzz.attention_contents import Contents, Layouts, Operands
from tests.fuzz.attention_lists import ListsOf
from tests.fuzz.attention_options import Extents, Options, Part
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations

DTYPES = (torch.bfloat16, torch.float16)
LARGE = {
    "decoding": ((1, 1, 1, 2, 4, 7, 16), (1, 17, 128, 300, 1000, 2048, 4097)),
    "short": ((1, 2, 16, 33, 63, 64, 65, 100, 127, 128, 129), (1, 3, 16, 64, 65, 100, 127, 128, 129, 200)),
    "middle": ((64, 129, 191, 192, 193, 255, 300, 385, 512, 700), (1, 64, 130, 255, 256, 257, 500, 640, 900)),
    "long": ((1000, 1024, 1025, 1537, 2100), (1000, 1024, 1300, 2048, 2049)),
    "many": ((1, 8, 33, 64, 65, 100), (1, 64, 100, 129, 200)),
}
"""Pools of lengths of queries and of keys; "many" has large batches."""
SMALL = ((1, 2, 15, 33, 64, 65, 70, 100, 129, 140), (1, 3, 16, 33, 64, 65, 90, 129, 150))
_MOST_SCORES = 1 << 23
_MOST_SMALL_TILES = 8
NAMES = ("q", "k", "v", "query", "key", "value", "attn_mask", "mask", "sinks", "blocks", "block", "scale",
         "softcap", "window", "alignment", "score_mod", "mask_mod", "aux", "out", "config",
         "family")  # fmt: skip


@dataclass(frozen=True)
class DenseCase:
    """One call. `torch_like`: of `scaled_dot_product_attention`, with a `CausalBias` if `bias`, without the
    mode of the batch if `unbatched`. `checked`: within `kernels_dsl.checked()`. `lookup`: contents by which
    each query finds one key."""

    draw: Draw = field(repr=False)
    torch_like: bool
    sizes: Extents
    dtype: torch.dtype
    layouts: Layouts
    options: Options
    lists: ListsOf | None
    return_lse: bool
    config: AttentionConfig | None
    family: str | None
    checked: bool
    bias: bool
    unbatched: bool
    lookup: bool
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        sizes, names = self.sizes, ["scaled_dot_product_attention" if self.torch_like else "attention"]
        names += [f"mode {self.mode.value}", *self.options.features, *self.layouts.features]
        names += self.lists.features if self.lists is not None else []
        names += config_features(self.config, self.family)
        names += ["empty"] if 0 in (sizes.batch, sizes.q_len, sizes.k_len) else []
        names += ["one head"] if sizes.heads == 1 else []
        names += ["groups of heads"] if sizes.group > 1 else []
        names += ["checked"] if self.checked else []
        names += ["log-sum-exp"] if self.return_lse else []
        names += ["lookup"] if self.lookup else []
        return tuple(names)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = (
            Draw("attention values", self.draw.number, self.draw.settings),
            Operations(settings),
        )
        sizes = self.sizes
        made = Contents(
            sizes, sizes.batch, sizes.q_len, sizes.k_len, self.dtype, self.lookup, settings.device,
            seeds.value_seed(),
        )  # fmt: skip
        storage = contents.storage_for(self.layouts.storage, sizes, sizes.q_len == sizes.k_len)
        rows = contents.lay_out(arena, self.layouts, storage, [made.values(g) for g in (0, 1)], packed=False)
        given = masks.give(self.options, sizes, arena, seeds)
        lists = None
        if self.lists is not None:
            lists = block_lists.lay_out(self.lists, given, sizes, arena, seeds)
        out_shape = (sizes.batch, sizes.q_len, sizes.heads, sizes.dim_v)
        out = (
            None if self.layouts.out is None else arena.output("out", out_shape, self.dtype, self.layouts.out)
        )
        if self.torch_like:
            run = self._torch_run(operations, rows, given)
            options = {"layout": "bhsd", "mask": given.mask, **self.options.keywords()}
            tensors: Any = [x.transpose(1, 2) for x in rows]
        else:
            options = {**given.keywords(), "return_lse": self.return_lse, "out": out}
            options.update(config=self.config, family=self.family)
            if self.lists is not None and self.lists.kind == "BlockMask":
                options.pop("mask_mod")
            tensors = rows
            run = self._run(operations, rows, options, lists)
        blocks = {} if lists is None else {"blocks": lists.make()}
        return Call(
            run=run,
            check=lambda results: self._check(results, rows, given, lists),
            arguments=NAMES,
            supports=None
            if self.mode is Mode.GRAPH or settings.plant
            else lambda: operations.attention_supports(*tensors, **options, **blocks),
            may_refuse=self.config is not None,
        )

    def _run(
        self, operations: Operations, rows: Operands, options: dict[str, Any], lists: block_lists.Made | None
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        def run() -> tuple[torch.Tensor, ...]:
            blocks = {} if lists is None else {"blocks": lists.make()}
            with kernels_dsl.checked() if self.checked else nullcontext():
                found = operations.attention(*rows, **options, **blocks)
            found = found if self.return_lse else (found,)
            if options["out"] is not None:
                assert found[0] is options["out"], "the result is not `out`"
            return (*found, *(block_lists.canonical(blocks["blocks"]) if lists and lists.compared else ()))

        return run

    def _torch_run(
        self, operations: Operations, rows: Operands, given: masks.Given
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        options, sizes = self.options, self.sizes
        keywords: dict[str, Any] = {} if options.scale is None else {"scale": options.scale}
        keywords.update({"enable_gqa": True} if sizes.group > 1 else {})
        if options.causal and self.bias:
            corner = options.alignment == "top_left"
            make = torch_bias.causal_upper_left if corner else torch_bias.causal_lower_right
            keywords["attn_mask"] = make(sizes.q_len, sizes.k_len)
        elif options.causal:
            keywords["is_causal"] = True
        elif given.mask is not None:
            keywords["attn_mask"] = given.mask
        tensors = [x.transpose(1, 2) for x in rows]
        tensors = [x[0] for x in tensors] if self.unbatched else tensors

        def run() -> tuple[torch.Tensor, ...]:
            out = operations.scaled_dot_product_attention(*tensors, **keywords)
            return ((out[None] if self.unbatched else out).transpose(1, 2),)

        return run

    def _check(
        self,
        results: tuple[torch.Tensor, ...],
        rows: Operands,
        given: masks.Given,
        lists: block_lists.Made | None,
    ) -> None:
        out, *rest = results
        lse = rest.pop(0) if self.return_lse else None
        sizes = self.sizes
        assert tuple(out.shape) == (sizes.batch, sizes.q_len, sizes.heads, sizes.dim_v), out.shape
        assert out.dtype == self.dtype
        spread = None
        if lists is not None:
            built = block_lists.check_built(tuple(rest), lists)
            if lists.listed:
                spread = block_lists.spread(built, sizes, out.device)
        part = Part(sizes.batch, sizes.heads, sizes.q_len, sizes.k_len)
        contents.check(out, lse, rows, masks.masking(given, part, spread), self.options.scale)


def config_features(config: AttentionConfig | None, family: str | None) -> list[str]:
    """Names of a forced configuration and family."""
    names = [f"family {family}"] if family is not None else []
    if config is None:
        return names
    pack = getattr(config, "pack", 1)
    names += [f"pack {pack}"] if pack > 1 else []
    return [*names, configs.name_of(config)]


def head_dims(draw: Draw, config: AttentionConfig | None) -> tuple[int, int]:
    """D and Dv: multiples of 8 that round up to one tile, that of `config`, in all cases of a block."""
    padded = (32, 64, 64, 64, 96, 128, 128) if draw.settings.small else (32, 64, 64, 96, 128, 128, 192, 256)
    tile = draw.kernel.choice(padded)
    tiles = (tile, draw.often(tile, *padded, odds=0.6))
    tiles = tiles if config is None else (config.dim, config.dim_v)
    found = []
    for size in tiles:
        step = 64 if size > 128 else 32
        found.append(size if draw.data.random() < 0.6 else draw.data.randrange(size - step + 8, size + 1, 8))
    dim, dim_v = found
    return dim, dim if tiles[0] == tiles[1] and draw.data.random() < 0.7 else dim_v


def heads_of(draw: Draw) -> tuple[int, int]:
    """(heads of K and V, query heads of each)."""
    small = draw.settings.small
    group = draw.kernel.choice((1, 1, 2, 3, 4) if small else (1, 1, 1, 2, 3, 4, 5, 8, 16))
    heads = draw.data.choice((1, 1, 2) if small or group > 4 else (1, 1, 2, 3, 4))
    return heads, group


def draw_sizes(draw: Draw, config: AttentionConfig | None) -> Extents:
    """Sizes of a dense call."""
    data, kind = draw.data, draw.kernel.choice((*LARGE, "short", "middle"))
    small = draw.settings.small
    pools = SMALL if small else LARGE[kind]
    heads, group = heads_of(draw)
    dim, dim_v = head_dims(draw, config)
    batch = draw.extent((1, 1, 2) if small else (20, 40, 70) if kind == "many" else (1, 1, 2, 3, 5))
    q_len, k_len = draw.extent(pools[0]), draw.extent(pools[1])
    if data.random() < 0.25:
        k_len = q_len
    while (
        small and heads * group * _tiles(batch, q_len, k_len) * max(dim, dim_v, 64) > _MOST_SMALL_TILES * 64
    ):
        if (
            heads * group * max(dim, dim_v, 64) > _MOST_SMALL_TILES * 64
            and (batch, q_len) <= (1, 64)
            and k_len <= 64
        ):
            break
        batch, q_len, k_len = min(batch, 1), q_len * 2 // 3, k_len * 2 // 3
    while batch * heads * group * q_len * k_len > _MOST_SCORES and batch > 1:
        batch = batch // 2
    return Extents(batch, q_len, k_len, heads, group, dim, dim_v)


def _tiles(batch: int, q_len: int, k_len: int) -> int:
    """Tiles of 64 queries and 64 keys of a head."""
    return batch * -(-q_len // 64) * -(-k_len // 64)


def draw_dense(draw: Draw) -> DenseCase:
    """A case of one of the two operations."""
    pick, planted = draw.kernel, draw.settings.plant is not None
    config = None if planted else configs.forced(draw)
    torch_like = config is None and pick.random() < 0.45 and not planted
    family = pick.choice((None, *configs.families(draw.arch())))
    sizes = draw_sizes(draw, config)
    options = masks.draw_options(draw)
    lists = block_lists.draw_lists(draw, block_lists.DENSE_KINDS, config, 0.22)
    lists = None if planted or torch_like else lists
    if config is not None:
        family = pick.choice((None, config.family))
        packs = configs.packed(draw, config, sizes.group)
        config = packs if options.packable and lists is None else config
    bias = draw.data.random() < 0.3
    if torch_like or planted:
        options = masks.plain(options, keep_mask=torch_like)
        upper = not planted and not (options.causal and bias and pick.random() < 0.5)
        options = replace(options, alignment="top_left" if upper else "bottom_right")
    if lists is not None:
        options = block_lists.fit(lists, options)
        if lists.kind in ("documents", "BlockMask"):
            sizes = replace(
                sizes, q_len=max(sizes.q_len, 1), k_len=max(sizes.k_len, 1), batch=max(sizes.batch, 1)
            )
        if lists.kind == "documents":
            sizes = replace(sizes, k_len=sizes.q_len)
    lookup = draw.data.random() < 0.4
    if lookup:
        options = replace(options, scale=contents.LOOKUP_SCALE)
    mode = draw.mode()
    return DenseCase(
        draw, torch_like, sizes, pick.choice(DTYPES),
        contents.draw_layouts(draw, 4, with_out=1.0 if planted else 0.0 if torch_like else 0.6),
        options, lists, return_lse=pick.random() < 0.5 and not torch_like and not planted, config=config,
        family=None if torch_like or planted else family,
        checked=draw.data.random() < 0.1 and mode in (Mode.PLAIN, Mode.STREAM) and not planted,
        bias=bias, unbatched=torch_like and sizes.batch == 1 and draw.data.random() < 0.3, lookup=lookup,
        mode=mode,
    )  # fmt: skip
