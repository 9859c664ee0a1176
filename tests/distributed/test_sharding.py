"""Operators on DTensors: equal to one process, or refused before any communication."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema

from kernels_dsl.distributed import register
from tests.distributed.ranks import run_ranks
from tests.distributed.test_context_parallel import everything

RANKS = "tests.distributed.sharded_ranks:"


def _operators() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.partition("::")[2] for name in names if name.startswith("kernels_dsl::")}


def test_every_operator_has_a_rule_or_a_reason():
    assert not set(register.RULES) & set(register.WITHOUT_RULES)
    assert _operators() == {*register.RULES, *register.WITHOUT_RULES}
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    for name in _operators():
        assert getattr(torch.ops.kernels_dsl, name).default in strategies, name


@pytest.mark.parametrize("name", register.WITHOUT_RULES)
def test_operators_without_a_rule_say_why(name):
    operator = getattr(torch.ops.kernels_dsl, name).default
    strategy = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs[operator]
    reason = "writes tensors of the caller's" if name.endswith("_out") else register.WITHOUT_RULES[name]
    with pytest.raises(ValueError, match=f"kernels_dsl::{name} has no sharding rule, must be .* {reason}"):
        strategy(OpSchema(operator, (), {}))


def test_two_ranks():
    run_ranks(RANKS + "collectives", RANKS + "backward_collectives", RANKS + "sample")


@everything
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_placement(size):
    run_ranks(RANKS + "everything", size=size, timeout=900)


@everything
@pytest.mark.slow
def test_a_mesh_of_two_dimensions():
    run_ranks(RANKS + "two_dimensions", size=4, timeout=900)
