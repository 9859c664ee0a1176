"""Configurations of the SM80-class attention kernel: cp.async, ldmatrix, mma.sync."""

from __future__ import annotations

from dataclasses import replace

from kernels_dsl.config.attention import AttentionVariant, Extent, padded_dim
from kernels_dsl.config.family import FAMILIES
from lowering.records import NamedTuple, frozen


@frozen
class Sm80AttentionConfig:
    """One instance of the mma.sync kernel.

    `tile_m` query rows, shared by `warps` warps of 16 or 32 rows each, and `tile_n` keys a step. `dim` and
    `dim_v` are the head dimensions of q, k and of v, o, rounded up to multiples of 32. K and V have two
    buffers each. `q_registers` keeps Q in registers instead of reading it from shared memory at every step.
    `overlap` multiplies the last block's probabilities with V beside the softmax of this one, at the price of
    their registers. `ahead` steps of 16 x 16 elements of K and V are read before they are multiplied.
    `ctas_per_sm` is what the registers are budgeted for. `lazy_rescale` as in `Sm90AttentionConfig`.
    `element_bytes` is 1 for fp8 operands: then `tile_n` is 64 or 128 and head dimensions are multiples of 64.
    """

    tile_m: int
    tile_n: int
    dim: int
    dim_v: int
    warps: int = 4
    q_registers: bool = False
    overlap: bool = False
    ahead: int = 1
    ctas_per_sm: int = 1
    lazy_rescale: bool = False
    element_bytes: int = 2

    family = "sm80"
    traits = FAMILIES[family]
    # Of what the other family has a choice.
    pack, joined, later_v, later_keys = 1, 1, 0, 32
    turns_v = watch_sums = longest_first = False

    def several_tiles(self, extent: Extent) -> bool:
        """Says that some CTA gets more than one query tile."""
        return False

    @property
    def q_bytes(self) -> int:
        """Of shared memory for Q, and later for the output, whose elements have 16 bits."""
        return self.tile_m * max(self.element_bytes * self.dim, 2 * self.dim_v)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: Q, which the output is staged in later, and two buffers of K and V."""
        return self.q_bytes + 2 * self.element_bytes * self.tile_n * (self.dim + self.dim_v)


class _Tile(NamedTuple):
    """A tile, its warps and the CTAs of an SM that its registers are budgeted for."""

    m: int
    n: int
    warps: int = 4
    ctas: int = 2
    overlap: bool = True
    q_registers: bool = False
    ahead: int = 1


# By the wider head dimension, in the order of preference: the first of which all CTAs of an SM find room in
# shared memory is taken. None of them spills. The last ones are those of 100 KB (sm_86, sm_89, sm_120).
_TILES: dict[int, tuple[_Tile, ...]] = {
    64: (_Tile(128, 64),),
    96: (_Tile(128, 64, overlap=False), _Tile(128, 32)),
    128: (_Tile(128, 64, overlap=False, ahead=0), _Tile(128, 32), _Tile(64, 32)),
    192: (_Tile(128, 64, warps=8, ctas=1, q_registers=True), _Tile(128, 32, warps=8, ctas=1)),
    256: (_Tile(128, 64, warps=8, ctas=1), _Tile(128, 32, warps=8, ctas=1), _Tile(64, 32, ctas=1)),
}
# What is looked at one by one takes registers: for places, and for addresses in a mask.
_BUSY_TILES: dict[int, tuple[_Tile, ...]] = {
    64: (_Tile(128, 64, overlap=False),),
    96: (_Tile(128, 64, overlap=False), _Tile(128, 32, overlap=False)),
    128: (_Tile(128, 32, overlap=False), _Tile(64, 32, overlap=False)),
    192: (_Tile(128, 64, 8, 1, overlap=False), _Tile(128, 32, 8, 1, overlap=False)),
    256: (
        _Tile(128, 64, 8, 1, overlap=False),
        _Tile(128, 32, 8, 1, overlap=False),
        _Tile(64, 32, ctas=1, overlap=False),
    ),
}
# Of fp8 operands, of which an instruction takes 32 keys.
_FP8_TILES: dict[int, tuple[_Tile, ...]] = {
    64: (_Tile(128, 64, overlap=False),),
    128: (_Tile(128, 64, overlap=False), _Tile(128, 64, warps=8, ctas=1, overlap=False)),
    192: (_Tile(128, 64, 8, 1, overlap=False),),
    256: (_Tile(128, 64, 8, 1, overlap=False), _Tile(64, 64, ctas=1, overlap=False)),
}
RESERVED_SMEM = 1024
"""Shared memory that an SM keeps for itself of each CTA's share."""


