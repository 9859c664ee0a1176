"""Frozen dataclasses that are quick to create.

`dataclasses.dataclass` writes the source of each method and compiles it: 0.6 ms a class, and a first call
needs some forty classes. `frozen` gives a class the behaviour of ``dataclass(frozen=True)`` in a tenth of the
time, with methods that are shared or closures. A class that is hashed often gets the written methods then:
they run twice as fast. `dataclasses.fields`, `replace`, `asdict` and `is_dataclass` take such a class for one
of theirs. Fields may have defaults, factories, and `repr`, `compare`, `hash`, `init` of `dataclasses.field`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from lowering.tuples import NamedTuple as NamedTuple

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        """`typing.dataclass_transform`, which Python 3.10 lacks."""
        return lambda decorator: decorator


T = TypeVar("T")
_MISSING = dataclasses.MISSING
OFTEN = 100
"""Hashes of records of a class before its methods are compiled."""


@overload
def frozen(cls: type[T], /) -> type[T]: ...
@overload
def frozen(*, eq: bool = True) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(cls: type[Any] | None = None, /, *, eq: bool = True) -> Any:
    """Make a class a frozen dataclass; a decorator, with or without arguments.

    :param eq: False keeps the comparison and hash of objects: by identity.
    """
    return _frozen(cls, eq) if cls is not None else lambda decorated: _frozen(decorated, eq)


def plain(cls: type[Any] | None = None, /, **options: bool) -> Any:
    """`dataclasses.dataclass` for a class that is not frozen; quick where `options` are eq and repr alone."""
    if cls is None:
        return lambda decorated: plain(decorated, **options)
    if not options.keys() <= {"eq", "repr"} or not _give_fields(cls):
        return dataclasses.dataclass(**options)(cls)  # type: ignore[call-overload]
    own, eq = cls.__dict__, options.get("eq", True)
    cls.__dataclass_params__ = _parameters(eq, frozen=False)  # type: ignore[attr-defined]
    cls.__dataclass_params__.repr = options.get("repr", True)  # type: ignore[attr-defined]
    _give_methods(cls, [name for name in ("__init__", "__eq__")[: 1 + eq] if name not in own])
    if eq and "__hash__" not in own:
        cls.__hash__ = None  # type: ignore[assignment]
    if options.get("repr", True) and "__repr__" not in own:
        cls.__repr__ = _repr  # type: ignore[assignment]
    return cls


def _frozen(cls: type[Any], eq: bool) -> type[Any]:
    own = cls.__dict__
    if not _give_fields(cls):
        inherits = hasattr(cls, "__dataclass_fields__")  # then its base must be frozen
        dataclasses.dataclass(init=False, repr=False, eq=False, frozen=inherits)(cls)
    cls.__dataclass_params__ = _PARAMETERS[eq]  # type: ignore[attr-defined]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = ["__init__"] if "__init__" not in own else []
    if eq:
        names += ["__eq__"] if "__eq__" not in own else []
        names += ["__hash__"] if own.get("__hash__") is None else []  # None: of Python, beside an `__eq__`
    _give_methods(cls, names)
    if "__init__" in names:
        cls.__signature__ = _Signature(cls)
        if not hasattr(cls, "__post_init__") and all(field.init for field in fields):
            cls.__copied_fields__ = frozenset(field.name for field in fields)
    if "__repr__" not in own:
        cls.__repr__ = _repr  # type: ignore[assignment]
    cls.__setattr__, cls.__delattr__ = _setattr, _delattr  # type: ignore[assignment]
    return cls


def _give_methods(cls: type[Any], names: list[str]) -> None:
    fields = dataclasses.fields(cls)
    for name in names:
        method = _MAKERS[name](cls, fields, names)
        method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
        method.__module__ = cls.__module__
        setattr(cls, name, method)


def changed(record: T, **changes: Any) -> T:
    """`dataclasses.replace` in a tenth of the time, where a copy of the fields is all there is to it."""
    cls, values = type(record), vars(record)
    names = cls.__dict__.get("__copied_fields__", ())
    if len(values) != len(names) or not changes.keys() <= names:
        return dataclasses.replace(record, **changes)  # type: ignore[type-var]
    made = object.__new__(cls)
    vars(made).update(values, **changes)
    return made


@dataclasses.dataclass(init=False, repr=False, eq=False)
class _Plain:
    """A dataclass with one field, whose facts other classes get copies of."""

    field: Any


def _parameters(eq: bool, frozen: bool = True) -> Any:
    """Facts that a dataclass has of itself, the same for all frozen ones of ours."""
    made = copy.copy(_Plain.__dict__["__dataclass_params__"])
    made.init = made.repr = True
    made.eq, made.frozen = eq, frozen
    return made


_PARAMETERS = {eq: _parameters(eq) for eq in (True, False)}
_ORDINARY = _Plain.__dict__["__dataclass_fields__"]["field"]._field_type
_SPECIAL = ("ClassVar", "InitVar", "KW_ONLY")


def _give_fields(cls: type[Any]) -> bool:
    """Give a class its fields, on which `dataclasses.dataclass` spends most of its time.

    False where that must look: annotations that are no strings or no fields, defaults that may change, a
    base that is not one of ours.
    """
    own = cls.__dict__
    annotations = own.get("__annotations__")
    if annotations is None or cls.__doc__ is None:
        return False
    if getattr(cls, "__dataclass_params__", _PARAMETERS[True]) not in _PARAMETERS.values():
        return False
    fields: dict[str, Any] = {}
    for base in cls.__mro__[:0:-1]:
        fields.update(base.__dict__.get("__dataclass_fields__", {}))
    for name, annotation in annotations.items():
        if isinstance(annotation, str) and annotation.startswith("ClassVar["):
            continue
        if not isinstance(annotation, str) or any(word in annotation for word in _SPECIAL):
            return False
        default = own.get(name, _MISSING)
        field = default if isinstance(default, dataclasses.Field) else dataclasses.field(default=default)
        if field.kw_only is True or type(field.default).__hash__ is None:
            return False
        field.name, field.type, field.kw_only = name, annotation, False
        field._field_type = _ORDINARY  # type: ignore[attr-defined,union-attr]
        fields[name] = field
    for name, field in fields.items():
        if isinstance(own.get(name), dataclasses.Field):
            if field.default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, field.default)
    cls.__dataclass_fields__ = fields
    if "__match_args__" not in own:
        cls.__match_args__ = tuple(name for name, field in fields.items() if field.init)  # type: ignore[misc]
    return True


def _compile(cls: type[Any], names: list[str]) -> None:
    """Give a class the methods of these names that `dataclasses.dataclass` writes."""
    fields = [copy.copy(field) for field in dataclasses.fields(cls)]
    body: dict[str, Any] = {field.name: field for field in fields}
    body["__annotations__"] = {field.name: field.type for field in fields}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if hasattr(cls, "__post_init__"):
        body["__post_init__"] = None  # only whether there is one counts
    twin: type[Any] = dataclasses.dataclass(frozen=True)(type(cls.__name__, (), body))
    for name in names:
        setattr(cls, name, twin.__dict__[name])


class _Needed:
    """In place of a default that is not there. A class, which torch.compile takes for a constant."""


def _init(cls: type[Any], fields: tuple[Any, ...], names: list[str]) -> Callable[..., None]:
    """`__init__`: values by position, by keyword, defaults, results of factories, in the fields' order."""
    taken = [(field.name, field.default, field.default_factory) for field in fields if field.init]
    places = tuple(name for name, _, _ in taken)
    rest = tuple((name, _Needed if default is _MISSING else default) for name, default, _ in taken)
    made = {name: factory for name, _, factory in taken if factory is not _MISSING}
    factories = [(field.name, field.default_factory) for field in fields if not field.init]
    made_always = tuple(item for item in factories if item[1] is not _MISSING)
    finish = hasattr(cls, "__post_init__")

    def init(self: Any, /, *args: Any, **given: Any) -> None:
        for name, value in zip(places, args):
            object.__setattr__(self, name, value)
        for name, default in rest[len(args) :]:
            value = given.pop(name, default)
            if value is _Needed:
                if name not in made:
                    _refuse(self, places, args, given)
                value = made[name]()
            object.__setattr__(self, name, value)
        if given or len(args) > len(places):
            _refuse(self, places, args, given)
        for name, factory in made_always:
            object.__setattr__(self, name, factory())
        if finish:
            self.__post_init__()

    return init


