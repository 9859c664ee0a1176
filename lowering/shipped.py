"""Bundles at hand: kernels compiled elsewhere, looked up after a miss of the cache, before a compile.

They are the archives named by ``$KERNELS_DSL_BUNDLES`` (files, or folders of ``*.zip``, separated as in
``$PATH``), and those in the package ``kernels_dsl_kernels`` where one is installed. A kernel that is found
goes into the cache, so that later processes do not look here. Nothing is read before the first miss.

A bundle is code. It is taken where nobody but this user and root can have written it, as the cache is
(`lowering.trust`); who made it `lowering.bundle.load` can verify, this cannot.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import zipfile
from pathlib import Path
from typing import NamedTuple

from lowering import archive as archives
from lowering import cache, toolchain, trust
from lowering.errors import LoweringError, Untrusted
from lowering.launch import CompiledKernel
from lowering.signature import key_of
from lowering.store import Store, unpack

log = logging.getLogger("lowering")

VARIABLE = "KERNELS_DSL_BUNDLES"
PACKAGE = "kernels_dsl_kernels"
_lock = threading.Lock()
_index: dict[tuple[Path, ...], dict[str, Place]] = {}


class Place(NamedTuple):
    """A kernel's place: the archive, and the key that it has there."""

    path: Path
    key: str


def paths() -> tuple[Path, ...]:
    """The archives at hand. One that the variable names and that is not there is said, once."""
    found: list[Path] = []
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        named = Path(text).expanduser().absolute()
        if not named.exists():
            cache.warn_once(f"{VARIABLE} names {named}, which does not exist")
        found += sorted(named.glob("*.zip")) if named.is_dir() else [named] * named.exists()
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found += sorted(Path(folder).absolute().glob("*.zip"))
    return tuple(found)


def find(key: str, store: Store | None) -> CompiledKernel | None:
    """The kernel of a key, which goes into `store`; None where no bundle at hand has it, or it cannot be used
    here, which is said."""
    at_hand = paths()
    if not at_hand:
        return None
    with _lock:
        if at_hand not in _index:
            _index[at_hand] = {k: place for path in at_hand for k, place in _keys(path).items()}
        place = _index[at_hand].get(key)
    if place is None:
        return None
    try:
        with zipfile.ZipFile(_checked(place.path)) as opened:
            entry = archives.adopt(unpack(archives.member(opened, f"{place.key}.so"), place.key))
    except (LoweringError, OSError, *archives.MALFORMED) as error:
        cache.warn_once(f"the kernel {place.key[:12]} of {place.path} is not used: {error}")
        return None
    try:
        if store is not None and store.may_write():
            store.write(key, entry, cache.size_limit())
            cache.count("stores")
    except OSError as error:
        log.info("a kernel of %s is not kept in the cache: %s", place.path, error)
    return CompiledKernel(entry, "disk")


def _keys(path: Path) -> dict[str, Place]:
    """The kernels of an archive by the keys that they have here; none where it is not to be used, which is
    said."""
    try:
        with zipfile.ZipFile(_checked(path)) as opened:
            listed = archives.manifest(path, opened)
            here = dict(toolchain.identity())
            return {key_of({**x["parts"], "toolchain": here}): Place(path, x["key"]) for x in listed}
    except (LoweringError, OSError, *archives.MALFORMED) as error:
        cache.warn_once(f"the bundle {path} is not used: {error}")
        return {}


def _checked(path: Path) -> Path:
    """The path. Untrusted where others can have written the file, or what leads to it."""
    try:
        trust.check_folder(path.parent)
        trust.check_entry(path, directory=False)
    except Untrusted as error:
        raise Untrusted(f"others can have written it: {error}") from None
    return path
