"""Python call stacks of a kernel's instructions, and its shared-memory allocations, noted while it is traced.

The DSL's line information has one line for each instruction: the innermost one outside of the DSL, which is
often a helper's. So while a kernel is compiled for the emulator, the column of that line stands for the
number of the Python call stack. Columns pass through the compiler into the PTX. Where it merges instructions
of one line it drops the column; then the line is all there is.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .reports import SourceLine

MOST_COLUMNS = 0xFFFF  # of a line, in LLVM
_ENTRIES = ("kernel_wrapper", "generate_original_ir")  # functions of the DSL that call the traced function
_PASSED_ON = ("wrapper", "_apply_loc_transforms", "_locate")
_PIECES = re.compile(r"^(loop_body|while_\w+|then_block|else_block|if_\w+|for_\w+|elif_\w+)_\d+$")
_ASSIGNED = re.compile(r"^\s*(?:\w+\.)*([A-Za-z_]\w*)\s*(?::[^=]+)?=(?!=)")
_ROLE = re.compile(r"sync_object_(\w+)\s*=")  # what the DSL's pipelines call their barriers
_INITIALISED = re.compile(r"mbarrier_init\(\s*([A-Za-z_]\w*(?:\.\w+)*)")


class CallStack(NamedTuple):
    """``lines``: the program's, from the innermost out. ``role``: full or empty, of a pipeline."""

    lines: tuple[SourceLine, ...]
    role: str = ""

    def label(self) -> str:
        """The name that the program gives to what is made here: ``ring.full``; empty where it gives none."""
        for line in self.lines:
            text = linecache.getline(line.path, line.line)
            found = _INITIALISED.search(text) or _ASSIGNED.match(text)
            if found:
                return f"{found[1]}.{self.role}" if self.role else found[1]
        return self.role


class Allocation(NamedTuple):
    """Shared memory that a kernel allocates: ``fields`` of a struct as (name, bytes, offset)."""

    name: str
    size: int
    alignment: int
    fields: tuple[tuple[str, int, int], ...]


class _Recorded:
    """All that this process has traced: it serves every kernel, as their places in the source differ."""

    def __init__(self) -> None:
        self.stacks: dict[tuple[str, int, int], CallStack] = {}
        self.columns: dict[tuple[str, int], dict[CallStack, int]] = {}
        self.allocations: dict[str, list[Allocation]] = {}
        self.active = False
        self.kernel: Any = None  # the function that is being traced
        # Walking the stack for each operation is most of the cost, so a walk is done once for each chain of
        # code positions. Code objects are kept, so that no other gets their numbers.
        self.walks: dict[tuple[int, ...], CallStack] = {}
        self.entries: set[int] = set()
        self.kept: list[CodeType] = []
        self.locations: dict[tuple[int, ...], Any] = {}  # of one MLIR context
        self.of_stacks: dict[CallStack, Any] = {}
        self.context: Any = None

    def forget(self) -> None:
        """Forget locations, which belong to an MLIR context."""
        self.locations.clear()
        self.of_stacks.clear()

    def column(self, stack: CallStack) -> int:
        """The column that stands for ``stack`` on its innermost line; 0 where there are too many."""
        path, line, _ = stack.lines[0]
        known = self.columns.setdefault((path, line), {})
        column = known.get(stack)
        if column is None:
            column = len(known) + 1
            if column > MOST_COLUMNS:
                return 0
            known[stack] = column
            self.stacks[path, line, column] = stack
        return column


_recorded = _Recorded()


def find(path: str, line: int, column: int) -> CallStack:
    """The call stack of a place in PTX; of one line where no stack was noted."""
    return _recorded.stacks.get((path, line, column)) or CallStack((SourceLine(path, line),))


def column(stack: CallStack) -> int:
    """The column that stands for a call stack, of a kernel that another process traced, in this process."""
    return _recorded.column(stack)


def note_allocations(kernel: str, made: list[Allocation]) -> None:
    """Take over the shared-memory allocations of a kernel that another process traced."""
    _recorded.allocations[kernel] = made


def allocations(kernel: str) -> tuple[Allocation, ...]:
    """Shared memory that the kernel of this name, as traced last, allocates, in order."""
    return tuple(_recorded.allocations.get(kernel, ()))


