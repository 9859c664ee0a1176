"""Configurations of the attention kernels: plain frozen data, free of any compiler import.

`AttentionVariant` says what is computed beyond plain attention, `Sm90AttentionConfig` how. Both are part
of a kernel's cache key; sizes, window widths, the scale and the softcap's value are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
"""Head dimensions are multiples of this: 16 bytes, which TMA wants of every stride."""


@dataclass(frozen=True)
class AttentionVariant:
    """Which scores are masked or changed. With i a query's and j a key's place in their sequences:

    `right`: j <= i + shift + right. `left`: j >= i + shift - left. The widths are runtime arguments;
    causal is `right` with width 0. `shift` is len(k) - len(q), or 0 with `top_left`.
    `mask` is None, "boolean" (true: attend) or "additive". `score_mod(score, b, h, i, j, *aux)` and
    `mask_mod(b, h, i, j, *aux)` are user functions that are traced into the kernel.
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

    @property
    def changes_scores(self) -> bool:
        """Scores are more than a scaled product, so they cannot be scaled inside of the exponential."""
        return self.softcap or self.score_mod is not None or self.mask == "additive"

    @property
    def hides_anywhere(self) -> bool:
        """Any score may become -inf, also in blocks that are not masked."""
        return self.mask is not None or self.score_mod is not None

    @property
    def masks_everywhere(self) -> bool:
        """Every block must be looked at element by element, wherever it is."""
        return self.hides_anywhere or (self.mask_mod is not None and self.lists is None)

    @property
    def uneven(self) -> bool:
        """Query tiles differ in the number of key blocks that they visit: they are handed out one by one."""
        return self.right or self.left or self.lists is not None


@dataclass(frozen=True)
class Sm90AttentionConfig:
    """One instance of the TMA + WGMMA kernel.

    `tile_m` query rows, 64 a consumer warpgroup, and `tile_n` keys a step. `dim` and `dim_v` are the head
    dimensions of q, k and of v, o, rounded up as the tiles in shared memory need it. `stages` blocks of K
    and as many of V are in flight. `pingpong` passes the right to issue WGMMA from warpgroup to
    warpgroup. `o_tma` False stores O with predicated global stores, which any alignment allows.
    `lazy_rescale` lets a row's maximum fall behind by `softmax.SLACK_LOG2`, so that the output is seldom
    rescaled.
    """

    tile_m: int
    tile_n: int
    dim: int
    dim_v: int
    stages: int = 2
    pingpong: bool = True
    o_tma: bool = True
    lazy_rescale: bool = True

    family = "sm90"


def padded_dim(dim: int) -> int:
    """Head dimension of a tile in shared memory: a multiple of 32, of 64 from 128 on."""
    step = 32 if dim <= 128 else 64
    return -(-dim // step) * step


def sm90_config(dim: int, dim_v: int, variant: AttentionVariant) -> Sm90AttentionConfig:
    """The tile for these head dimensions, where key blocks are not listed."""
    d, dv = padded_dim(dim), padded_dim(dim_v)
    widest = max(d, dv)
    if widest <= 96:
        return Sm90AttentionConfig(192, 128 if widest <= 64 else 96, d, dv)
    if widest <= 128:
        if variant.masks_everywhere or variant.changes_scores or variant.mask_mod is not None:
            return Sm90AttentionConfig(128, 128, d, dv)  # registers for more than a softmax
        return Sm90AttentionConfig(192, 80, d, dv)
    if widest <= 192:
        return Sm90AttentionConfig(128, 112 if dv <= 128 else 96, d, dv, pingpong=False)
    return Sm90AttentionConfig(128, 80, d, dv, pingpong=False)


def sm90_list_config(
    dim: int, dim_v: int, block: tuple[int, int]
) -> tuple[Sm90AttentionConfig, tuple[int, int]]:
    """The tile for listed blocks of (query, key) `block`, and how many of them such a block is.

    ValueError where no tile divides the block.
    """
    d, dv = padded_dim(dim), padded_dim(dim_v)
    tile_m = 128 if block[0] % 128 == 0 else 64
    tile_n = 128 if block[1] % 128 == 0 and max(d, dv) <= 128 else 64
    if block[0] % tile_m or block[1] % tile_n or min(block) <= 0:
        raise ValueError(f"block is {block}, must be multiples of 64")
    config = Sm90AttentionConfig(tile_m, tile_n, d, dv, pingpong=max(d, dv) <= 128)
    return config, (block[0] // tile_m, block[1] // tile_n)
