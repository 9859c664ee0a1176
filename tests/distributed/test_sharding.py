"""Operators on DTensors: equal to one process, or refused before any communication."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.distributed import register
from tests.distributed.ranks import run_ranks
from tests.distributed.test_context_parallel import everything

RANKS = "tests.distributed.sharded_ranks:"


def test_every_operator_has_a_rule_or_a_reason_for_none():
    names = {
        x.removeprefix("kernels_dsl::") for x in torch._C._dispatch_get_all_op_names() if "kernels_dsl::" in x
    }
    assert len(names) > 15 and names == {*register.RULES, *register.WITHOUT_RULES}
    assert not set(register.RULES) & set(register.WITHOUT_RULES)


def test_two_ranks():
    run_ranks(RANKS + "collectives", RANKS + "sample")


@everything
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_placement(size):
    run_ranks(RANKS + "everything", size=size, timeout=900)
