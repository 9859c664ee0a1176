"""The errors of the lowering layer.

Each derives from the built-in that a caller would expect (``TypeError`` for a wrong kind of argument,
``ValueError`` for a wrong value), and all of them from `LoweringError`.
"""

from __future__ import annotations

import re
from typing import TypeVar

# Control sequences (colours, cursor), operating-system commands (titles, links), and any other escape.
_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.?)"
_Error = TypeVar("_Error", bound=BaseException)


class LoweringError(Exception):
    """Something that the lowering layer noticed, in words for the caller."""


class ArgumentTypeError(LoweringError, TypeError):
    """An argument is of a kind that the kernel does not take."""


class ArgumentValueError(LoweringError, ValueError):
    """An argument is of the right kind with a value that the kernel cannot take."""


class CompileError(LoweringError, RuntimeError):
    """The DSL refused the kernel, or what it made cannot run on the chosen architecture."""


class CompileRefused(LoweringError, RuntimeError):
    """A compile would be needed, and compiling is switched off (`lowering.cache.refuse_compile`)."""


class CaptureError(LoweringError, RuntimeError):
    """A kernel was called for the first time inside a CUDA graph capture."""


class DamagedEntry(LoweringError, ValueError):
    """Bytes that are not the whole, unaltered cache entry they claim to be."""


class LinkError(LoweringError, RuntimeError):
    """An object file holds something that the built-in linker does not know."""


class Untrusted(LoweringError, OSError):
    """A file or folder that somebody else than the user and root could have written."""


def plain(text: object) -> str:
    """The text without escape sequences for a terminal, which the DSL's messages carry even into a log."""
    shown = str(text)
    return re.sub(_ESCAPES, "", shown, flags=re.DOTALL) if "\x1b" in shown else shown


def without_colours(error: _Error) -> _Error:
    """The same error; its message, its notes and its chain of causes no longer hold escape sequences."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        waiting += [found.__cause__, found.__context__, *getattr(found, "exceptions", ())]
        notes = getattr(found, "__notes__", None)
        if notes:
            notes[:] = [plain(note) for note in notes]
        args = tuple(plain(arg) if isinstance(arg, str) else arg for arg in found.args)
        if args != found.args:
            found.args = args
        if "\x1b" in str(found):
            _override_text(found)
    return error


def _override_text(error: BaseException) -> None:
    """Give an error that puts its text together itself a class of the same name whose text is plain."""
    own = type(error)
    methods = {"__str__": lambda self: plain(own.__str__(self)), "__module__": own.__module__}
    try:
        error.__class__ = type(own.__name__, (own,), methods)
    except TypeError:
        pass  # a class whose instances are of another layout: what is left is the original text
