"""Configurations of the attention kernels: plain frozen data, free of any compiler import.

`AttentionVariant` says what is computed beyond plain attention, `Sm90AttentionConfig` how. Both are part
of a kernel's cache key; sizes, window widths, the scale and the softcap's value are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kernels_dsl.config.family import FAMILIES
from kernels_dsl.config.wgmma import SM90_RESERVED_SMEM, why_not_wgmma_columns
from lowering.records import frozen

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
"""Head dimensions are multiples of this: 16 bytes, which TMA wants of every stride."""


@frozen
class AttentionVariant:
    """The scores that are masked or changed. With i a query's and j a key's place in their sequences:

    `right`: j <= i + shift + right. `left`: j >= i + shift - left. The widths are runtime arguments;
    causal is `right` with width 0. `shift` is len(k) - len(q), or 0 with `top_left`.
    `mask` is None, "boolean" (true: attend) or "additive". `score_mod(score, b, h, i, j, *aux)` and
    `mask_mod(b, h, i, j, *aux)` are user functions that are traced into the kernel. A backward pass alone has
    `score_mod_bwd(gradient, score, b, h, i, j, *aux)`, the gradient of the score that `score_mod` is given.
    `lists` visits the key blocks of lists instead of a range; it is the size of a listed block in
    (query, key) tiles.
    """

    right: bool = False
    left: bool = False
    top_left: bool = False
    softcap: bool = False
    sinks: bool = False
    mask: str | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    lists: tuple[int, int] | None = None
    score_mod_bwd: Callable[..., Any] | None = None

    @property
    def changes_scores(self) -> bool:
        """Scores are more than a scaled product, so they cannot be scaled inside of the exponential."""
        return self.softcap or self.score_mod is not None or self.mask == "additive"

    @property
    def caps_last(self) -> bool:
        """Nothing looks at scores between the softcap and the exponential."""
        return self.softcap and self.score_mod is None and self.mask != "additive"

    @property
    def by_elements(self) -> bool:
        """There are masks or functions of single scores."""
        return self.changes_scores or self.mask is not None or self.mask_mod is not None

    @property
    def computes_scores(self) -> bool:
        """Each score of any block is changed, or looked up or computed whether it is seen."""
        functions = self.mask_mod is not None and self.lists is None
        return self.changes_scores or self.mask is not None or functions

    @property
    def bends_scores(self) -> bool:
        """The derivative of a score by its scaled product is other than 1."""
        return self.softcap or self.score_mod is not None

    @property
    def hides_anywhere(self) -> bool:
        """Any score may become -inf, also in blocks that are not masked."""
        return self.mask is not None or self.score_mod is not None

    @property
    def masks_everywhere(self) -> bool:
        """Every block must be looked at element by element, wherever it is."""
        return self.hides_anywhere or (self.mask_mod is not None and self.lists is None)

    @property
    def packable(self) -> bool:
        """Rows of one tile may be of several heads: nothing but their places decides what they see."""
        options = (self.mask, self.score_mod, self.mask_mod, self.lists)
        return not self.sinks and all(x is None for x in options)

    @property
    def uneven(self) -> bool:
        """Query tiles differ in the number of key blocks that they visit: they are handed out one by one."""
        return self.right or self.left or self.lists is not None


@frozen
class Sm90AttentionConfig:
    """One instance of the TMA + WGMMA kernel.

    `tile_m` query rows, 64 a consumer warpgroup, and `tile_n` keys a step. `dim` and `dim_v` are the head
    dimensions of q, k and of v, o, rounded up as the tiles in shared memory need it. `stages` steps of K
    and as many of V are in flight. `pingpong` passes the right to issue WGMMA from
    warpgroup to warpgroup. `o_tma` False stores O with predicated global stores, which any alignment allows.
    `lazy_rescale` lets a row's maximum fall behind by `softmax.SLACK_LOG2`, so that the output is seldom
    rescaled. `late_wait` has a block's exponentials done before the product of the block before is waited
    for; the compiler likes to wait sooner. `ctas_per_sm` is 1, or 2 where the tiles leave room for it (one
    consumer warpgroup).
    `pack` query heads of one KV head share a tile, of tile_m / pack queries: one of `PACKS` that divides
    their number.
    With block lists: `joined` blocks, of tile_n / joined keys each, are taken in one step, wherever their
    keys are (16-bit operands only). `longest_first`: query tiles with long lists begin before others, once
    lists are seen again as they were.
    For fp8 operands: `watch_sums`, without sinks and without factors a block of keys: no maxima, see
    `blocks.attention.softmax_no_max`. Then one in `linear_exps` exponentials, if not 0, is taken without
    MUFU, with an error of -4 to 2 %, unless the log-sum-exp is asked for. `turns_v`, up to tile_m 128: the
    kernel transposes V itself, each CTA the blocks that it visits, in place of a kernel before it.
    `later_v`, with tile_m 192 and dense sequences: the kernel before transposes V of so many
    LATER_SHARES-ths of the heads only, whose tiles come first, and idle warps of the attention do the rest
    beside them, `later_keys` keys at a time.
    """

    tile_m: int
    tile_n: int
    dim: int
    dim_v: int
    stages: int = 2
    pingpong: bool = True
    o_tma: bool = True
    lazy_rescale: bool = False
    late_wait: bool = False
    watch_sums: bool = False
    linear_exps: int = 0
    ctas_per_sm: int = 1
    pack: int = 1
    turns_v: bool = False
    later_v: int = 0
    later_keys: int = 32
    joined: int = 1
    longest_first: bool = False

    family = "sm90"
    traits = FAMILIES[family]

    def several_tiles(self, extent: Extent) -> bool:
        """Says that some CTA of a persistent launch gets more than one query tile."""
        return extent.tiles(self.tile_m, self.pack) > extent.sms * self.ctas_per_sm


def padded_dim(dim: int) -> int:
    """Head dimension of a tile in shared memory: a multiple of 32, of 64 from 128 on."""
    step = 32 if dim <= 128 else 64
    return -(-dim // step) * step


L2_BYTES = 32 << 20
"""Bytes for K and V of the heads that are worked on together: the rest of an H200's 50 MB of L2 is for Q, O
and the next group of heads."""
TRANSPOSING_WARPS = 3
"""Of the producer warpgroup, that transpose V beside the attention."""
LATER_SHARES = 8
"""The unit of `Sm90AttentionConfig.later_v`: so many shares are all heads."""
LATER_V = 2
"""The share where it is used."""
LATER_NUMBERS = 3
"""int32 of `kernels.attention.forward_sm90_deferred`, 0 before a launch and after it."""
LATER_KEYS_FROM = 2048
"""Keys from which on `later_v` was measured to gain, on an H200."""
DESCALE_KEYS = 128
"""Keys that share a factor where fp8 K or V have one a block of keys."""
PACKS = (1, 2, 4, 8, 16, 32, 64)
"""Query heads of one KV head that can share a tile: they divide a warpgroup's 64 rows."""
TILE_COST = {64: 8.0, 128: 12.0, 192: 14.8}
"""Query rows of a tile -> relative time of one, as measured on an H200 with short sequences."""
PAIR_COST = 11.6
"""The same for two CTAs of 64 rows on one SM, which head dimensions up to 64 leave room for."""
MANY_ROUNDS, MANY_SHORT_KEYS = 16, (256, 512)
"""Rounds of pairs from which on, above and up to so many keys, one CTA of 128 rows without turns is faster
than two of 64 under a causal mask: K and V are read from L2 half as often. As measured on an H200."""
FP8_TALL_COST, FP8_TALL_LONG_COST = 16.5, 14.8
"""The same for 192 rows of fp8 operands of head dimensions above 96, whose blocks of keys are small then; the
second one from LATER_KEYS_FROM keys and FP8_TALL_TILES such tiles an SM on, as measured there."""
FP8_TALL_TILES = 5
FEW_KEYS = 512
"""Up to so many, fp8 attention keeps maxima: the first blocks of watched sums take longer."""
TURNED_VALUES = 1024 * 128
"""Elements of V, of one head, up to which a CTA transposes them itself; as measured on an H200."""


