"""The configuration that a block-sparse product gets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels_dsl.config.bsr import (
    PIECE,
    BsrProblem,
    PiecesRule,
    Sm90BsrConfig,
    choose,
    pieces_rule,
    reads_other_order,
    unpaired,
)
from kernels_dsl.config.bsr_budget import fitted, why_not
from kernels_dsl.config.bsr_sampled import choose_sampled
from kernels_dsl.config.bsr_sm80 import choose_sm80
from kernels_dsl.config.bsr_tiles import unit_along_k, unit_of_wide_tile
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig
from kernels_dsl.config.problem import H200, L40S
from kernels_dsl.sparse.lists import pack_pieces
from kernels_dsl.sparse.pattern import Lists

LARGE = BsrProblem(8192, 8192, 8192, 128 * 512, 16, 16, dense_k_major=True, dense_left=True)


def test_the_dense_matrix_is_copied_where_many_blocks_of_16_meet_it() -> None:
    assert reads_other_order(LARGE)
    assert not reads_other_order(replace(LARGE, dense_k_major=False))
    assert not reads_other_order(replace(LARGE, block_k=32))
    assert not reads_other_order(replace(LARGE, nnz=29 * 512)) and reads_other_order(
        replace(LARGE, nnz=30 * 512)
    )
    assert not reads_other_order(replace(LARGE, dtype="fp8"))


PROBLEM = BsrProblem(512, 512, 512, 20, 64, 64)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (Sm90BsrConfig(128, 256, True, 64), {}, "tile_s * cluster_s is 128, must divide the block's 64"),
        (Sm90BsrConfig(32, 256, True, 64), {"block_mn": 32}, "tile_s is 32, must be one of (64, 128,"),
        (Sm90BsrConfig(16, 96, False, 64), {}, "tile_x is 96, must be one of (64,"),
        (Sm90BsrConfig(64, 520, True, 64), {}, "tile_x is 520, must be a multiple of 16 up to 256"),
        (Sm90BsrConfig(64, 512, True, 64), {"dtype": "fp8"}, "tile_x is 512, must be a multiple of 16"),
        (Sm90BsrConfig(64, 272, True, 64), {}, "tile_x is 272, must be a multiple of 32 above 256"),
        (Sm90BsrConfig(64, 256, True, 24), {}, "unit_k is 24, must be a multiple of 16"),
        (Sm90BsrConfig(64, 256, True, 16, units=3), {}, "units is 3, must divide 32"),
        (Sm90BsrConfig(64, 256, True, 32, units=2), {}, "units is 2, must be 1 where a block takes 2 loads"),
        (Sm90BsrConfig(64, 256, True, 64, stages=13), {}, "stages is 13, must be 0, or from 2 to 12"),
        (Sm90BsrConfig(64, 256, True, 64, kept_stages=4), {}, "kept_stages is 4, must be 0 but with"),
        (Sm90BsrConfig(64, 512, True, 48, kept_stages=4), {}, "unit_k is 48, must divide 64"),
        (Sm90BsrConfig(64, 256, True, 64, cluster_x=3), {}, "a cluster of 1 x 3 CTAs"),
        (Sm90BsrConfig(64, 256, True, 64, pairs=True), {}, "cluster_s must be 1 and cluster_x 2"),
        (Sm90BsrConfig(32, 256, False, 64, cluster_x=2, pairs=True), {}, "tile_s must be the block's 64"),
        (Sm90BsrConfig(128, 256, True, 64, schedule=Schedule.PINGPONG), {"block_mn": 128}, "256 accumulator"),
        (Sm90BsrConfig(192, 256, True, 64), {"block_mn": 192}, "WGMMAs of N = 256, at most 192"),
        (Sm90BsrConfig(64, 256, True, 64), {"dtype": "fp8"}, "256 accumulator registers"),
        (Sm90BsrConfig(64, 256, True, 64, stages=12), {}, "a stage takes 40960 bytes of shared memory"),
        (Sm90BsrConfig(64, 512, True, 16, rows_together=2), {"block_mn": 16}, "must be 1, or 64 by the"),
        (Sm90BsrConfig(64, 512, True, 16, rows_together=4), {"block_mn": 16, "dtype": "fp8"}, "1 for fp8"),
        (Sm90BsrConfig(64, 512, True, 16, rows_together=4), {"block_mn": 16, "nnz": 0}, "without kept"),
        (Sm90BsrConfig(64, 512, True, 16, deep_boxes=True), {}, "deep_boxes is True, must be False"),
        (Sm80GemmConfig(64, 64, 64, 4, 2, 2, split_k=2), {}, "split_k is 2, must be 1, the default"),
        (Sm80GemmConfig(64, 64, 64, 4, 2, 2, copy_bytes_a=8), {}, "copy_bytes_a is 8, must be 16"),
        (Sm80GemmConfig(64, 64, 64, 4, 3, 2), {}, "tile_m is 64, must be a multiple of 16 rows"),
        (Sm80GemmConfig(128, 128, 64, 3, 2, 2), {"dtype": "fp8"}, "256 accumulator registers"),
    ],
)  # fmt: skip
def test_why_not_says_what_does_not_fit(config, changes: dict, reason: str) -> None:
    device = L40S if config.family == "sm80" else H200
    found = why_not(config, replace(PROBLEM, sparse_k_major=True, dense_k_major=True, **changes), device)
    assert found is not None and reason in found


def test_every_choice_fits() -> None:
    """Of the table, for what it chooses: `why_not` must not refuse what is known to run."""
    for extent, block_mn, block_k, left in itertools.product(
        (8, 64, 136, 8192), (16, 48, 64, 96, 112, 128, 192, 240, 256), (16, 64, 80, 112), (0, 1)
    ):
        for dtype in ("bf16", "fp8"):
            size = 32 * block_mn, 32 * block_k
            m, n = (extent, size[0]) if left else (size[0], extent)
            problem = BsrProblem(
                m,
                n,
                size[1],
                200,
                block_mn,
                block_k,
                dtype=dtype,
                dense_left=bool(left),
                dense_k_major=dtype == "fp8",
            )
            chosen = choose(problem)
            assert chosen is not None and why_not(chosen, problem, H200) is None, (problem, chosen)
            if dtype == "bf16" or block_k % 32 == 0:
                assert why_not(choose_sm80(problem), problem, L40S) is None, problem


def test_tma_stores_are_switched_off_where_d_is_not_aligned() -> None:
    config = Sm90BsrConfig(64, 256, True, 64)
    assert fitted(config, PROBLEM) is config
    assert fitted(config, replace(PROBLEM, d_align=8)) == replace(config, epi_tma=False)


def test_blocks_of_64_get_wide_tiles_where_there_is_work_for_them() -> None:
    large = BsrProblem(8192, 8192, 8192, 32 * 128, 64, 64)
    wide = choose(large)
    assert wide is not None and wide.tile == (64, 512) and wide.kept_stages
    assert wide.pairs and wide.cluster == (2, 1)
    for single in (
        replace(large, block_mn=192, m=24576),  # other tiles of the same block row are neighbours
        replace(large, m=(2 << 20) + 64, k=64),
        replace(large, k=(1 << 20) + 64),
    ):
        other_pairs = choose(single)
        assert other_pairs is not None and not other_pairs.pairs and other_pairs.cluster == (1, 2)
        assert other_pairs.kept_stages
    for other in (
        replace(large, n=8192 - 512),  # half of the last pair's tiles would be empty
        replace(large, m=2176),  # the last of five rounds would be nearly empty
        replace(large, n=904, m=8192),  # whole boxes of the last tile, too
        replace(large, dense_k_major=True),
        replace(large, block_k=32),
    ):
        chosen = choose(other)
        assert chosen is not None and chosen.tile == (64, 256) and not chosen.kept_stages


def test_whole_rounds_of_wide_tiles_are_few() -> None:
    """One more round than half of the GPU's: 128 block rows by up to 1024 columns."""
    large = BsrProblem(8192, 8192, 8192, 26 * 128, 64, 64)
    wide = [choose(replace(large, n=n)) for n in (1000, 1024, 2048)]
    assert all(config is not None and config.tile == (64, 512) and config.pairs for config in wide)
    assert choose(replace(large, n=1000, m=4096)) == choose(replace(large, n=1024, m=4096))


