"""Configuration of decoding attention, and the split of a sequence's keys: plain data and arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

from kernels_dsl.config.problem import Device
from lowering.records import NamedTuple, frozen

MAX_ROWS = 64
"""Query rows of a KV head (queries times the query heads that share it) that a CTA takes together."""
STEP = 64
"""Splits begin at multiples of this many keys, counted from the first block that a window leaves."""


class Splitting(NamedTuple):
    """Split of the keys of sequences with up to `rows` query rows a KV head: into 2^wanted_log2 splits
    of at most `long` keys, longer sequences into at most 2^most_log2."""

    rows: int
    wanted_log2: int
    long: int
    most_log2: int


MAX_KEYS = 1 << 30
"""Of a sequence: sums of two positions stay within 32 bits."""
ONE_SPLIT = Splitting(MAX_KEYS, 0, MAX_KEYS, 0)
SPLITTINGS = (
    Splitting(8, 3, 1024, 6),
    Splitting(16, 3, 1024, 7),
    Splitting(64, 2, 2048, 5),
    Splitting(256, 1, 8192, 3),
    ONE_SPLIT,
)
"""More rows have larger partial results: the splits grow with them."""
MAX_SPLITS = 128
FIXED_SPLIT = 512
"""Keys of a split where splits have the same borders whatever the lengths."""
MAX_FIXED_SPLITS = 2048
DOUBLINGS = 24
_RESERVED = 1024
"""Bytes of an SM's shared memory that each CTA takes beside its own."""
_STATS = 784
FACTORS_OFFSET = 512
"""Bytes from a CTA's row maxima and sums to the factors of its rows of Q."""
ARRIVED_OFFSET = 768
"""The same to the number of splits that were there before its own."""
MOST_MERGED = 64
"""Rows of partial results, of all splits, that the CTA of a tile's last split merges, at most."""
LEAST_MERGED_DIM = 64
"""Head dimension from which a thread's registers hold the sums of all groups."""
LEAST_WHOLE_ROWS = 2048
"""Rows of a result from which the second kernel has no CTA for each: the GPU would run out of them."""
FEW_MERGED_ROWS = 256
"""Rows of a result up to which a thread of the second kernel may have registers for MOST_AT_ONCE vectors."""
MOST_AT_ONCE = 16
ARRIVALS = 4
"""Counters before those of the tiles: the first hands out items."""
ASKED_AHEAD = 2
"""Steps before the end of an item's loads at which a CTA takes the number of its next item."""
_MAX_STAGES = 4
MERGED_COLUMNS = 32
"""Columns of the warps' outputs that are merged at a time, where they have shared memory of their own."""
_MAIL = 64
"""Bytes of the description of an item."""
_TMA_STRIDE = 1 << 39
"""Elements of 16 bits: strides of a tensor map stay below it."""
_MAX_SLOTS = 16
"""Blocks of a ring of TMA, at most."""
OUTPUT_PAD = 8
"""float32 between rows of the warps' outputs, so that four rows lie in different banks; fp8 caches: two, and
twice as many."""


def splitting_of(rows: int) -> Splitting:
    """The split of sequences with `rows` query rows a KV head."""
    return next(found for found in SPLITTINGS if rows <= found.rows)


def split_keys(keys: int, rows: int = 1) -> int:
    """Keys of a split of a sequence that has `keys` in view, and `rows` query rows a KV head.

    A function of the sequence's own lengths, so that the batch beside it has no part in its bits. The device
    has the same arithmetic (`blocks.attention.splits`).
    """
    found = splitting_of(rows)
    wanted = max(-(-keys >> found.most_log2), min(-(-keys >> found.wanted_log2), found.long))
    size = STEP
    for _ in range(DOUBLINGS):
        size = 2 * size if wanted > size else size
    return size


