"""Frozen records are frozen dataclasses in all that shows, before and after their methods are compiled."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lowering import records
from lowering.records import frozen


@frozen
class Tile:
    """A record with all kinds of fields."""

    rows: int
    columns: int
    stages: int = 4
    names: list[str] = field(default_factory=list)
    note: str = field(default="", compare=False, repr=False)
    made: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    family = "sm90"

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError("rows must be ≥ 0")


@dataclass(frozen=True)
class Theirs:
    """The same fields by the standard library."""

    rows: int
    columns: int
    stages: int = 4
    names: list[str] = field(default_factory=list)
    note: str = field(default="", compare=False, repr=False)
    made: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)


@frozen
class Pair:
    """Without defaults."""

    a: Any
    b: Any


@frozen
class One(Pair):
    """Inherits two fields."""

    c: Any = 3


@frozen(eq=False)
class Same:
    """Equal only to itself."""

    a: int


class Plain(Pair):
    """Not a record itself."""

    def __init__(self, both: int) -> None:
        super().__init__(both, both)
        self.extra = both


@pytest.fixture(params=["as made", "compiled"], autouse=True, scope="module")
def uses(request):
    if request.param == "compiled":
        for cls in (Tile, Pair, One):
            records._compile(cls, ["__init__", "__eq__", "__hash__"])


def test_fields_are_a_dataclass():
    assert dataclasses.is_dataclass(Tile) and Tile.__dataclass_params__.frozen
    assert [f.name for f in dataclasses.fields(Tile)] == [f.name for f in dataclasses.fields(Theirs)]
    tile = Tile(1, columns=2, note="x")
    assert dataclasses.asdict(tile) == dataclasses.asdict(Theirs(1, columns=2, note="x"))
    assert list(vars(tile)) == list(vars(Theirs(1, 2)))
    changed = dataclasses.replace(tile, stages=2)
    assert (changed.rows, changed.columns, changed.stages, changed.note) == (1, 2, 2, "x")
    assert Tile.__match_args__ == Theirs.__match_args__ and Tile.family == "sm90"
    assert tile.made == {} and tile.made is not Tile(1, 2).made and tile.names is not Tile(1, 2).names


def test_text_and_signature():
    assert repr(Tile(1, 2)) == repr(Theirs(1, 2)).replace("Theirs", "Tile")
    loop = Pair(1, [])
    loop.b.append(loop)
    assert repr(loop) == "Pair(a=1, b=[...])"
    theirs = inspect.signature(Theirs)
    assert [(p.name, p.kind) for p in inspect.signature(Tile).parameters.values()] == [
        (p.name, p.kind) for p in theirs.parameters.values()
    ]
    assert inspect.signature(Tile).parameters["stages"].default == 4
    assert list(inspect.signature(Plain).parameters) == ["both"]


def test_comparison_and_hash():
    assert Pair(1, "x") == Pair(1, "x") != Pair(1, "y")
    assert Pair(1, 2) != One(1, 2) and One(1, 2) == One(1, 2, 3) and Pair(1, 2) != (1, 2)
    assert hash(Pair(1, "x")) == hash(Pair(1, "x")) and len({One(1, 2), One(1, 2), One(1, 2, 4)}) == 2
    assert Tile(1, 2, note="x") == Tile(1, 2)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Tile(1, 2))
    assert Same(1) != Same(1) and len({Same(1), Same(1)}) == 2


def test_records_do_not_change():
    for cls in (Tile, One):
        record = cls(1, 2)
        for name in (dataclasses.fields(cls)[0].name, "other"):
            with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
                setattr(record, name, 3)
            with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete"):
                delattr(record, name)
    plain = Plain(1)
    plain.extra = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.a = 2


def test_copies():
    for record in (Tile(1, 2, names=["x"]), One(1, (2,))):
        for made in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
            assert made == record and made is not record


@pytest.mark.parametrize(
    ("args", "given", "text"),
    [
        ((1, 2, 3, 4, 5, 6), {}, r"Tile.__init__\(\) takes .*6 positional arguments but 7 were given"),
        ((1, 2), {"rows": 3}, "multiple values for argument 'rows'"),
        ((1, 2), {"made": {}}, "unexpected keyword argument 'made'"),
        ((), {"stages": 3, "columns": 1}, "missing .*'rows'$"),
        ((1,), {"cols": 2}, "unexpected keyword argument 'cols'"),
        ((), {}, "missing .*'rows'.*'columns'"),
    ],
)
def test_wrong_arguments(args, given, text):
    with pytest.raises(TypeError, match=text):
        Tile(*args, **given)


def test_finishing_runs():
    with pytest.raises(ValueError, match="rows must be"):
        Tile(-1, 2)


@pytest.mark.parametrize(
    "options", [{}, {"eq": False}, {"repr": False}, {"order": True}, {"unsafe_hash": True}], ids=str
)
def test_plain_dataclasses_are_those_of_the_standard_library(options):
    def made(decorate: Any) -> Any:
        class Counter:
            """Changes."""

            name: str
            count: int = 0
            seen: list[int] = field(default_factory=list, repr=False)

            def __post_init__(self) -> None:
                self.count += 1

        return decorate(**options)(Counter)

    ours, theirs = made(records.plain), made(dataclass)
    assert repr(ours.__dataclass_params__) == repr(theirs.__dataclass_params__)
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    a, b = ours("x", count=1), ours("x", count=1)
    assert dataclasses.asdict(a) == dataclasses.asdict(theirs("x", count=1))
    assert (a == b) == (theirs("x", count=1) == theirs("x", count=1))
    assert ("(name='x', count=2)" in repr(a)) == ("(name='x', count=2)" in repr(theirs("x", count=1)))
    a.count = 7
    assert dataclasses.replace(a, name="y").count == 8


def test_methods_are_compiled_of_what_is_hashed_often(monkeypatch):
    monkeypatch.setattr(records, "OFTEN", 3)

    @frozen
    class Counted:
        """Hashed three times."""

        a: int
        b: int = 2

    first, own = Counted(1), Counted.__init__
    assert hash(first) == hash(Counted(1, 2)) and Counted.__init__ is own
    hash(first)
    assert Counted.__init__ is not own and Counted.__init__.__code__.co_varnames == ("self", "a", "b")
    assert (
        Counted(1) == first and hash(Counted(1)) == hash(first) and repr(first).endswith("Counted(a=1, b=2)")
    )


def test_records_in_compiled_code():
    given = Pair(2, 3)

    def scaled(x: torch.Tensor, pair: Pair) -> torch.Tensor:
        tile = Tile(pair.a, columns=4, note="x")
        same = One(1, 2) == One(1, c=3, b=2)
        return x * tile.rows * tile.columns * dataclasses.replace(pair, b=5).b + same

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2), given), scaled(torch.ones(2), given))
