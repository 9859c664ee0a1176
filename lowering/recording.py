"""Record the calls that a program makes: which kernels it needs, found without a GPU or running any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lowering.records import frozen

if TYPE_CHECKING:
    from lowering.function import JitFunction


@frozen
class RecordedCall:
    """A call of a JIT function: `function.compile(*args, arch=..., **constants)` compiles its kernel."""

    function: JitFunction
    args: tuple[Any, ...]
    constants: dict[str, Any]


_active: list[tuple[str, list[RecordedCall]]] = []


@contextmanager
def record(arch: str) -> Iterator[list[RecordedCall]]:
    """Within it, calls of JIT functions on CPU tensors launch nothing and are kept in the list that it gives.

    arch: such as "sm_90a", what the program takes the tensors' device to be. What the calls should have
    written is left as it is, so that a program whose control flow depends on results is not for this.
    """
    calls: list[RecordedCall] = []
    _active.append((arch, calls))
    try:
        yield calls
    finally:
        _active.pop()


def active() -> tuple[str, list[RecordedCall]] | None:
    """The architecture and the list of the innermost recording, or None."""
    return _active[-1] if _active else None
