"""Fingerprints of source files, without running them.

A kernel's key must change when its source changes, or the source of any helper that it reaches; and a warm
start must find this out without importing those modules, since they import the compiler. So the modules
that a module imports are followed through its syntax tree, file by file, with the import system asked only
where a file is.

What is followed: modules of the root module's own top-level package, and modules that live outside the
interpreter's library folders (``site-packages``, the standard library). Installed third-party packages are
not followed; the versions of the toolchain are part of the key on their own. `lowering` is not followed
either: the modules of it that shape a compiled kernel are hashed as part of the toolchain.

Reading a file's facts takes a millisecond or so. They are remembered by path, modification time and size,
in memory and in the cache folder, so that a warm start costs one ``stat`` a file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from lowering import places, scratch, trust
from lowering.errors import LoweringError, Untrusted
from lowering.places import RACY_SECONDS, Fingerprint, file_stamp, is_first_party, is_foreign, locate
from lowering.records import frozen
from lowering.signature import Parameter, parameters_in_source

log = logging.getLogger("lowering")

MEMO_NAME = "sources-2.json"  # another number for other facts
_FLAG = "TYPE_CHECKING"


@frozen
class FileFacts:
    """One source file: its hash, the modules it may import, and its top-level functions' parameters."""

    digest: str
    imports: tuple[str, ...]
    functions: dict[str, tuple[Parameter, ...]]


_memo: dict[str, tuple[tuple[int, int], FileFacts]] = {}
_memo_lock = threading.Lock()
_memo_dirty = False


@frozen
class Walk:
    """Modules that a root module reaches. ``files`` maps each path to its stamp."""

    digest: str
    files: dict[str, tuple[int, int]]
    places: dict[str, str]  # the module's name -> its path
    absent: set[str]  # names without a source file of the project: in `from module import Class`, the class's
    libraries: set[str]  # top-level names that were not followed


def module_fingerprint(module: str) -> Fingerprint:
    """Hash the source of a module and of the first-party modules it reaches.

    :param module: dotted name.
    :raises LoweringError: if there is no such module, or it has no source file.
    """
    walk = follow(module)
    return Fingerprint(walk.digest, walk.files)


def follow(module: str) -> Walk:
    """Follow the imports of a module through first-party sources.

    :raises LoweringError: if there is no such module, or it has no source file.
    """
    found: dict[str, str] = {}
    walk = Walk("", {}, {}, set(), set())
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        top = name.partition(".")[0]
        if is_foreign(top, module):
            walk.libraries.add(top)
            continue
        place = locate(name)
        if place is None:
            if name == module:
                raise LoweringError(f"module {module!r} has no source file that can be found on sys.path")
            walk.absent.add(name)
            continue
        path, package = place
        if name != module and not is_first_party(name, path, module):
            walk.absent.add(name)
            continue
        stamp, facts = file_facts(path, package)
        walk.files[path] = stamp
        walk.places[name] = path
        # The root's own name is left out: a script is `__main__` in one run and a module in another.
        found[name] = facts.digest
        waiting += [i for i in facts.imports if i not in found]
        waiting += [p for p in _parents(name) if p not in found]
    listing = [("<root>" if name == module else name, digest) for name, digest in sorted(found.items())]
    return replace(walk, digest=hashlib.sha256(json.dumps(sorted(listing)).encode()).hexdigest())


def function_parameters(module: str, qualname: str) -> tuple[Parameter, ...]:
    """The parameters of ``module:qualname``, read from its source.

    :raises LoweringError: if the module's source has no such top-level function.
    """
    place = locate(module)
    if place is None:
        raise LoweringError(f"module {module!r} has no source file that can be found on sys.path")
    functions = file_facts(*place)[1].functions
    if qualname not in functions:
        raise LoweringError(
            f"{place[0]} defines no top-level function {qualname!r}; it has {sorted(functions)}"
        )
    return functions[qualname]


def _parents(module: str) -> Iterable[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def file_facts(path: str, package: str) -> tuple[tuple[int, int], FileFacts]:
    """The facts of one source file, with the stat they belong to; remembered."""
    global _memo_dirty
    stamp = file_stamp(path)
    memo_key = f"{package}:{path}"
    while places.unread:
        load_memo(places.unread.pop())
    with _memo_lock:
        known = _memo.get(memo_key)
    if known is not None and known[0] == stamp:
        return known
    with open(path, "rb") as file:
        source = file.read()
    facts = _read_facts(source, path, package)
    fresh = (stamp, facts)
    if time.time() - stamp[0] / 1e9 > RACY_SECONDS:
        with _memo_lock:
            _memo[memo_key] = fresh
            _memo_dirty = True
    return fresh


def _read_facts(source: bytes, path: str, package: str) -> FileFacts:
    tree = ast.parse(source, filename=path)
    imports: set[str] = set()
    for node in _run_nodes(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            imports.add(base)
            imports.update(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
    functions = {
        node.name: parameters_in_source(node) for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    return FileFacts(hashlib.sha256(source).hexdigest(), tuple(sorted(imports - {""})), functions)


def _run_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a module, without what is under `if TYPE_CHECKING`, which only type checkers read."""
    skips = any(_imports_flag(node) for node in tree.body) and not _sets_flag(tree)
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if skips and isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == _FLAG:
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _imports_flag(node: ast.stmt) -> bool:
    """True for an import of `TYPE_CHECKING` from `typing`, which is false whenever a program runs."""
    return (
        isinstance(node, ast.ImportFrom)
        and (node.module, node.level) == ("typing", 0)
        and any(alias.name == _FLAG and alias.asname is None for alias in node.names)
    )


def _sets_flag(tree: ast.Module) -> bool:
    """True if a module may give the name `TYPE_CHECKING` another value than that of `typing`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == _FLAG and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not _imports_flag(node):
            if any((alias.asname or alias.name) in (_FLAG, "*") for alias in node.names):
                return True
        if isinstance(node, ast.arg) and node.arg == _FLAG:
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == _FLAG:
            return True
    return False


def load_memo(folder: Path) -> None:
    """Take over the facts that an earlier process left in ``folder``; a damaged file is ignored, and so is
    one that others can have written: whoever says what a source's hash is chooses the kernel."""
    try:
        stored = json.loads(trust.read_file(folder / MEMO_NAME))
        facts = {
            key: (
                (int(stamp[0]), int(stamp[1])),
                FileFacts(
                    digest,
                    tuple(imports),
                    {n: tuple(Parameter(*p) for p in ps) for n, ps in functions.items()},
                ),
            )
            for key, (stamp, digest, imports, functions) in stored.items()
        }
    except Untrusted as error:
        log.warning("what is known of the sources is read anew: %s", error)
        return
    except (OSError, ValueError, TypeError, AttributeError):
        return
    with _memo_lock:
        for key, value in facts.items():
            _memo.setdefault(key, value)


def save_memo(folder: Path) -> None:
    """Leave the facts for later processes; failing to is not an error."""
    global _memo_dirty
    with _memo_lock:
        if not _memo_dirty:
            return
        _memo_dirty = False
        stored = {
            key: (
                stamp,
                facts.digest,
                facts.imports,
                {n: [(p.name, p.annotation, p.has_default) for p in ps] for n, ps in facts.functions.items()},
            )
            for key, (stamp, facts) in _memo.items()
        }
    try:
        scratch.replace_file(folder / MEMO_NAME, json.dumps(stored).encode())
    except OSError:
        pass
