"""Fingerprints of modules from an earlier process, while nothing that they rest on has changed.

`sources.module_fingerprint` follows imports through a hundred files, which takes 30 ms in a new process. Its
result rests on the files it read, and on the places where the import system found them or found nothing. Both
are remembered with it, in a file for each module: a later process asks for the files' and folders' times.

Remembered is what stays inside a regular package with one folder. A module beside the working directory, or
one that reaches such a module, is followed anew.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lowering import places, trust
from lowering.errors import Untrusted
from lowering.places import Fingerprint, file_stamp
from lowering.records import frozen
from lowering.signature import Parameter

log = logging.getLogger("lowering")

FORMAT = 2


@frozen
class Reach:
    """A module's fingerprint and parameters, and what both rest on."""

    digest: str
    modules: dict[str, tuple[str, int, int]]  # name -> path, modification time, size
    folders: dict[str, int]  # where modules were looked for -> modification time
    libraries: tuple[str, ...]  # top-level names that were not followed
    functions: dict[str, tuple[Parameter, ...]]

    def holds(self, module: str) -> bool:
        """True if following the imports anew would give the same."""
        for name, (path, *stamp) in self.modules.items():
            if _stamp(path) != tuple(stamp) or not _is_in_place(name, path):
                return False
        top = module.partition(".")[0]
        return (
            top in self.modules
            and places.locate(top) == (self.modules[top][0], top)
            and all(_folder_time(folder) == time_ns for folder, time_ns in self.folders.items())
            and all(places.is_foreign(name, module) for name in self.libraries)
        )


_folder: list[Path] = []
_known: dict[str, Reach] = {}
_lock = threading.Lock()


class _Look(threading.local):
    """Stamps and reaches that a thread has seen in its block of `one_look`; None outside of one."""

    stamps: dict[str, tuple[int, int]] | None = None
    holding: dict[str, Reach] | None = None


_look = _Look()


@contextmanager
def one_look() -> Iterator[None]:
    """In the block, this thread looks at each file and folder once, however many modules rest on it.

    For the making of one key: its parts rest on some five modules, whose sources are largely the same.
    """
    if _look.stamps is not None:
        yield
        return
    _look.stamps, _look.holding = {}, {}
    try:
        yield
    finally:
        _look.stamps = _look.holding = None


def remember_in(folder: Path) -> None:
    """Take the cache folder for what earlier processes found out. None of it is read before it is needed."""
    with _lock:
        _folder[:] = [folder]
        _known.clear()


def module_fingerprint(module: str) -> Fingerprint:
    """The same as `sources.module_fingerprint`.

    :raises LoweringError: if there is no such module, or it has no source file.
    """
    found = _find(module)
    if found is None:
        return _sources().module_fingerprint(module)
    return Fingerprint(found.digest, {path: (at, size) for path, at, size in found.modules.values()})


def function_parameters(module: str, qualname: str) -> tuple[Parameter, ...]:
    """The same as `sources.function_parameters`.

    :raises LoweringError: if the module's source has no such top-level function.
    """
    found = _find(module)
    if found is None or qualname not in found.functions:
        return _sources().function_parameters(module, qualname)
    return found.functions[qualname]


def _sources() -> ModuleType:
    """`lowering.sources`, which a process does without while what earlier ones found out holds."""
    return importlib.import_module("lowering.sources")


def _find(module: str) -> Reach | None:
    """A reach that holds: of this process, an earlier one, or made now; None if it cannot be remembered."""
    if not _folder or "." not in module:
        return None
    if _look.holding is not None and module in _look.holding:
        return _look.holding[module]
    found = _known.get(module) or _read(module)
    if found is None or not found.holds(module):
        found = _follow(module)
        if found is not None:
            _write(module, found)
    if found is not None:
        _known[module] = found
        if _look.holding is not None:
            _look.holding[module] = found
    return found


def _follow(module: str) -> Reach | None:
    """Follow a module's imports; None where what that rests on is more than is remembered."""
    sources, top = _sources(), module.partition(".")[0]
    walk = sources.follow(module)
    names = (*walk.places, *walk.absent)
    if top not in walk.places or any(name.partition(".")[0] != top for name in names):
        return None
    folders: set[str] = set()
    for name in names:
        locations = places.search_locations(name.rpartition(".")[0]) if "." in name else []
        if len(locations) > 1:
            return None
        folders.update(locations)
    modules = {name: (path, *walk.files[path]) for name, path in walk.places.items()}
    times = {folder: _folder_time(folder) for folder in folders}
    newest = max(*times.values(), *(at for _, at, _ in modules.values()))
    oldest = min(*times.values(), *(at for _, at, _ in modules.values()))
    if oldest == 0 or time.time() - newest / 1e9 <= places.RACY_SECONDS:
        return None
    place = places.locate(module)
    functions = sources.file_facts(*place)[1].functions if place is not None else {}
    return Reach(walk.digest, modules, times, tuple(sorted(walk.libraries)), functions)


def _is_in_place(name: str, path: str) -> bool:
    """False if a module that is loaded came from another file, or looks for its own modules elsewhere."""
    loaded = sys.modules.get(name)
    if loaded is None:
        return True
    origin = getattr(loaded, "__file__", None)
    if origin is None or (origin != path and os.path.abspath(origin) != path):
        return False
    return "__path__" not in loaded.__dict__ or list(loaded.__path__) == [os.path.dirname(origin)]


def _folder_time(folder: str) -> int:
    return _stamp(folder)[0]


def _stamp(path: str) -> tuple[int, int]:
    """`file_stamp`, taken once in a block of `one_look`."""
    seen = _look.stamps
    if seen is None:
        return file_stamp(path)
    if path not in seen:
        seen[path] = file_stamp(path)
    return seen[path]


def _path(module: str) -> Path | None:
    place = places.locate(module.partition(".")[0])
    if place is None:
        return None
    named = f"{FORMAT}\0{module}\0{place[0]}\0{sys.version}"
    return _folder[0] / f"reach-{hashlib.sha256(named.encode()).hexdigest()[:24]}.json"


def _read(module: str) -> Reach | None:
    """The record that an earlier process left.

    Not from a file that others can have written: who says what a source's hash is chooses the kernel.
    """
    path = _path(module)
    if path is None:
        return None
    try:
        digest, modules, folders, libraries, functions = json.loads(trust.read_file(path))
        return Reach(
            str(digest),
            {name: (str(place), int(at), int(size)) for name, (place, at, size) in modules.items()},
            {folder: int(at) for folder, at in folders.items()},
            tuple(libraries),
            {name: tuple(Parameter(*p) for p in listed) for name, listed in functions.items()},
        )
    except Untrusted as error:
        log.warning("what is known of the sources is read anew: %s", error)
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    return None


def _write(module: str, found: Reach) -> None:
    """Leave a reach for later processes; failing to is not an error."""
    from lowering import scratch  # here, since a process that finds what it looks for leaves none

    path = _path(module)
    functions: dict[str, Any] = {
        name: [(p.name, p.annotation, p.has_default) for p in listed]
        for name, listed in found.functions.items()
    }
    listed = (found.digest, found.modules, found.folders, found.libraries, functions)
    try:
        if path is not None:
            scratch.replace_file(path, json.dumps(listed).encode())
    except OSError:
        pass
