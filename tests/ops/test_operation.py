"""The ritual of a call: what a record says, where a call goes, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels_dsl.config.problem import H200
from kernels_dsl.ops import operation
from kernels_dsl.ops.bsr.product import BSR_GEMM
from kernels_dsl.ops.bsr.sampled_product import BSR_SDDMM
from kernels_dsl.ops.bsr.scaled_product import BSR_SCALED_GEMM
from kernels_dsl.ops.gemm.grouped_arguments import GROUPED_GEMM
from kernels_dsl.ops.gemm.product import GEMM
from kernels_dsl.ops.operation import Arguments, Operation
from kernels_dsl.ops.operators import schema_of
from kernels_dsl.ops.scaled.arguments import SCALED_GEMM
from kernels_dsl.ops.target import Target
from lowering.records import frozen

X, Y = torch.ones(4, 4), torch.ones(4, 4)


@frozen
class Sum(Arguments):
    """x + alpha · y + the others."""

    x: torch.Tensor
    y: torch.Tensor | None = None
    others: tuple[Any, ...] = ()
    alpha: float = 1.0
    mode: str = "fast"
    out: torch.Tensor | None = None

    leading = "x"


class Recorded(Operation[Sum, Any]):
    """Plans are numbers; `made` and `ran` count."""

    def __init__(self) -> None:
        super().__init__("sum", Sum, self._described, self._planned, self._followed)
        self.made: list[Sum] = []
        self.ran: list[int] = []

    def _described(self, call: Sum) -> str:
        if call.mode not in ("fast", "slow"):
            raise ValueError(f"mode is {call.mode!r}, must be 'fast' or 'slow'")
        return call.mode

    def _planned(self, described: str, call: Sum, target: Target) -> int:
        self.made.append(call)
        return len(self.made)

    def _followed(self, plan: int, call: Sum) -> int:
        self.ran.append(plan)
        return plan


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(operation, "target_of", lambda *_: Target(H200, -1))
    return Recorded()


def _operator() -> Any:
    return lambda call: ("operator", call)


def test_a_record_says_what_its_schema_is() -> None:
    assert Sum.tensors == ("x", "y", "others") and Sum.lists == ("others",)
    wanted = 'Tensor x, Tensor? y=None, Tensor[]? others=None, *, float alpha=1.0, str mode="fast"'
    assert schema_of(Sum) == wanted
    call = Sum(X, None, (Y, 2.0), out=Y)
    assert list(call.read()) == ["x", "y", "others[0]", "others[1]"] and list(call.written()) == ["out"]


@pytest.mark.parametrize("used", [GEMM, SCALED_GEMM, GROUPED_GEMM, BSR_GEMM, BSR_SCALED_GEMM, BSR_SDDMM])
def test_schemas_of_operators_are_those_of_their_records(used: Operation[Any, Any]) -> None:
    from kernels_dsl.ops.bsr import register as bsr_register  # noqa: F401
    from kernels_dsl.ops.gemm import register as gemm_register  # noqa: F401

    schema = getattr(torch.ops.kernels_dsl, used.name).default._schema
    assert [argument.name for argument in schema.arguments] == list(used.record.types)


def test_plans_go_by_what_they_depend_on(recorded: Recorded) -> None:
    calls = [
        Sum(X, alpha=2.0),
        Sum(X, alpha=3.0),
        Sum(Y, alpha=4.0),
        Sum(X),
        Sum(X[:2], alpha=2.0),
        Sum(X, Y),
    ]
    plans = [recorded.run(call) for call in (*calls, Sum(X, mode="slow"), Sum(X, out=Y), Sum(X, None, (Y,)))]
    assert plans == [1, 1, 1, 2, 3, 4, 5, 6, 7]


def test_a_first_call_is_found_again(recorded: Recorded) -> None:
    assert recorded.first(Sum(X), "key", (X,), _operator) == 1
    assert operation.call_cache.find(recorded.calls, "key", (Y,)) == 1
    assert recorded.first(Sum(X), None, (X,), _operator) == 1 and len(recorded.made) == 1


def test_negated_views_are_written_out_and_not_kept(recorded: Recorded) -> None:
    view = torch._neg_view(-X)
    assert recorded.first(Sum(view, None, (view,)), "key", (view,), _operator) == 1
    (call,) = recorded.made
    assert not call.x.is_neg() and not call.others[0].is_neg() and torch.equal(call.x, X)
    assert recorded.calls == {}
    with pytest.raises(ValueError, match="out is a view that torch negates lazily"):
        recorded.first(Sum(X, out=view), None, (), _operator)


def test_what_something_watches_is_an_operators(recorded: Recorded) -> None:
    leaf = X.clone().requires_grad_()
    assert recorded.first(Sum(leaf), "key", (leaf,), _operator)[0] == "operator"
    with torch.no_grad():
        assert recorded.first(Sum(leaf), "key", (leaf,), _operator) == 1
    assert not recorded.calls or recorded.made


def test_reasons_are_text(recorded: Recorded) -> None:
    assert recorded.why_not(x=X) is None and not recorded.ran
    assert recorded.why_not(x=X, mode="odd") == "mode is 'odd', must be 'fast' or 'slow'"
    assert recorded.why_not(x=X, z=1) == "z is given, must not: sum has no such argument"
    overlapping = torch.ones(4).expand(4, 4)
    assert str(recorded.why_not(x=X, out=overlapping)).startswith("out has strides (0, 1)")
