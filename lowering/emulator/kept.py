"""Kernels compiled for the emulator, kept on disk: a process that finds one traces and compiles nothing.

They lie in a folder of their own within the cache. An entry has the host function's IR as MLIR bytecode, the
PTX, and the call stacks that columns of the PTX's line information stand for. It counts only while the files
that those name are as they were, at the same place: reports quote their lines.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowering import cache
from lowering.dsl_import import without_jax
from lowering.errors import Untrusted
from lowering.launches import LaunchFacts
from lowering.signature import classify, key_of
from lowering.store import Entry, Store

from . import call_stacks
from .call_stacks import Allocation, CallStack
from .reports import SourceLine

if TYPE_CHECKING:
    from lowering.compile import EmulatorCompile
    from lowering.function import JitFunction

log = logging.getLogger("lowering")

_FORMAT = 1
_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]+)"', re.M)
_LOC = re.compile(r"(\.loc|inlined_at)(\s+)(\d+) (\d+) (\d+)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


def made(
    function: JitFunction, args: Sequence[Any], constants: dict[str, Any], arch: str, parts: dict[str, Any]
) -> EmulatorCompile:
    """`lowering.compile.compile_for_emulator`, or what an earlier process kept of it.

    :param parts: of the kernel's key, see `JitFunction.key_parts`.
    """
    from lowering.compile import compile_for_emulator

    key, store = key_of({**parts, "emulator": _FORMAT}), cache.emulated()
    found = _read(store, key, function, args)
    if found is not None:
        return found
    with _lock(store, key, function.name):
        # Another process may have made it while this one waited.
        found = _read(store, key, function, args) if store is not None else None
        if found is None:
            found = compile_for_emulator(function, args, constants, arch)
            if store is not None and store.may_write() and function.may_be_kept():
                _write(store, key, found)
    return found


def _lock(store: Store | None, key: str, name: str) -> AbstractContextManager[Any]:
    return nullcontext() if store is None else store.lock(key, name)


def _write(store: Store, key: str, compiled: EmulatorCompile) -> None:
    written = io.BytesIO()
    compiled.ir_module.operation.write_bytecode(written)
    stacks = _stacks(compiled.ptx)
    facts = {
        "key": key,
        "name": compiled.name,
        "arch": compiled.arch,
        "function": compiled.function_name,
        "seconds": compiled.seconds,
        "launches": [vars(launch) for launch in compiled.launches],
        "files": _digests(line.path for stack in stacks.values() for line in stack.lines),
    }
    notes = json.dumps({"stacks": _packed(stacks), "allocations": _allocations(compiled.ptx)}).encode()
    library = zlib.compress(len(notes).to_bytes(8, "little") + notes + written.getvalue())
    try:
        store.write(key, Entry.make(library, compiled.ptx, compiled.cubin, facts), cache.size_limit())
    except (OSError, Untrusted) as error:
        cache.warn_once(f"kernels for the emulator cannot be kept on disk: {error}")


def _read(
    store: Store | None, key: str, function: JitFunction, args: Sequence[Any]
) -> EmulatorCompile | None:
    try:
        entry = store.read(key) if store is not None else None
    except (OSError, Untrusted) as error:
        cache.warn_once(f"a kernel for the emulator cannot be read ({error}); compiling it")
        return None
    if entry is None or entry.facts["files"] != _digests(entry.facts["files"]):
        return None
    with without_jax():
        from cutlass._mlir import ir

    from lowering.compile import EmulatorCompile

    body = zlib.decompress(entry.library)
    ends = 8 + int.from_bytes(body[:8], "little")
    notes, facts = json.loads(body[8:ends]), entry.facts
    with ir.Context():
        module = ir.Module.parse(body[ends:])
    parameters = function.parameters
    cache.count("disk_hits")
    for name, some in notes["allocations"].items():
        call_stacks.note_allocations(
            name, [Allocation(x[0], x[1], x[2], tuple(map(tuple, x[3]))) for x in some]
        )
    return EmulatorCompile(
        ir_module=module,
        function_name=facts["function"],
        ptx=_with_columns(entry.ptx, _unpacked(notes["stacks"])),
        cubin=entry.cubin,
        signature=classify([p for p in parameters if p.is_runtime], args),
        parameters=parameters,
        launches=tuple(LaunchFacts(**{**x, "block": tuple(x["block"])}) for x in facts["launches"]),
        arch=facts["arch"],
        name=facts["name"],
        seconds=facts["seconds"],
    )


def _digests(paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each file, in no order; empty for one that cannot be read."""
    found = {}
    for path in set(paths):
        try:
            found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError:
            found[path] = ""
    return found


Place = tuple[str, int, int]
"""A path, a line and a column."""


def _stacks(text: str) -> dict[Place, CallStack]:
    """The call stacks that the places in the PTX stand for."""
    files = dict(_FILE.findall(text))
    places = {
        (files[n], int(line), int(column)) for _, _, n, line, column in _LOC.findall(text) if n in files
    }
    return {place: call_stacks.find(*place) for place in places}


def _with_columns(text: str, stacks: dict[Place, CallStack]) -> str:
    """The PTX with the columns that stand for the same call stacks in this process."""
    files = dict(_FILE.findall(text))

    def put(found: re.Match[str]) -> str:
        stack = stacks.get((files.get(found[3], ""), int(found[4]), int(found[5])))
        column = call_stacks.column(stack) if stack is not None else int(found[5])
        return f"{found[1]}{found[2]}{found[3]} {found[4]} {column}"

    return _LOC.sub(put, text)


def _packed(stacks: dict[Place, CallStack]) -> dict[str, Any]:
    """Call stacks as JSON, each line of the source once."""
    numbers: dict[SourceLine, int] = {}
    places = [
        [*place, stack.role, [numbers.setdefault(line, len(numbers)) for line in stack.lines]]
        for place, stack in sorted(stacks.items())
        if place[2]
    ]
    return {"lines": [list(line) for line in numbers], "places": places}


def _unpacked(packed: dict[str, Any]) -> dict[Place, CallStack]:
    lines = [SourceLine(*line) for line in packed["lines"]]
    return {
        (path, line, column): CallStack(tuple(lines[n] for n in numbers), role)
        for path, line, column, role, numbers in packed["places"]
    }


def _allocations(text: str) -> dict[str, list[list[Any]]]:
    """Shared memory that the PTX's kernels allocate, as JSON."""
    return {name: [list(one) for one in call_stacks.allocations(name)] for name in set(_ENTRY.findall(text))}