def test_loads_have_few_zeros_behind_a_block() -> None:
    units = {k: unit_along_k(k, 304, False, False) for k in range(16, 257, 16)}
    assert units == {
        16: 16, 32: 32, 48: 48, 64: 64, 80: 80, 96: 32, 112: 16, 128: 64,
        144: 48, 160: 32, 176: 64, 192: 64, 208: 32, 224: 32, 240: 64, 256: 64,
    }  # fmt: skip
    assert unit_along_k(80, 320, True, False) == 16  # four stages of 80 would hardly fit
    assert unit_along_k(112, 320, True, False) == 64  # the tensor cores are what counts there
    assert unit_along_k(80, 304, False, True) == 64  # rows along K are as long as they can be
    assert [unit_of_wide_tile(k) for k in (64, 80, 96, 112, 176)] == [32, 16, 32, 16, 32]


def test_few_columns_have_tiles_of_their_own_size() -> None:
    """On WGMMA's M no tile has fewer than 64 of them."""
    columns = (8, 24, 40, 64, 96, 136, 192, 200)
    for block, extents in (
        (64, (16, 32, 64, 64, 128, 192, 192, 256)),
        (48, (64,) * 4 + (128, 192, 192, 256)),
    ):
        tiles = [choose(BsrProblem(32 * block, n, 2048, 99, block, 64)) for n in columns]
        assert tuple(config.tile_x for config in tiles if config is not None) == extents