def _eq(cls: type[Any], fields: tuple[Any, ...], names: list[str]) -> Callable[..., Any]:
    """`__eq__`: by the fields' values, among records of the very same class."""
    compared = tuple(field.name for field in fields if field.compare)

    def eq(self: Any, other: object) -> bool:
        if other.__class__ is self.__class__:
            return [getattr(self, name) for name in compared] == [getattr(other, name) for name in compared]
        return NotImplemented

    return eq


def _hash(cls: type[Any], fields: tuple[Any, ...], names: list[str]) -> Callable[..., int]:
    """`__hash__`: of the fields' values."""
    hashed = [f.name for f in fields if (f.compare if f.hash is None else f.hash)]
    uses = itertools.count(1)

    def hash_(self: Any) -> int:
        if next(uses) == OFTEN:
            _compile(cls, names)
        return hash(tuple([getattr(self, name) for name in hashed]))

    return hash_


_MAKERS: dict[str, Callable[..., Callable[..., Any]]] = {"__init__": _init, "__eq__": _eq, "__hash__": _hash}


def _refuse(record: Any, names: tuple[str, ...], args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """TypeError for what a call of the class leaves out or has too much of, in Python's own words."""
    cls = type(record)
    say = f"{cls.__qualname__}.__init__()"
    if len(args) > len(names):
        raise TypeError(f"{say} takes {len(names) + 1} positional arguments but {len(args) + 1} were given")
    for name in given:
        if name in names[: len(args)]:
            raise TypeError(f"{say} got multiple values for argument {name!r}")
        if name not in names:
            raise TypeError(f"{say} got an unexpected keyword argument {name!r}")
    there = {*vars(record), *given}
    fields = (field for field in dataclasses.fields(cls) if field.init)
    needed = (f.name for f in fields if f.default is _MISSING and f.default_factory is _MISSING)
    lacks = [name for name in needed if name not in there]
    raise TypeError(f"{say} missing required arguments: {', '.join(map(repr, lacks))}")


class _Signature:
    """Signature of the class for `inspect.signature` and `help`; made when they ask."""

    def __init__(self, cls: type[Any]) -> None:
        self.cls = cls

    def __get__(self, instance: Any, owner: type[Any]) -> inspect.Signature:
        if owner.__init__ is not self.cls.__init__:  # a class derived from it, with an `__init__` of its own
            raise AttributeError("__signature__")
        empty, kind = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = []
        for field in dataclasses.fields(owner):
            if field.init:
                made = field.default_factory if field.default is _MISSING else field.default
                default = empty if made is _MISSING else made
                parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=field.type))
        return inspect.Signature(parameters, return_annotation=None)


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _is_fixed(record: Any, name: str) -> bool:
    """True if an attribute may not change: each of a record, a field's of a plain class derived from one."""
    return "__dataclass_fields__" in type(record).__dict__ or name in record.__dataclass_fields__


def _setattr(self: Any, name: str, value: Any) -> None:
    if _is_fixed(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delattr(self: Any, name: str) -> None:
    if _is_fixed(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)
