"""Layers on DTensors: output and gradients of one process, with the collectives that they need."""

from __future__ import annotations

from tests.distributed.ranks import run_ranks
from tests.distributed.test_context_parallel import everything

RANKS = "tests.distributed.linear_ranks:"


def test_scaled_linear():
    run_ranks(RANKS + "scales", RANKS + "placements", RANKS + "tensor_parallel")


def test_fully_shard():
    run_ranks("tests.distributed.fsdp_ranks:fully_sharded")


@everything
def test_tensor_parallelism_under_fully_shard():
    run_ranks("tests.distributed.fsdp_ranks:two_dimensional", size=4)