def _is_few(config: Sm80AttentionConfig, variant: AttentionVariant, extent: Extent | None) -> bool:
    """True where tiles of half the rows are done sooner: they leave no SM idle, or even out unequal tiles."""
    if extent is None:
        return False
    tiles = -(-extent.rows // config.tile_m) * extent.heads
    return tiles * (1 if variant.uneven else 2) <= extent.sms * config.ctas_per_sm


def sm80_config(
    dim: int,
    dim_v: int,
    variant: AttentionVariant,
    smem_bytes: int,
    extent: Extent | None = None,
    rows: int = 128,
    element_bytes: int = 2,
) -> Sm80AttentionConfig:
    """The tile for these head dimensions on a GPU where a CTA may have `smem_bytes` of shared memory.

    No `extent`: for large problems. A tile has no more than `rows` rows.
    """
    fp8 = element_bytes == 1
    d, dv = padded_dim(dim), padded_dim(dim_v)
    if fp8 or max(d, dv) > 128:  # eight warps cannot share out 32 rows of 32 columns
        d, dv = -(-d // 64) * 64, -(-dv // 64) * 64
    table = _BUSY_TILES if variant.changes_scores or variant.masks_everywhere else _TILES
    table = _FP8_TILES if fp8 else table
    found = [
        (tile.ctas, Sm80AttentionConfig(
            tile.m, tile.n, d, dv, warps=tile.warps, q_registers=tile.q_registers, overlap=tile.overlap,
            ahead=tile.ahead, lazy_rescale=not fp8, ctas_per_sm=tile.ctas, element_bytes=element_bytes,
        ))
        for tile in table[min(size for size in table if size >= max(d, dv))]
    ]  # fmt: skip
    room = smem_bytes + RESERVED_SMEM
    fitting = (c for ctas, c in found if ctas * (c.smem_bytes + RESERVED_SMEM) <= room)
    config = next(fitting, found[-1][1])
    if config.tile_m > 64 and (
        _is_few(config, variant, extent) or rows < config.tile_m or variant.mask is not None
    ):
        # Half the rows a CTA: work for SMs that had none, and more registers, at the price of more reads.
        config = replace(config, tile_m=64, warps=4, overlap=table is _TILES, ahead=1)
    if variant.mask == "boolean" and max(d, dv) > 128:
        config = replace(config, tile_n=16)
    return config


def sm80_list_config(
    dim: int,
    dim_v: int,
    variant: AttentionVariant,
    block: tuple[int, int],
    smem_bytes: int,
    element_bytes: int = 2,
) -> tuple[Sm80AttentionConfig, tuple[int, int]]:
    """The tile for listed blocks of (query, key) `block`, and how many of them such a block is.

    ValueError where no tile divides the block.
    """
    rows = 128 if block[0] % 128 == 0 else 64
    config = sm80_config(dim, dim_v, variant, smem_bytes, rows=rows, element_bytes=element_bytes)
    config = replace(config, ahead=1)  # with 0 it spills there, with 1 packed sequences do
    if block[1] % config.tile_n:
        config = replace(config, tile_n=64)
    if block[0] % config.tile_m or block[1] % config.tile_n or min(block) <= 0:
        raise ValueError(f"block is {block}, must be multiples of 64")
    return config, (block[0] // config.tile_m, block[1] // config.tile_n)


def why_not(config: Sm80AttentionConfig, smem_bytes: int, element_bytes: int = 2) -> str | None:
    """Says why a configuration cannot run with `smem_bytes` of shared memory a CTA; None if it can."""
    if config.element_bytes != element_bytes:
        return f"element_bytes is {config.element_bytes}, must be {element_bytes} for these operands"
    if config.warps not in (4, 8) or config.tile_m not in (16 * config.warps, 32 * config.warps):
        return f"tile_m is {config.tile_m}, must be 16 or 32 rows for each of warps = 4 or 8"
    reason = _why_not_fp8(config) if element_bytes == 1 else _why_not_16_bits(config)
    if reason is None and config.smem_bytes > smem_bytes:
        return f"it takes {config.smem_bytes} bytes of shared memory, there are {smem_bytes}"
    return reason


def _why_not_16_bits(config: Sm80AttentionConfig) -> str | None:
    for dim in (config.dim, config.dim_v):
        # A tile's rows are copied in column blocks of 64 elements, or of 32.
        step = 32 * config.warps // (8 if dim % 64 == 0 else 4)
        if dim % 32 or not 32 <= dim <= 256:
            return f"a head dimension of a tile is {dim}, must be a multiple of 32 up to 256"
        if config.tile_n % step or config.tile_m % step or config.tile_n <= 0:
            return f"tile_n is {config.tile_n}, must be a multiple of {step} for {config.warps} warps"
    return None


def _why_not_fp8(config: Sm80AttentionConfig) -> str | None:
    """Tiles are copied as pairs of elements, that of V transposed."""
    if config.lazy_rescale:
        return "lazy_rescale is True, must be False: probabilities of an old maximum do not fit e4m3"
    if config.tile_n not in (64, 128):
        return f"tile_n is {config.tile_n}, must be 64 or 128 with fp8"
    for dim in (config.dim, config.dim_v):
        if dim % 64 or not 64 <= dim <= 256:
            return f"a head dimension of a tile is {dim}, must be a multiple of 64 up to 256 with fp8"
    return None