def test_blocks_between_powers_of_two() -> None:
    """They use all of each byte that is loaded: tiles of 256 columns, and pairs where L2 is the bound."""
    large = BsrProblem(8160, 8192, 8160, 20 * 170, 48, 80)
    config = choose(large)
    assert config is not None and config.tile == (256, 48) and config.pairs and config.unit_k == 80
    few = choose(replace(large, n=512))
    assert few == unpaired(config)
    for extent, schedule in ((96, Schedule.PINGPONG), (112, Schedule.COOPERATIVE)):
        size = 8192 // extent * extent
        config = choose(BsrProblem(size, 8192, size, 1000, extent, extent))
        assert config is not None and config.tile == (256, extent) and not config.pairs
        assert config.schedule is schedule
    deep = choose(BsrProblem(8160, 8192, 8192, 1000, 96, 512))
    assert deep is not None and deep.tile == (256, 96) and deep.unit_k == 32
    beside = choose(BsrProblem(8192, 8192, 8160, 20 * 64, 128, 80))
    assert beside is not None and beside.tile == (128, 256) and beside.unit_k == 16


def test_small_blocks_come_in_pairs_where_the_dense_matrix_is_contiguous_along_k() -> None:
    large = BsrProblem(8192, 8192, 8192, 64 * 256, 32, 32, dense_left=True, dense_k_major=True)
    pairs = choose(large)
    assert pairs is not None and pairs.pairs and pairs.tile == (256, 32) and pairs.cluster == (1, 2)
    assert unpaired(pairs).cluster == (1, 1) and not unpaired(pairs).pairs
    others = [
        replace(large, dense_k_major=False),
        replace(large, m=8192 - 256),  # the last pair's second tile would be empty
        replace(large, m=512, n=8192),
        replace(large, block_mn=16),
        replace(large, block_k=16),
    ]
    assert not any(chosen.pairs for chosen in map(choose, others) if chosen is not None)


