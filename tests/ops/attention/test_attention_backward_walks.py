"""Calls of the attention backward on Hopper whose CTAs take tile after tile, and how the sums of dQ begin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.problem import H200
from kernels_dsl.ops.attention.arguments import AttentionArguments, AttentionOptions
from kernels_dsl.ops.attention.backward import (
    Needs,
    choose_tile,
    complete,
    described,
    is_faster_in_order,
    walk_rows,
)
from kernels_dsl.ops.attention.cut_tiles import CutTiles, cut_tiles

WINDOW = AttentionOptions(causal=True, window=(1024, 0))
CAUSAL = AttentionOptions(causal=True)
FULL = AttentionOptions()
CAPPED = AttentionOptions(causal=True, softcap=30.0)


def _call(length, heads, kv_heads, dim, options):
    q = torch.empty(1, length, heads, dim, dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(1, length, kv_heads, dim, dtype=torch.bfloat16, device="meta") for _ in range(2))
    return described(AttentionArguments(q, k, v, options))


def _choose(call, deterministic):
    return complete(choose_tile(call, H200, deterministic, Needs(), None), call, Needs())


@pytest.mark.parametrize(
    ("length", "heads", "dim", "options", "rows", "many"),
    [
        (1024, (16, 16), 128, FULL, 1024, True),
        (2048, (16, 16), 128, CAUSAL, 1024, True),
        (4096, (16, 16), 128, CAUSAL, 2048, False),
        (4096, (16, 16), 128, CAPPED, 2048, True),  # no registers for V
        (2048, (16, 16), 128, FULL, 2048, True),
        (4096, (16, 16), 128, FULL, 4096, False),
        (8192, (16, 16), 128, CAUSAL, 4096, False),
        (16384, (16, 16), 128, CAUSAL, 8192, False),
        (32768, (32, 8), 128, WINDOW, 4 * 1152, True),
        (4096, (32, 32), 64, CAUSAL, 2048, True),
        (4096, (32, 32), 64, FULL, 4096, False),
        (1024, (8, 8), 256, FULL, 1024, False),  # CTAs with a warpgroup for each product
    ],
)
def test_how_long_a_walk_is(length, heads, dim, options, rows, many):
    call = _call(length, *heads, dim, options)
    assert walk_rows(call) == rows
    assert _choose(call, True).many_tiles == many


@pytest.mark.parametrize(
    ("length", "dim", "deterministic", "cleared"),
    [
        (1024, 128, True, False),
        (1024, 128, False, False),
        (4096, 128, True, False),
        (2048, 128, False, True),  # an atomic operation for each share
        (16384, 128, True, False),  # a CTA for each tile
        (16384, 128, False, True),
        (4096, 192, True, False),
        (4096, 192, False, True),
        (4096, 256, True, True),  # sums are added from registers
    ],
)
def test_sums_that_are_cleared(length, dim, deterministic, cleared):
    call = _call(length, 16, 16, dim, FULL)
    assert _choose(call, deterministic).clears_sums == cleared


@pytest.mark.parametrize(
    ("length", "dim", "options", "deterministic", "buffers"),
    [
        (16384, 128, FULL, True, 1),
        (16384, 128, FULL, False, 0),  # added from registers
        (4096, 128, CAUSAL, False, 0),
        (1024, 128, FULL, True, 1),  # tile after tile
        (4096, 64, FULL, True, 2),
        (4096, 64, FULL, False, 1),
        (16384, 128, CAPPED, True, 1),
    ],
)
def test_buffers_of_sums(length, dim, options, deterministic, buffers):
    call = _call(length, 16, 16, dim, options)
    assert _choose(call, deterministic).sums_buffers == buffers


def test_lists_are_summed_in_a_buffer():
    found = replace(_call(16384, 16, 16, 128, FULL), block=(128, 128))
    assert _choose(found, False).sums_buffers == 1


@pytest.mark.parametrize(
    ("length", "options", "deterministic", "expected"),
    [
        (16384, FULL, True, ((4, 16), (4, 16), 5)),
        (8192, FULL, True, None),  # 8 rounds
        (16384, FULL, False, ((0, 0), (1, 68), 5)),  # 2048 tiles for 132 SMs
        (4096, FULL, False, None),  # 512, of walks too short to be cut
        (8448, FULL, False, None),  # 1056 tiles, 8 of each SM
        (16384, CAUSAL, True, None),  # walks of many lengths
    ],
)
def test_tiles_whose_walks_are_cut(length, options, deterministic, expected):
    call = _call(length, 16, 16, 128, options)
    found = cut_tiles(call, _choose(call, deterministic), H200.sm_count)
    assert found == (CutTiles(*expected, 128 * 256) if expected else None)


def test_lists_are_not_cut():
    """The walk of a tile over lists is not a range of query blocks."""
    found = replace(_call(16384, 16, 16, 128, FULL), block=(128, 128))
    config = _choose(found, False)
    assert not config.many_tiles
    assert cut_tiles(found, config, H200.sm_count) is None


@pytest.mark.parametrize(
    ("length", "heads", "dim", "options", "faster"),
    [
        (4096, (32, 32), 64, CAUSAL, True),
        (4096, (32, 32), 64, FULL, False),
        (32768, (32, 8), 128, WINDOW, True),
        (16384, (16, 16), 128, CAUSAL, False),
        (4096, (8, 8), 256, FULL, True),
        (8192, (64, 64), 192, FULL, False),
    ],
)
def test_where_a_fixed_order_is_the_faster_one(length, heads, dim, options, faster):
    call = _call(length, *heads, dim, options)
    assert is_faster_in_order(call, _choose(call, False)) == faster
