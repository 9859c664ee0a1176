"""The errors of the lowering layer.

Each derives from the built-in that a caller would expect (``TypeError`` for a wrong kind of argument,
``ValueError`` for a wrong value), and all of them from `LoweringError`.
"""

from __future__ import annotations


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
