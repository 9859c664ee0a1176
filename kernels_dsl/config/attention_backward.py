"""Configurations of the attention backward."""

from __future__ import annotations

from typing import Any

from kernels_dsl.config.attention_sm80 import RESERVED_SMEM
from kernels_dsl.config.problem import H200
from lowering.records import frozen

CUT_WARPS = 8
"""Warps that have keys of a tile whose walk is cut: a count for each."""
FIRST_PIECES = 2
"""Pieces of each of the first tiles, where they are cut, too."""


@frozen
class SumsOfTile:
    """Order of the float32 sums of dQ of a query tile in memory.

    A tile is cut into shares of 64 rows and `columns` columns, as the accumulators of four warps have them:
    (share, eight columns, 4 / `vector`, thread, `vector` elements). A thread has four elements of eight
    columns. GPUs add vectors of four from sm_90 on; for those before, a warp's sums of each of the four lie
    side by side. `across` shares lie side by side, and come before those below them.
    """

    columns: int
    across: int
    vector: int = 4

    @property
    def vectors(self) -> int:
        """Vectors of four elements that a thread has of one share."""
        return self.columns // 8

    @property
    def size(self) -> int:
        """Elements of one share."""
        return 64 * self.columns


@frozen
class Sm90BackwardConfig:
    """One instance of the TMA + WGMMA backward: `tile_q` queries a step, against `tile_k` keys that stay.

    `dim` and `dim_v` are the head dimensions of q, k and of v, rounded up to multiples of 64. `stages` query
    blocks are in flight. `deterministic`: the shares of dQ are added in the order of their keys. `tma_stores`
    False stores dK and dV with predicated stores, which any alignment allows. `gives_q`, `gives_kv`: dQ is
    computed, dK and dV are. `ctas`, 1 or 2, share a tile of keys. A CTA with 64 keys has a warpgroup for each
    product, one with 128 has 64 keys for each warpgroup, and may take `many_tiles`, one after another, as it
    becomes free. dQ is handed over in `sums_buffers` buffers of each warpgroup in shared memory; where there
    is none it adds to the sums itself; `many_tiles` needs one. `stores_first`: the first share of a query
    tile is stored, not added.

    With 128 keys, `short_probs`: P is kept with 16 bits, not 32, until dS is computed. `v_registers`: so many
    columns of V, a multiple of 16, are in registers beside.
    """

    tile_q: int
    dim: int
    dim_v: int
    stages: int = 2
    deterministic: bool = True
    tma_stores: bool = True
    gives_q: bool = True
    gives_kv: bool = True
    tile_k: int = 128
    ctas: int = 1
    sums_buffers: int = 1
    stores_first: bool = True
    many_tiles: bool = False
    short_probs: bool = False
    v_registers: int = 0

    family = "sm90"

    @property
    def cta_keys(self) -> int:
        """Keys of one CTA."""
        return self.tile_k // self.ctas

    @property
    def clears_sums(self) -> bool:
        """Says whether sums of dQ must be 0 before; else the first share of a query tile is stored."""
        return not (self.stores_first and self.sums_buffers)

    @property
    def counts_shares(self) -> bool:
        """Says whether shares of a query tile's dQ are counted: for their order, or for the first of them."""
        return self.deterministic or not self.clears_sums

    @property
    def row_tile(self) -> int:
        """Query rows whose sums lie together in memory."""
        return self.tile_q

    @property
    def dq_share(self) -> tuple[int, int]:
        """Queries and columns of dQ that a warpgroup computes at a time: half of the rows where they are 128,
        else half of the columns. Of 64 keys one warpgroup computes all columns, 64 at a time."""
        if self.cta_keys == 64:
            return 64, 64
        return (64, self.dim) if self.tile_q > 64 else (64, self.dim // 2)

    @property
    def sums(self) -> SumsOfTile:
        """Order of the sums of dQ: a share a warpgroup."""
        columns = self.dim if self.cta_keys == 64 else self.dq_share[1]
        return SumsOfTile(columns, self.dim // columns)

    @property
    def wide_smem_bytes(self) -> int:
        """Shared memory of a CTA of 64 keys: K of all CTAs, V, Q and dO with float32 of their rows, P, dS and
        dQ on their way to another warpgroup or CTA, and some for mbarriers."""
        of_keys = 64 * (self.ctas * self.dim + self.dim_v)
        of_queries = self.stages * self.tile_q * (self.dim + self.dim_v + 4)
        handed = (2 * self.stages + self.ctas - 1) * self.tile_q * 64
        sums = self.sums_buffers * self.tile_q * self.dq_share[1]
        return 2 * (of_keys + of_queries + handed) + 4 * sums + 1024


def sm90_backward_config(
    dim: int,
    dim_v: int,
    deterministic: bool,
    block_q: int = 128,
    block_k: int = 128,
    d_mask: bool = False,
    computes_scores: bool = False,
) -> Sm90BackwardConfig:
    """The tile for these head dimensions, at most 256. `block_q`, `block_k`: rows of listed blocks. `d_mask`:
    the gradient of the mask is stored, which takes registers; `computes_scores`: so does what the variant
    does to each score."""
    d, dv = (-(-x // 64) * 64 for x in (dim, dim_v))
    halves = block_k % 128 != 0
    if max(d, dv) <= (64 if d_mask else 128) and not halves:
        many = max(d, dv) == 64 and block_q % 128 == 0 and not (d_mask or computes_scores)
        tile_q = 128 if many else 64
        return Sm90BackwardConfig(tile_q, d, dv, deterministic=deterministic)
    # Sums of dQ are what limits wide heads: two CTAs add them once for 128 keys, where that fits.
    for ctas in (1,) if d == 64 or halves else (2, 1):
        for buffers in (2, 1, 0):
            config = Sm90BackwardConfig(
                64, d, dv, deterministic=deterministic, tile_k=64 * ctas, ctas=ctas, sums_buffers=buffers
            )
            if config.wide_smem_bytes <= H200.smem_bytes:
                return config
    raise ValueError(f"head dimensions are {dim} and {dim_v}, must be at most 256")


@frozen
class Sm80BackwardConfig:
    """One instance of the cp.async + mma.sync backward: `tile_q` queries a step, against `tile_k` that stay.

    `dim` and `dim_v` are the head dimensions of q, k and of v, rounded up to multiples of 32. Each of `warps`
    warps has `warp_keys` keys, 16 or 32; where that is twice as many as there are, two warps have the same
    keys and half of the queries each. `q_stages` and `do_stages` query blocks of Q and dO are in shared
    memory. `ahead` steps of 16 x 16 elements are read before they are multiplied. `sums_vector` sums of dQ
    are added at a time: 1, or 4 from sm_90 on. Others as in `Sm90BackwardConfig`.

    `by_columns`: half of the warps compute P of their keys and queries, half dS, and then all of them share
    the columns of dK and dV, of 16 keys each. Then `dim` and `dim_v` are multiples of 32 times the warps that
    have the same keys, and `tile_q` is 32 or 64.

    `by_gradients`: half of the warps compute P and dV of their keys, half dS and dK. There are eight then, Q
    and dO have two buffers, and `dim` is `dim_v`.

    `passes`: a warp computes scores of its queries in so many parts, one after another, each with its shares
    of dV and dK: fewer accumulators at a time. By columns that holds for those that compute P.
    """

    tile_k: int
    dim: int
    dim_v: int
    warps: int = 8
    warp_keys: int = 16
    q_stages: int = 2
    do_stages: int = 2
    deterministic: bool = True
    ahead: int = 1
    sums_vector: int = 1
    gives_q: bool = True
    gives_kv: bool = True
    tile_q: int = 64
    by_columns: bool = False
    passes: int = 1
    by_gradients: bool = False

    family = "sm80"
    row_tile = 64
    """Query rows whose sums lie together in memory."""
    clears_sums = True
    """Sums of dQ must be 0 before."""

    @property
    def counts_shares(self) -> bool:
        """Says whether shares of a query tile's dQ are counted, for their order."""
        return self.deterministic

    @property
    def copies_ahead(self) -> bool:
        """Says whether all that a step reads has two buffers, so that none waits for copies at its start."""
        return min(self.q_stages, self.do_stages) > 1

    @property
    def ds_stages(self) -> int:
        """Buffers of dS, or of P and dS: with two of everything a step has one barrier, else two or more."""
        return 2 if self.by_columns or self.copies_ahead else 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: K, V, dS, and Q and dO with the float32 of their rows."""
        of_keys = self.tile_k * (self.dim + self.dim_v + self.ds_stages * self.tile_q)
        of_queries = self.tile_q * (self.q_stages * (self.dim + 2) + self.do_stages * (self.dim_v + 2))
        return 2 * (of_keys + of_queries)

    @property
    def sums(self) -> SumsOfTile:
        """Order of the sums of dQ."""
        return SumsOfTile(self.dim, 1, self.sums_vector)


def sm80_backward_config(
    dim: int,
    dim_v: int,
    deterministic: bool,
    smem_bytes: int = 101376,
    by_elements: bool = False,
    block_k: int = 128,
    d_mask: bool = False,
    packed: bool = False,
) -> Sm80BackwardConfig:
    """The tile for these head dimensions, at most 256, where a CTA may have `smem_bytes` of shared memory.

    `by_elements`: there are masks or functions of single scores, which take registers. `block_k`: keys of a
    listed block, a multiple of 64, of which the tile's must be a divisor. `d_mask`: the gradient of the mask
    is stored, which takes registers. `packed`: so do packed sequences.
    """
    if not (by_elements or d_mask or packed):
        for config, ctas in _sm80_tall_warps(dim, dim_v, deterministic):
            fits = ctas * (config.smem_bytes + RESERVED_SMEM) <= smem_bytes + RESERVED_SMEM
            if fits and block_k % config.tile_k == 0:
                return config
    if max(dim, dim_v) > (64 if d_mask else 128):
        return _sm80_wide_config(dim, dim_v, deterministic, smem_bytes)
    d, dv = (-(-x // 32) * 32 for x in (dim, dim_v))
    # With 128 keys head dimensions between these spill where a window, an order and packing come together.
    many = max(d, dv) <= 64 or (d == dv == 128 and not by_elements)
    for tile_k, stages in ((128, 2), (64, 2), (64, 1)):
        config = Sm80BackwardConfig(tile_k, d, dv, do_stages=stages, deterministic=deterministic)
        if config.smem_bytes <= smem_bytes and (many or tile_k == 64) and block_k % tile_k == 0:
            return config
    raise ValueError(f"a CTA has {smem_bytes} bytes of shared memory, too few for a backward of attention")


def _sm80_tall_warps(dim: int, dim_v: int, deterministic: bool) -> list[tuple[Sm80BackwardConfig, int]]:
    """Tiles whose warps have 32 keys, and CTAs of them that an SM should hold: the best first.

    What bounds these kernels is ldmatrix, which takes four cycles of an SM's shared memory for 16 x 16
    elements: of an operand of 16 rows that is a read for two instructions, of 32 rows one for four. No
    register is left for anything else.
    """
    narrow = tuple(-(-x // 32) * 32 for x in (dim, dim_v))
    d, dv = (-(-x // 64) * 64 for x in (dim, dim_v))
    choices: list[tuple[int, dict[str, Any]]] = []  # CTAs an SM, fields
    if d == dv == 64 and max(dim, dim_v) > 32:
        pair = {"tile_k": 128, "warps": 4, "passes": 2}
        choices = [(2, pair), (1, {"tile_k": 128, "ahead": 0})]
    elif narrow in ((96, 96), (128, 128)):
        d, dv = narrow
        choices = [(1, {"tile_k": 128, "by_gradients": True})]
    elif {d, dv} <= {128, 256} and max(d, dv) == 256:
        columns: dict[str, Any] = {"tile_k": 64, "by_columns": True, "ahead": 0}
        choices = [(1, columns), (1, {**columns, "q_stages": 1, "do_stages": 1})]
    return [
        (Sm80BackwardConfig(dim=d, dim_v=dv, warp_keys=32, deterministic=deterministic, **fields), ctas)
        for ctas, fields in choices
    ]


def _sm80_wide_config(dim: int, dim_v: int, deterministic: bool, smem_bytes: int) -> Sm80BackwardConfig:
    """The same for head dimensions of which one is above 128: 64 keys, or 32 where no more fit."""
    for tile_k, stages in ((64, (2, 2)), (64, (2, 1)), (64, (1, 1)), (32, (2, 1))):
        step = 64 * 64 // tile_k
        d, dv = (-(-x // step) * step for x in (dim, dim_v))
        config = Sm80BackwardConfig(
            tile_k, d, dv, q_stages=stages[0], do_stages=stages[1], deterministic=deterministic, tile_q=32,
            by_columns=True,
        )  # fmt: skip
        if config.smem_bytes <= smem_bytes and max(d, dv) <= 256:
            return config
    raise ValueError(f"head dimensions are {dim} and {dim_v}, must be at most 256")
