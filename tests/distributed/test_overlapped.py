"""Products beside communication on gloo ranks: equal to one process, or refused before it."""

from __future__ import annotations

from tests.distributed.ranks import run_ranks
from tests.distributed.test_context_parallel import everything

RANKS = "tests.distributed.product_ranks:"


def test_two_ranks():
    run_ranks(RANKS + "formulas", RANKS + "refused", RANKS + "emulated")


@everything
def test_four_ranks():
    run_ranks(RANKS + "formulas", size=4)
