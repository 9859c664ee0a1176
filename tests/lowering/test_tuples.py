"""Named tuples that are made without writing source: they behave as those of `typing`."""

from __future__ import annotations

import copy
import pickle
import typing

import pytest
import torch
from torch.utils import _pytree

from lowering import tuples


class Quick(tuples.NamedTuple):
    """Two items, one with a default."""

    first: int
    second: str = "b"

    @property
    def both(self) -> str:
        return f"{self.first}{self.second}"


class Theirs(typing.NamedTuple):
    first: int
    second: str = "b"


CALLS = (((1,), {}), ((1, "c"), {}), ((1,), {"second": "c"}), ((), {"second": "c", "first": 2}))
WRONG = (((), {}), ((1, "c", 3), {}), ((1,), {"third": 3}), ((1,), {"first": 3}), ((), {"second": "c"}))


@pytest.mark.parametrize(("args", "given"), CALLS)
def test_it_is_what_typing_makes(args, given):
    ours, theirs = Quick(*args, **given), Theirs(*args, **given)
    assert ours == theirs == tuple(theirs) and hash(ours) == hash(theirs)
    assert repr(ours).replace("Quick", "Theirs") == repr(theirs)
    assert (ours.first, ours.second, ours._asdict()) == (theirs.first, theirs.second, theirs._asdict())
    assert ours._replace(second="d") == theirs._replace(second="d") == Quick._make((ours.first, "d"))
    assert ours.both == f"{ours.first}{ours.second}"
    for made in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert made == ours and type(made) is Quick


@pytest.mark.parametrize(("args", "given"), WRONG)
def test_calls_that_do_not_fit(args, given):
    for cls in (Quick, Theirs):
        with pytest.raises(TypeError):
            cls(*args, **given)


def test_errors_name_what_is_wrong():
    with pytest.raises(TypeError, match="'third'"):
        Quick(1, third=3)
    with pytest.raises(TypeError, match="missing required arguments: 'first'"):
        Quick(second="c")
    with pytest.raises(ValueError, match="third"):
        Quick(1)._replace(third=3)
    with pytest.raises(TypeError, match="Expected 2"):
        Quick._make((1,))
    with pytest.raises(TypeError, match="default"):

        class Wrong(tuples.NamedTuple):
            first: int = 1
            second: int


def test_facts_of_the_class():
    assert Quick.__bases__ == (tuple,) and Quick.__slots__ == () and Quick.__name__ == "Quick"
    assert Quick._fields == Theirs._fields == Quick.__match_args__
    assert Quick._field_defaults == Theirs._field_defaults
    assert Quick.__doc__ == "Two items, one with a default." and Quick.__module__ == __name__
    assert not hasattr(Quick(1), "__dict__")
    with pytest.raises(AttributeError):
        Quick(1).first = 2


def test_pytorch_takes_it_for_a_named_tuple():
    x = torch.ones(2)
    assert _pytree.tree_map(lambda leaf: leaf, Quick(x, x)).second is x

    def swapped(value: torch.Tensor) -> Quick:
        pair = Quick(value + 1, second=value)
        return pair._replace(first=pair.second)

    made = torch.compile(swapped, backend="eager", fullgraph=True)(x)
    assert type(made) is Quick and torch.equal(made.first, x)