def test_sampled_tiles_share_rows_where_a_row_has_many_or_an_even_number() -> None:
    def cluster(extent: int, kept: float) -> int:
        chosen = choose_sampled((extent, extent), True, True, kept)
        assert chosen is not None
        return chosen.cluster

    assert [cluster(64, kept) for kept in (6, 10, 13, 17, 28, 32, 36, 40.5)] == [1, 1, 2, 1, 1, 2, 2, 2]
    assert [cluster(32, kept) for kept in (24, 64)] == [1, 2]
    assert [cluster(16, kept) for kept in (24, 51)] == [1, 2]
    assert cluster(128, 16) == 1


def test_stores_by_tma_where_rows_are_aligned() -> None:
    for problem in (LARGE, replace(LARGE, dense_left=False), replace(LARGE, block_mn=128)):
        for changes, by_tma in (({}, True), ({"d_align": 8}, False), ({"n": 8196}, False)):
            chosen = choose(replace(problem, **changes))
            assert chosen is not None and chosen.epi_tma == by_tma


def test_lists_are_split_where_one_can_take_longer_than_all_work() -> None:
    def rule(longest: int | None = None, **changes: int) -> PiecesRule | None:
        problem = replace(BsrProblem(8192, 8192, 8192, 1024, 128, 128), **changes)
        chosen = choose(problem)
        assert chosen is not None
        return pieces_rule(problem, chosen, 132, longest)

    assert rule() is None  # 25 %: a CTA has as much to do as four full lists
    assert rule(nnz=127) is None  # many tiles take long without any blocks
    assert rule(n=512, nnz=7) is None  # nothing is long
    assert rule(11, n=512, nnz=127) is None and rule(64, n=512, nnz=127) is not None
    found = [rule(n=512, nnz=127), rule(n=2048, nnz=127), rule(n=2048, nnz=127, k=65536)]
    assert [x and x.length for x in found] == [4, 12, 12]
    assert [x and x.pieces(64) for x in found] == [8, 5, 5]
    last = found[2]
    assert last is not None and [last.pieces(n) for n in (28, 36, 127, 512)] == [1, 3, 8, 16]


def test_pieces_of_lists_are_those_of_the_rule() -> None:
    """All entries once, in order, and no more slots than there is memory for."""
    rule = PiecesRule(least=20, length=4, each=0.5, all=0.0)
    lengths = [0, 64, 3, 25, 18, 200, 0]
    first = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    nnz = sum(lengths)
    entries = torch.arange(nnz, dtype=torch.int32)
    packed = pack_pieces(Lists(entries[:0], first, entries, entries, 1), rule).tolist()
    heavy, used = packed[:2]
    lines = len(lengths) + nnz // rule.length
    table = [packed[4 + 4 * i : 8 + 4 * i] for i in range(lines)]
    words = packed[4 + 4 * lines + 2 * nnz :]
    wanted = [rule.pieces(n) for n in lengths]
    assert used == sum(wanted) and wanted == [1, 8, 1, 6, 1, 16, 1] and heavy == 1
    assert heavy == sum(end - begin > 1.5 * nnz / used for _, begin, end, _ in table)
    assert [end - begin for _, begin, end, _ in table] == sorted(
        (e - b for _, b, e, _ in table), reverse=True
    )
    slot = 0
    for number, (length, pieces) in enumerate(zip(lengths, wanted)):
        mine = sorted(line[1:] for line in table[:used] if line[0] == number)
        assert mine[0][0] == first[number] and mine[-1][1] == first[number] + length
        assert all(x[1] == y[0] for x, y in pairwise(mine)) and len(mine) == pieces
        assert {mark for *_, mark in mine} == {PIECE if pieces > 1 else 0}
        if pieces > 1:
            assert [words[b] for b, *_ in mine] == [slot | pieces << 10 | i << 20 for i in range(pieces)]
            slot += pieces
    assert slot <= nnz // rule.length
