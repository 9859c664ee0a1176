"""A canonical text for configuration values, so that equal configurations share one compiled kernel.

Pickle is not canonical and ``repr`` is not complete; this is both for what configuration is made of: None,
numbers, strings, enums, tuples, frozen dataclasses, types, and functions. The text of a function holds its
source, its defaults, its closure's values and, recursively, the globals that it names; so an epilogue that
was edited, or that closes over another number, is another configuration.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

from lowering.errors import ArgumentTypeError
from lowering.places import file_stamp, is_first_party
from lowering.reach import module_fingerprint

PRIMITIVES = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


class Canonicalizer:
    """Turns values into text; `files` collects the source files that the text rests on."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}
        self._open: list[int] = []

    def text(self, name: str, value: Any) -> str:
        """The canonical text of a configuration value.

        :param name: what the value is called, for errors.
        :raises ArgumentTypeError: for a value that can change after it was passed (a list, a dict, a
            dataclass that is not frozen) or that has no source to tell it by.
        """
        if isinstance(value, enum.Enum):
            return f"{_type_name(type(value))}.{value.name}={self.text(name, value.value)}"
        if isinstance(value, PRIMITIVES):
            return f"{type(value).__name__}:{value!r}"
        if id(value) in self._open:
            return f"<seen {self._open.index(id(value))}>"
        self._open.append(id(value))
        try:
            return self._compound(name, value)
        finally:
            self._open.pop()

    def _compound(self, name: str, value: Any) -> str:
        if isinstance(value, tuple):
            items = ",".join(self.text(f"{name}[{i}]", item) for i, item in enumerate(value))
            return f"{_type_name(type(value))}({items})"
        if isinstance(value, frozenset):
            return "frozenset{" + ",".join(sorted(self.text(name, item) for item in value)) + "}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(name, value)
        if isinstance(value, type):
            return self._type(value)
        if isinstance(value, functools.partial):
            keywords = tuple(sorted(value.keywords.items()))
            return "partial" + self.text(name, (value.func, value.args, keywords))
        if isinstance(value, types.MethodType):
            return "method" + self.text(name, (value.__func__, value.__self__))
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType)):
            return f"builtin:{getattr(value, '__module__', '')}.{value.__qualname__}"
        if isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
            return self._function(name, value)
        if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
            return str(value)
        raise ArgumentTypeError(
            f"configuration {name!r}: a value of type {type(value).__name__} cannot be a key; use a frozen "
            "dataclass, an enum, a number, a string, None, a tuple of those, or a function"
        )

    def _dataclass(self, name: str, value: Any) -> str:
        if not type(value).__dataclass_params__.frozen:
            raise ArgumentTypeError(
                f"configuration {name!r}: dataclass {type(value).__name__} must be frozen, "
                "so that it cannot change after its kernel was compiled"
            )
        fields = (
            f"{f.name}={self.text(f'{name}.{f.name}', getattr(value, f.name))}"
            for f in dataclasses.fields(value)
        )
        return f"{self._type(type(value))}({','.join(fields)})"

    def _type(self, value: type) -> str:
        """A type: its name, and for a first-party one the source of its module."""
        module = sys.modules.get(value.__module__)
        return _type_name(value) + (self._module(module) if module is not None else "")

    def _module(self, module: types.ModuleType) -> str:
        path = getattr(module, "__file__", None)
        if not path or not path.endswith(".py") or not is_first_party(module.__name__, os.path.abspath(path)):
            return f"<{module.__name__}>"
        fingerprint = module_fingerprint(module.__name__)
        self.files.update(fingerprint.files)
        return f"<{module.__name__} {fingerprint.digest}>"

    def _function(self, name: str, function: Any) -> str:
        """A function. One of a third-party module is its name, with what it closes over."""
        function = inspect.unwrap(function)
        code = _code_of(function)
        if code is None:
            return f"callable:{_type_name(type(function))}"
        parts = [function.__qualname__]
        if is_first_party(function.__module__ or "", os.path.abspath(code.co_filename)):
            parts.append(hashlib.sha256(self._source(function).encode()).hexdigest())
            parts.append(self.text(name, function.__defaults__ or ()))
            parts.append(self.text(name, tuple(sorted((function.__kwdefaults__ or {}).items()))))
            parts += self._globals(name, function)
        for variable, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                inner = cell.cell_contents
            except ValueError:  # a name that is not bound yet
                parts.append(f"{variable}=<empty>")
                continue
            parts.append(f"{variable}={self._reached(f'{name}.{variable}', inner, closed_over=True)}")
        return "function{" + ";".join(parts) + "}"

    def _source(self, function: Callable[..., Any]) -> str:
        code = _code_of(function)
        try:
            text = textwrap.dedent(inspect.getsource(code))
        except (OSError, TypeError):
            return _code_text(code)
        self.files[code.co_filename] = file_stamp(code.co_filename)
        # Two lambdas on one line have the same source lines, so only their code tells them apart.
        return text + _code_text(code) if function.__name__ == "<lambda>" else text

    def _globals(self, name: str, function: Any) -> list[str]:
        parts = []
        for variable in sorted(_global_names(_code_of(function))):
            if variable in function.__globals__:
                value = function.__globals__[variable]
                parts.append(f"{variable}={self._reached(f'{name}.{variable}', value, closed_over=False)}")
        return parts

    def _reached(self, name: str, value: Any, closed_over: bool) -> str:
        """A value that a function reaches. A global without a canonical text (a logger, say) is its type's
        name; a closed-over one is an error, since closures are how configuration is passed to epilogues."""
        try:
            return self.text(name, value)
        except ArgumentTypeError:
            if closed_over:
                raise
            return f"opaque:{_type_name(type(value))}"


def _code_of(function: Any) -> Any:
    """A function's code as it was written; the DSL replaces it with rewritten code at the first trace."""
    return getattr(function, "_original_code", None) or getattr(function, "__code__", None)


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _code_text(code: types.CodeType) -> str:
    """Behaviour of a code object, for functions without source. It differs between versions of Python."""
    constants = [_code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{sys.version_info[:2]}{code.co_code.hex()}{code.co_names}{code.co_varnames}{constants}"


def _type_name(value: type) -> str:
    # A script's own types are in `__main__` when it runs and in its module when it is imported.
    return (
        value.__qualname__
        if value.__module__ in ("builtins", "__main__")
        else f"{value.__module__}.{value.__qualname__}"
    )
