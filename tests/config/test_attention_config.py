"""The choice of attention tiles: what is known to be fast is taken, and everything chosen fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels_dsl.config.attention import (
    AttentionVariant,
    Extent,
    Sm90AttentionConfig,
    padded_dim,
    sm90_config,
    sm90_fp8_config,
    sm90_list_config,
    sm90_why_not,
)
from kernels_dsl.config.attention_table import choose, choose_for_lists, why_not
from kernels_dsl.config.problem import DEVICES_BY_ARCH, H200

CAUSAL = AttentionVariant(right=True)
VARIANTS = [
    AttentionVariant(),
    CAUSAL,
    AttentionVariant(right=True, softcap=True),
    AttentionVariant(mask="boolean"),
]


def _smem_bytes(config: Sm90AttentionConfig) -> int:
    tiles = config.tile_m * config.dim + config.stages * config.tile_n * (config.dim + config.dim_v)
    return 2 * tiles + 1024


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_choice_fits(variant):
    for dim in range(8, 257, 8):
        for dim_v in (dim, 64, 128, 256):
            for extent in (
                None,
                Extent(1, 4096, 8, 132),
                Extent(512, 512, 96, 132),
                Extent(65536, 65536, 64, 132),
            ):
                config = sm90_config(dim, dim_v, variant, extent)
                assert config.dim >= dim and config.dim_v >= dim_v
                assert _smem_bytes(config) <= 232448
                assert config.tile_n % 16 == 0
                assert config.tile_m < 192 or max(config.dim, config.dim_v) <= 96


@pytest.mark.parametrize(
    ("extent", "variant", "tile"),
    [
        (Extent(512, 512, 96, 132), AttentionVariant(), (64, 2)),  # three rounds, like those of 128 rows
        (Extent(512, 512, 96, 132), CAUSAL, (64, 2)),
        (Extent(512, 512, 32, 132), AttentionVariant(), (64, 2)),
        (Extent(512, 512, 1536, 132), AttentionVariant(), (192, 1)),  # 35 rounds against 47
        (Extent(512, 512, 1536, 132), CAUSAL, (128, 1)),  # K and V half as often from L2 as with 64 rows
        (Extent(1024, 1024, 512, 132), CAUSAL, (64, 2)),
        (Extent(1024, 1024, 8, 132), AttentionVariant(), (64, 1)),  # alone on their SMs
        (Extent(4096, 4096, 128, 132), AttentionVariant(), (192, 1)),
        (Extent(4096, 4096, 128, 132), CAUSAL, (192, 1)),
    ],
)
def test_tiles_as_measured(extent, variant, tile):
    """The fastest of a sweep on an H200."""
    config = sm90_config(64, 64, variant, extent)
    assert (config.tile_m, config.ctas_per_sm) == tile


@pytest.mark.parametrize(
    ("extent", "pack"),
    [
        (Extent(1, 8192, 2048, 132, group=4), 4),  # four times fewer tiles
        (Extent(1, 8192, 2048, 132, group=12), 4),
        (Extent(1, 8192, 32, 132, group=4), 1),  # a tile for each SM anyway
        (Extent(4096, 4096, 128, 132, group=4), 1),  # as many tiles
        (Extent(1, 8192, 2048, 132), 1),
    ],
)
def test_heads_of_a_group_share_tiles_where_that_saves_rounds(extent, pack):
    assert sm90_config(128, 128, CAUSAL, extent).pack == pack
    assert sm90_config(128, 128, AttentionVariant(sinks=True), extent).pack == 1


def test_padding():
    assert [padded_dim(d) for d in (8, 32, 40, 72, 128, 136, 200, 256)] == [
        32,
        32,
        64,
        96,
        128,
        192,
        256,
        256,
    ]


@pytest.mark.parametrize(
    ("block", "dim", "tile", "split"),
    [((128, 128), 128, (128, 128), (1, 1)), ((64, 64), 64, (64, 128), (1, 1)),
     ((64, 64), 128, (64, 64), (1, 1)), ((64, 128), 128, (64, 64), (1, 2)),
     ((64, 128), 64, (64, 128), (1, 1)), ((128, 64), 128, (128, 128), (1, 1)),
     ((256, 128), 128, (128, 128), (2, 1)), ((128, 128), 192, (128, 64), (1, 2)),
     ((128, 64), 256, (128, 64), (1, 1))],
)  # fmt: skip
def test_listed_blocks_are_whole_tiles(block, dim, tile, split):
    config, found = sm90_list_config(dim, dim, block)
    assert ((config.tile_m, config.tile_n), found) == (tile, split)
    assert _smem_bytes(config) <= 232448


def test_lists_with_fp8_operands_keep_turns_and_their_tiles():
    config, split = sm90_list_config(128, 128, (128, 128), element_bytes=1)
    assert config == Sm90AttentionConfig(128, 128, 128, 128) and split == (1, 1)


def test_a_block_that_no_tile_divides():
    with pytest.raises(ValueError, match=r"block is \(96, 128\), must be multiples of 64"):
        sm90_list_config(64, 64, (96, 128))


SM80_DEVICES = [DEVICES_BY_ARCH[arch] for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a")]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("device", SM80_DEVICES, ids=lambda device: device.name)
def test_every_choice_of_the_sm80_family_fits(variant, device):
    for dim in range(8, 257, 8):
        for dim_v in (dim, 8, 64, 128, 256):
            config = choose("sm80", dim, dim_v, variant, device)
            assert config.family == "sm80"
            assert why_not(config, dim, dim_v, device) is None
            for block in ((64, 64), (128, 128), (64, 128), (256, 64)):
                listed, split = choose_for_lists("sm80", dim, dim_v, variant, block, device)
                assert why_not(listed, dim, dim_v, device) is None
                assert (listed.tile_m * split[0], listed.tile_n * split[1]) == block


def test_more_shared_memory_gives_larger_tiles():
    tiles = [choose("sm80", 256, 256, CAUSAL, DEVICES_BY_ARCH[arch]) for arch in ("sm_89", "sm_90a")]
    assert tiles[0].tile_m * tiles[0].tile_n < tiles[1].tile_m * tiles[1].tile_n
    # Two CTAs of the common sizes share an SM of 100 KB.
    assert 2 * (choose("sm80", 64, 64, CAUSAL, DEVICES_BY_ARCH["sm_89"]).smem_bytes + 1024) <= 100 << 10


def test_a_block_that_no_tile_of_the_sm80_family_divides():
    with pytest.raises(ValueError, match=r"block is \(96, 128\), must be multiples of 64"):
        choose_for_lists("sm80", 64, 64, CAUSAL, (96, 128), DEVICES_BY_ARCH["sm_89"])


@pytest.mark.parametrize(
    ("dim", "variant", "extent", "tile_m"),
    [
        (64, AttentionVariant(), Extent(1024, 1024, 8, 132), 64),
        (64, AttentionVariant(), Extent(1024, 1024, 32, 132), 128),
        (64, CAUSAL, Extent(1024, 1024, 32, 132), 64),
        (128, CAUSAL, Extent(1024, 1024, 256, 132), 128),
        (256, AttentionVariant(), Extent(2048, 2048, 8, 132), 128),  # a second round of CTAs otherwise
        (256, CAUSAL, Extent(2048, 2048, 8, 132), 64),
    ],
)
def test_small_launches_of_the_sm80_family_get_lower_tiles(dim, variant, extent, tile_m):
    """As measured on an H200."""
    assert choose("sm80", dim, dim, variant, DEVICES_BY_ARCH["sm_90a"], extent).tile_m == tile_m


@pytest.mark.parametrize(
    ("changes", "element_bytes", "reason"),
    [
        ({"lazy_rescale": True}, 1, "lazy_rescale is True, must be False with fp8"),
        ({"tile_n": 80}, 1, "tile_n is 80, must be a multiple of 32"),
        ({"dim_v": 288}, 2, "dim_v is 288, must be a multiple of 32 from 32 to 256"),
        ({"stages": 0}, 2, "stages is 0, must be 1 or more"),
        ({"pack": 3}, 2, "pack is 3, must be one of"),
        ({"watch_sums": True}, 2, "watch_sums is True, must be False: it is for fp8"),
        ({"later_v": 2}, 2, "later_v is 2, must be 0: it is for fp8"),
        ({"tile_m": 192, "tile_n": 208, "dim": 64, "dim_v": 64}, 2, "WGMMAs of N = 208, at most 192"),
        ({"tile_m": 64, "tile_n": 224, "ctas_per_sm": 2, "dim": 32, "dim_v": 32}, 2, "WGMMAs of N = 224"),
        ({"stages": 3, "dim": 96, "dim_v": 160}, 2, "bytes of shared memory, there are 232448"),
        ({"turns_v": True, "tile_n": 256, "dim_v": 256}, 1, "bytes of shared memory"),
    ],
)  # fmt: skip
def test_what_a_callers_configuration_is_refused_for(changes, element_bytes, reason) -> None:
    config = replace(Sm90AttentionConfig(128, 128, 128, 128), **changes)
    found = sm90_why_not(config, H200.smem_bytes, element_bytes)
    assert found is not None and reason in found


@pytest.mark.parametrize("config_of", [sm90_config, sm90_fp8_config])
def test_a_mask_without_queries_has_a_tile(config_of):
    assert config_of(256, 256, CAUSAL, Extent(rows=0, keys=200, heads=24, sms=132)).dim == 256
