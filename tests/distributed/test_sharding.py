"""Operators on DTensors: equal to one process, or refused before any communication."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.test_context_parallel import everything

RANKS = "tests.distributed.sharded_ranks:"


def test_two_ranks():
    run_ranks(RANKS + "collectives", RANKS + "sample")


@everything
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_placement(size):
    run_ranks(RANKS + "everything", size=size, timeout=900)
