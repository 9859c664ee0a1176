"""Layers on DTensors: output and gradients of one process, with the collectives that they need."""

from __future__ import annotations

from tests.distributed.ranks import run_ranks

RANKS = "tests.distributed.linear_ranks:"


def test_scaled_linear():
    run_ranks(RANKS + "scales", RANKS + "placements", RANKS + "tensor_parallel")


def test_fully_shard():
    run_ranks("tests.distributed.fsdp_ranks:fully_sharded")