@frozen
class Extent:
    """Sizes that decide between tiles: query rows and keys of a sequence, heads of all sequences, SMs.

    `group` query heads have one head of keys.
    """

    rows: int
    keys: int
    heads: int
    sms: int
    group: int = 1

    def tiles(self, tile_m: int, pack: int = 1) -> int:
        """Query tiles of `tile_m` rows, in which `pack` heads of a group alternate."""
        return -(-self.rows * pack // tile_m) * (self.heads // pack)


def sm90_config(
    dim: int, dim_v: int, variant: AttentionVariant, extent: Extent | None = None
) -> Sm90AttentionConfig:
    """The tile for these head dimensions, where key blocks are not listed. No `extent`: for large ones."""
    d, dv = padded_dim(dim), padded_dim(dim_v)
    widest = max(d, dv)
    busy = variant.masks_everywhere or variant.changes_scores or variant.mask_mod is not None
    heights = [(192, 1), (128, 1), (64, 1)] if widest <= 96 and not busy else [(128, 1), (64, 1)]
    if widest <= 64 and not busy:
        heights.append((64, 2))
    (tile_m, ctas), pack = heights[0], 1
    if extent is not None:

        def cost(choice: tuple[tuple[int, int], int]) -> float:
            (rows, ctas), pack = choice
            rounds = -(-extent.tiles(rows, pack) // (extent.sms * ctas))
            one = TILE_COST[rows] if ctas == 1 else PAIR_COST
            return rounds * one * _visited(variant, extent, rows // pack)

        packs = [p for p in PACKS if extent.group % p == 0] if variant.packable else [1]
        # The first of equals: the fewest heads, the tallest tile.
        (tile_m, ctas), pack = min(((height, p) for p in packs for height in heights), key=cost)
    tile_n = _sm90_keys(widest, tile_m, variant, busy, extent.keys if extent is not None else 1 << 20)
    if widest == 192 and dv <= 128 and tile_n < 112:
        tile_n = 112
    # With 176 keys steps are long, and turns cost 1 to 2 %, as measured on an H200.
    stages, pingpong = 2, widest <= 128 and tile_n <= 128
    if ctas == 2 and variant.right and not variant.left and extent is not None:
        rounds = extent.tiles(tile_m, pack) / (extent.sms * ctas)
        low, high = MANY_SHORT_KEYS
        if rounds >= MANY_ROUNDS and low < extent.keys <= high:
            tile_m, tile_n, stages, ctas, pingpong = 128, 128, 3, 1, False
        elif rounds > 1:  # else latency counts, and fewer steps are better
            tile_n, stages = 64, 4
    return Sm90AttentionConfig(
        tile_m, tile_n, d, dv, stages, pingpong, lazy_rescale=True, ctas_per_sm=ctas, pack=pack
    )


def _visited(variant: AttentionVariant, extent: Extent, queries: int) -> float:
    """Share of the key blocks that tiles of `queries` visit: a causal mask spares low tiles more of them."""
    blocks = -(-extent.keys // 128)
    if not (variant.right and extent.rows) or variant.left or not 1 < blocks <= 32:
        return 1.0
    tiles = -(-extent.rows // queries)
    shift = extent.keys - extent.rows
    ends = (min((i + 1) * queries, extent.rows) + shift for i in range(tiles))
    return sum(max(1, -(-end // 128)) for end in ends) / (tiles * blocks)


def sm90_fp8_config(
    dim: int, dim_v: int, variant: AttentionVariant, extent: Extent, by_block: bool = False
) -> Sm90AttentionConfig:
    """The tile for fp8 operands of these head dimensions, where key blocks are not listed.

    `by_block`: K or V have a factor a block of keys.
    """
    d, dv = padded_dim(dim), padded_dim(dim_v)
    widest = max(d, dv)
    watch = not (variant.sinks or by_block) and extent.keys > FEW_KEYS
    tall = widest <= (128 if watch else 96) and not variant.changes_scores
    heights = [192, 128, 64] if tall else [128, 64]

    def cost(rows: int) -> float:
        one, rounds = TILE_COST[rows], -(-extent.tiles(rows) // extent.sms)
        if rows == 192 and widest > 96:
            many = extent.keys >= LATER_KEYS_FROM and extent.tiles(rows) >= FP8_TALL_TILES * extent.sms
            one = FP8_TALL_LONG_COST if many else FP8_TALL_COST
        return rounds * one * _visited(variant, extent, rows)

    tile_m = min(heights, key=cost)  # the first of equals: the tallest
    # As measured on an H200 from 4096 keys on.
    plain = not (variant.left or variant.changes_scores)
    wide = 96 < widest <= 128 and plain and extent.keys >= 2048
    tile_n = (160 if watch else 192) if wide else 128
    if tile_m == 192 and widest > 96:
        tile_n = 96
    if widest > 192 and (variant.changes_scores or tile_m == 64):
        tile_n = 96  # 128 keys would spill
    if by_block:
        tile_n = DESCALE_KEYS if tile_n >= DESCALE_KEYS else DESCALE_KEYS // 2
    return Sm90AttentionConfig(
        tile_m, tile_n, d, dv, stages=3 if tile_n == 96 and tile_m == 192 else 2,
        pingpong=widest <= 128, late_wait=wide and not watch, watch_sums=watch,
        linear_exps=3 if watch and widest <= 128 else 0,
    )  # fmt: skip


def turning_v(config: Sm90AttentionConfig, variant: AttentionVariant, extent: Extent) -> Sm90AttentionConfig:
    """`config` for fp8 operands of dense sequences, with what transposes V beside a kernel of its own.

    `turns_v` for a launch of at most a tile an SM with few keys. There a kernel less is what counts, for the
    host too. Each tile transposes what it visits, and from more keys on that takes longer than the rest.
    `later_v` for long sequences: a quarter of the heads is a tile an SM or more, and their products last
    until the others are transposed, as those of a window do not.
    """
    if config.tile_m == 192 and config.watch_sums and not variant.left:
        tiles = extent.tiles(config.tile_m) * LATER_V // LATER_SHARES
        if extent.keys >= LATER_KEYS_FROM and tiles >= extent.sms:
            # 64 keys at a time are faster, where shared memory has room for them and the output both.
            few = extent.keys < 4096 or max(config.dim, config.dim_v) <= 96
            return replace(config, later_v=LATER_V, later_keys=64 if few else 32)
    many = extent.keys * config.dim_v > TURNED_VALUES
    if many or config.tile_m > 128 or config.several_tiles(extent):
        return config
    return replace(config, turns_v=True)


def _sm90_keys(widest: int, tile_m: int, variant: AttentionVariant, busy: bool, keys: int) -> int:
    """Keys of a step: what registers and shared memory hold, or less where edges cut many tiles."""
    if widest <= 96:
        return 112 if widest > 64 and tile_m == 192 else 128
    if widest <= 128:
        short = variant.left or keys < 8192
        return 128 if busy or short or tile_m == 64 else 176
    return 96 if widest <= 192 else 64


def sm90_why_not(config: Sm90AttentionConfig, smem_bytes: int, element_bytes: int) -> str | None:
    """Says why a configuration cannot be compiled for operands of `element_bytes`; None if it can.

    A CTA may have `smem_bytes` of shared memory.
    """
    if config.tile_m not in (64, 128, 192):
        return f"tile_m is {config.tile_m}, must be 64, 128 or 192"
    step = 16 if element_bytes > 1 else 32
    if config.tile_n % step or not step <= config.tile_n <= 256:
        return f"tile_n is {config.tile_n}, must be a multiple of {step} from {step} to 256"
    for name in ("dim", "dim_v"):
        size = getattr(config, name)
        if size % 32 or not 32 <= size <= MAX_HEAD_DIM:
            return f"{name} is {size}, must be a multiple of 32 from 32 to {MAX_HEAD_DIM}"
    if config.ctas_per_sm not in (1, 2) or (config.ctas_per_sm == 2 and config.tile_m > 64):
        return f"ctas_per_sm is {config.ctas_per_sm}, must be 1, or 2 with tile_m 64"
    if config.stages < 1:
        return f"stages is {config.stages}, must be 1 or more"
    if config.joined < 1 or config.tile_n % (step * config.joined):
        return f"joined is {config.joined}, must divide tile_n into multiples of {step}"
    if element_bytes == 1 and config.joined > 1:
        return f"joined is {config.joined}, must be 1 with fp8"
    if config.pack not in PACKS:
        return f"pack is {config.pack}, must be one of {PACKS}"
    if element_bytes == 1 and config.lazy_rescale:
        return "lazy_rescale is True, must be False with fp8"
    for name in ("watch_sums", "linear_exps", "turns_v", "later_v"):
        value = getattr(config, name)
        if element_bytes > 1 and value:
            return f"{name} is {value}, must be {type(value)()}: it is for fp8"
    columns, consumers = max(config.tile_n, config.dim_v), config.tile_m // 64
    return why_not_wgmma_columns(columns, consumers, config.ctas_per_sm) or _why_not_smem(
        config, smem_bytes, element_bytes
    )


def _why_not_smem(config: Sm90AttentionConfig, smem_bytes: int, element_bytes: int) -> str | None:
    """As the kernel divides shared memory: tiles, then two buffers of the output, perhaps where Q was."""
    tiles = config.tile_m * config.dim
    tiles += config.tile_n * config.stages * (config.dim + config.dim_v)
    if config.turns_v:
        tiles += (2 if config.dim_v <= 128 else 1) * config.tile_n * config.dim_v
    if config.later_v:
        tiles += 2 * TRANSPOSING_WARPS * config.later_keys * config.dim_v
    needed = SM90_RESERVED_SMEM + tiles * element_bytes
    # The SM keeps 1 KB for itself of each CTA's share.
    there = smem_bytes if config.ctas_per_sm == 1 else (smem_bytes - 1024) // 2
    columns = math.gcd(config.dim_v, 32)
    if element_bytes == 1 and config.tile_m == 192 and config.dim_v == 128:
        columns = 64
    if element_bytes == 1 or config.dim % 64:  # the output's buffers have a place of their own
        needed += 2 * config.tile_m * columns * 2
    return f"it takes {needed} bytes of shared memory, there are {there}" if needed > there else None


def split_of(config: Any, block: tuple[int, int]) -> tuple[int, int]:
    """The size of a listed block in (query, key) tiles of a configuration. ValueError where it is not a whole
    number of them."""
    tile = config.tile_m, config.tile_n // config.joined
    if block[0] % tile[0] or block[1] % tile[1]:
        raise ValueError(f"config has tiles of {tile}, must have such that blocks of {block} are whole tiles")
    return block[0] // tile[0], block[1] // tile[1]


def sm90_list_config(
    dim: int, dim_v: int, block: tuple[int, int], element_bytes: int = 2, with_mask: bool = False
) -> tuple[Sm90AttentionConfig, tuple[int, int]]:
    """The tile for listed blocks of (query, key) `block`, and how many of them such a block is.

    `with_mask`: there is a mask tensor too, which takes registers. ValueError where no tile divides the
    block.
    """
    if any(size % 64 or size <= 0 for size in block):
        raise ValueError(f"block is {block}, must be multiples of 64")
    d, dv = padded_dim(dim), padded_dim(dim_v)
    widest, tall, long = max(d, dv), block[0] % 128 == 0, block[1] % 128 == 0
    tile_m = 128 if tall else 64
    if element_bytes == 1:
        tile_n = 128 if long and widest <= 128 else 64
        config = Sm90AttentionConfig(tile_m, tile_n, d, dv, pingpong=widest <= 128)
        return config, split_of(config, block)
    config = Sm90AttentionConfig(
        tile_m, 64, d, dv, pingpong=widest < 128, lazy_rescale=True, longest_first=not with_mask
    )
    if widest <= 128:
        config = replace(config, ctas_per_sm=1 if tall else 2)
        if (tall or widest <= 64) and (long or not with_mask):
            config = replace(config, tile_n=128, joined=1 if long else 2)
    return config, split_of(config, block)