def most_splits(keys: int, rows: int = 1) -> int:
    """Splits of the sequence of up to `keys` keys that has the most."""
    found = splitting_of(rows)
    return max(
        1,
        min(-(-keys // STEP), 1 << found.wanted_log2),
        min(-(-keys // found.long), 1 << found.most_log2),
    )


def extra_part_rows(keys: int, pack: int, most_rows: int) -> int:
    """Rows of partial results that a sequence of up to `keys` keys and `most_rows` query rows of a KV head, a
    multiple of `pack`, has beyond one for each of its query rows."""
    rows = [min(found.rows, most_rows) // pack * pack for found in SPLITTINGS]
    return max(size * (most_splits(keys, size) - 1) for size in rows)


@frozen
class DecodeConfig:
    """One instance of the kernel. `rows` query rows of a KV head, 16 a warp; the warps beside them share the
    `tile_n` keys of a step. `pack`: query heads of a KV head. `dim`: padded to a multiple of 32, of 64 with
    fp8 caches. `kv_bytes`: of an element of the caches. `tiled`: a sequence may have more rows, which other
    items take. `fixed`: splits of FIXED_SPLIT keys, counted from a sequence's first key. `box`: keys that TMA
    loads at a time, by a warp of its own into rings of blocks of K and of V, half of the stages each; 0: all
    warps copy rows with cp.async, and a stage has both. `evict_first`: TMA's loads, which no other item
    repeats, leave L2 to partial results. `k_ahead`: blocks of K that TMA loads ahead of their V. `queued`:
    CTAs that load by TMA take items as they become free, by a counter; else every n-th. `hints`: before a CTA
    waits for the kernel before, it asks L2 for what it will probably load first. `merges`: the CTA that has
    the last split of a tile merges them all; else a second kernel does, with `whole_rows` by threads that
    share no row's vector, else each thread with vectors of `at_once` splits at a time.
    """

    dim: int
    rows: int
    tile_n: int
    stages: int
    ctas_per_sm: int
    pack: int
    kv_bytes: int = 2
    tiled: bool = False
    fixed: bool = False
    box: int = 0
    evict_first: bool = False
    k_ahead: int = 0
    merges: bool = False
    queued: bool = False
    hints: bool = False
    whole_rows: bool = False
    at_once: int = 4

    @property
    def most_splits(self) -> int:
        """Splits of a sequence, at most."""
        return MAX_FIXED_SPLITS if self.fixed else MAX_SPLITS

    @property
    def warps_m(self) -> int:
        """Warps along the query rows."""
        return self.rows // 16

    @property
    def warps_n(self) -> int:
        """Warps along the keys of a step."""
        return max(1, min(4 // self.warps_m, self.tile_n // 16))

    @property
    def computing_threads(self) -> int:
        """Threads of the warps that compute."""
        return 32 * self.warps_m * self.warps_n

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.computing_threads + (32 if self.box else 0)

    @property
    def q_bytes(self) -> int:
        """Bytes of Q in shared memory."""
        return self.rows * self.dim * 2

    @property
    def block_bytes(self) -> int:
        """Bytes of a step's block of K, and as many of V."""
        return self.tile_n * self.dim * self.kv_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the ring."""
        return self.block_bytes if self.box else 2 * self.block_bytes

    @property
    def stats_offset(self) -> int:
        """Byte offset of the warps' row maxima and sums."""
        return self.q_bytes + self.stages * self.stage_bytes

    @property
    def merged_columns(self) -> int:
        """Columns of the warps' outputs that are merged at a time."""
        return MERGED_COLUMNS if self.box else self.dim

    @property
    def outputs_offset(self) -> int:
        """Byte offset of the warps' outputs: over Q and the blocks, if nothing is loaded to them by then."""
        return self.stats_offset + _STATS if self.box else 0

    @property
    def outputs_bytes(self) -> int:
        """Bytes of the warps' outputs."""
        return self.warps_n * self.rows * (self.merged_columns + OUTPUT_PAD * 2 // self.kv_bytes) * 4

    @property
    def mail_offset(self) -> int:
        """Byte offset of the description of an item; the mbarriers follow it."""
        return self.outputs_offset + self.outputs_bytes

    @property
    def barriers_offset(self) -> int:
        """Byte offset of the mbarriers: two for each stage, and two for the description of an item and Q."""
        return self.mail_offset + _MAIL

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        if self.box:
            return self.barriers_offset + 16 * (self.stages + 1)
        return self.stats_offset + _STATS


def decode_config(dim: int, rows: int, pack: int, device: Device, kv_bytes: int = 2) -> DecodeConfig:
    """The configuration for `rows` of head dimension `dim`, 64 of them at a time: two CTAs an SM where two
    stages fit.

    fp8 caches have steps of twice as many keys, as many bytes in flight, where registers allow it.
    """
    step = 64 // kv_bytes
    padded = -(-dim // step) * step
    tile_m = next(size for size in (16, 32, MAX_ROWS) if rows <= size or size == MAX_ROWS)
    tile_n = (64 if padded <= 128 else 32) * (2 if kv_bytes == 1 and tile_m < MAX_ROWS else 1)
    one = DecodeConfig(padded, tile_m, tile_n, 2, 1, pack, kv_bytes)
    fixed = one.q_bytes + _STATS
    for ctas in (2, 1):
        room = (device.smem_bytes + _RESERVED) // ctas - _RESERVED - fixed
        stages = min(room // one.stage_bytes, _MAX_STAGES)
        if stages >= 2:
            return DecodeConfig(padded, tile_m, tile_n, stages, ctas, pack, kv_bytes)
    raise ValueError(f"two stages of {one.stage_bytes} bytes do not fit {device.smem_bytes} of {device.name}")


def why_not_tma(
    config: DecodeConfig, device: Device, dim: int, page: int, strides: tuple[tuple[int, ...], ...]
) -> str | None:
    """Says why TMA cannot bring keys of `dim` in pages of `page`, or dense ones (0), of caches with such
    strides; None if it can."""
    if not device.has_wgmma:
        return f"{device.name} is not of compute capability 9.0"
    if config.dim > 128 or config.rows > 16 * config.kv_bytes:
        return f"registers do not hold {config.rows} rows of {config.dim} columns beside a loading warp's"
    if dim != config.dim:
        return f"head dimension is {dim}, must be a multiple of {64 // config.kv_bytes}"
    if math.gcd(page, config.tile_n, STEP) % 16:
        return f"pages have {page} keys, must be a multiple of 16"
    each = 16 // config.kv_bytes
    if any(step <= 0 or step % each or step >= _TMA_STRIDE for of_cache in strides for step in of_cache[:3]):
        return f"caches have strides {strides}, must have multiples of {each} below {_TMA_STRIDE}"
    return None


def tma_config(config: DecodeConfig, device: Device, page: int) -> DecodeConfig:
    """The same with keys that TMA loads, where `why_not_tma` is None. As many stages as fit. What merges has
    an item a CTA, and no time to lose."""
    box = math.gcd(page, config.tile_n, STEP)
    many = not config.merges
    few = replace(
        config, box=box, stages=_MAX_SLOTS, evict_first=not config.tiled, k_ahead=1, queued=many, hints=many
    )
    room = (device.smem_bytes + _RESERVED) // config.ctas_per_sm - _RESERVED
    over = few.smem_bytes - room
    each = few.stage_bytes + 16
    stages = _MAX_SLOTS - max(0, -(-over // each))
    return replace(few, stages=stages // 2 * 2)