@contextmanager
def recorded() -> Iterator[None]:
    """Note call stacks and allocations of what is compiled within, with line information."""
    if _recorded.active:
        yield
        return
    try:
        from cutlass._mlir_helpers.op import loc_transform
        from cutlass.memory.smem import SmemAllocator

        original = SmemAllocator._smem_alloca
    except (ImportError, AttributeError):  # another version of the DSL: reports have one line each
        yield
        return

    def allocate(self: Any, layout: Any, dtype: Any, byte_alignment: int, *args: Any, **kwargs: Any) -> Any:
        made = original(self, layout, dtype, byte_alignment, *args, **kwargs)
        _note_allocation(layout, dtype, byte_alignment, kwargs.get("struct_fields") or ())
        return made

    SmemAllocator._smem_alloca = allocate
    _recorded.active = True
    try:
        with loc_transform(_locate):
            yield
    finally:
        SmemAllocator._smem_alloca = original
        _recorded.active, _recorded.kernel, _recorded.context = False, None, None
        _recorded.forget()


def _locate(location: Any) -> Any:
    """Replace a location by that of the call stack."""
    if location is None:
        return None
    frame: FrameType | None = sys._getframe(1)
    chain: list[int] = []
    while frame is not None and (number := id(frame.f_code)) not in _recorded.entries:
        chain += (number, frame.f_lasti)
        frame = frame.f_back
    key = tuple(chain)
    if location.context is not _recorded.context:
        _recorded.context = location.context
        _recorded.forget()
    found = _recorded.locations.get(key)
    if found is None:
        found = _recorded.locations[key] = _new_location(location, key, sys._getframe(1))
    return found


def _new_location(location: Any, key: tuple[int, ...], frame: FrameType) -> Any:
    from cutlass._mlir import ir

    stack = _recorded.walks.get(key)
    if stack is None:
        stack = _recorded.walks[key] = _walk(frame)
    if not stack.lines:
        return location
    made = _recorded.of_stacks.get(stack)
    if made is not None:
        return made
    place = stack.lines[0]
    file = ir.Location.file(place.path, place.line, _recorded.column(stack))
    made = _recorded.of_stacks[stack] = ir.Location.name(place.function or "kernel", childLoc=file)
    return made


def _walk(frame: FrameType | None) -> CallStack:
    """The call stack from ``frame`` to the kernel's own line."""
    lines: list[SourceLine] = []
    role = ""
    inside = ""  # the function whose loop or branch was the last line: the rest of it comes next
    while frame is not None:
        code = frame.f_code
        _recorded.kept.append(code)
        if _is_library(frame.f_globals.get("__name__", "")):
            if code.co_name in _ENTRIES:
                _recorded.entries.add(id(code))
                break
            if not lines and code.co_name not in _PASSED_ON and not role:
                found = _ROLE.search(linecache.getline(code.co_filename, frame.f_lineno))
                role = found[1] if found else ""
        else:
            owner = _owner(code)
            if owner != inside:
                name = owner.rpartition(".")[2]
                lines.append(SourceLine(code.co_filename, frame.f_lineno, name))
            inside = owner if _PIECES.match(code.co_name) else ""
        frame = frame.f_back
    return CallStack(tuple(lines), role)


@lru_cache(maxsize=4096)
def _owner(code: CodeType) -> str:
    """The function that a code object belongs to, as it was written: the DSL makes loop bodies and branches
    functions of their own."""
    parts: list[str] = getattr(code, "co_qualname", code.co_name).split(".<locals>.")
    while len(parts) > 1 and _PIECES.match(parts[-1]):
        parts.pop()
    return ".<locals>.".join(parts)


@lru_cache(maxsize=1024)
def _is_library(module: str) -> bool:
    """True for the DSL, and for what the emulator puts around its functions."""
    return module.split(".")[0] == "cutlass" or module.startswith(f"{__package__}.front.")


def _note_allocation(layout: Any, dtype: Any, alignment: int, fields: Any) -> None:
    import cutlass.cute as cute
    from cutlass._mlir import ir

    owner = ir.InsertionPoint.current.block.owner
    while owner is not None and "sym_name" not in owner.attributes:
        owner = owner.parent
    size = cute.cosize(layout)
    if owner is None or not isinstance(size, int):
        return
    stack = _walk(sys._getframe(1))
    found = Allocation(
        stack.label(),
        size * dtype.width // 8,
        max(alignment, dtype.width // 8),
        tuple((str(name), int(length), int(offset)) for name, length, offset in fields),
    )
    kernel = ir.StringAttr(owner.attributes["sym_name"]).value
    if _recorded.kernel is None or owner != _recorded.kernel:
        _recorded.kernel, _recorded.allocations[kernel] = owner, []
    _recorded.allocations[kernel].append(found)
