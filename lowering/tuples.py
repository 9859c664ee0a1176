"""Named tuples that are quick to create.

`typing.NamedTuple` writes the source of a constructor and compiles it: 0.3 ms a class, and a first call needs
some ten. A class derived from the `NamedTuple` of this module has the same methods in a tenth of the time.
To type checkers it is that of `typing`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple


class _Maker(type):
    """Makes a class statement's names and defaults into a class derived from `tuple`, as `typing` does."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        fields = tuple(body.get("__annotations__", ()))
        defaults = {field: body.pop(field) for field in fields if field in body}
        if tuple(defaults) != fields[len(fields) - len(defaults) :]:
            raise TypeError(f"in {name} a field without a default follows one that has one")
        getters = {field: collections._tuplegetter(i, "") for i, field in enumerate(fields)}  # type: ignore[attr-defined]
        body.pop("__orig_bases__", None)
        own = {"__slots__": (), "_fields": fields, "_field_defaults": defaults, "__match_args__": fields}
        return type(name, (tuple,), {**_METHODS, **own, **getters, **body})


def _new(cls: type[Any], /, *args: Any, **given: Any) -> Any:
    fields = cls._fields
    if len(args) != len(fields) or given:
        rest, values = fields[len(args) :], {**cls._field_defaults, **given}
        fits = all(name in rest for name in given) and all(name in values for name in rest)
        if not fits or len(args) > len(fields):
            _refuse(cls, args, given)
        args = (*args, *[values[name] for name in rest])
    return tuple.__new__(cls, args)


def _refuse(cls: type[Any], args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """TypeError for a call of the class with too many values, or too few."""
    fields, name = cls._fields, f"{cls.__name__}.__new__()"
    if len(args) > len(fields):
        raise TypeError(f"{name} takes {len(fields) + 1} positional arguments but {len(args) + 1} were given")
    for field in given:
        if field not in fields:
            raise TypeError(f"{name} got an unexpected keyword argument {field!r}")
        if field in fields[: len(args)]:
            raise TypeError(f"{name} got multiple values for argument {field!r}")
    lacks = [f for f in fields[len(args) :] if f not in given and f not in cls._field_defaults]
    raise TypeError(f"{name} missing required arguments: {', '.join(map(repr, lacks))}")


def _make(cls: type[Any], values: Iterable[Any]) -> Any:
    made = tuple.__new__(cls, values)
    if len(made) != len(cls._fields):
        raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
    return made


def _replace(self: Any, /, **given: Any) -> Any:
    made = self._make([given.pop(field, value) for field, value in zip(self._fields, self)])
    if given:
        raise ValueError(f"Got unexpected field names: {list(given)!r}")
    return made


def _asdict(self: Any) -> dict[str, Any]:
    return dict(zip(self._fields, self))


def _repr(self: Any) -> str:
    shown = ", ".join([f"{field}={value!r}" for field, value in zip(self._fields, self)])
    return f"{self.__class__.__name__}({shown})"


def _getnewargs(self: Any) -> tuple[Any, ...]:
    return tuple(self)


_METHODS = {
    "__new__": _new,
    "_make": classmethod(_make),
    "_replace": _replace,
    "_asdict": _asdict,
    "__repr__": _repr,
    "__getnewargs__": _getnewargs,
}


class _Base:
    """The base that a class statement names. The class has `tuple` alone in its place, which is how
    PyTorch knows a named tuple."""

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(bases) != 1:
            raise TypeError("a named tuple has no other base")
        return (type.__new__(_Maker, "NamedTuple", (), {}),)


if not TYPE_CHECKING:
    NamedTuple = _Base()
