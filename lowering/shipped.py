"""Bundles at hand: kernels compiled elsewhere, looked up after a miss of the cache, before a compile.

They are the archives named by ``$KERNELS_DSL_BUNDLES`` (files, or folders of ``*.zip``, separated as in
``$PATH``), those in the package ``kernels_dsl_kernels`` where one is installed, and those that a wheel of
``kernels_dsl`` carries. A kernel that is found goes into the cache, so that later processes do not look here.
Nothing is read before the first miss.

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
from typing import Any, NamedTuple

from lowering import archive as archives
from lowering import cache, sources, toolchain, trust
from lowering.errors import LoweringError, Untrusted
from lowering.launch import CompiledKernel
from lowering.signature import key_of
from lowering.store import Store, unpack

log = logging.getLogger("lowering")

VARIABLE = "KERNELS_DSL_BUNDLES"
PACKAGE = "kernels_dsl_kernels"
CARRIED = ("kernels_dsl", "precompiled")
"""The package whose wheel carries bundles, and its folder that has them."""
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
    return (*found, *_within(PACKAGE), *carried())


def carried() -> tuple[Path, ...]:
    """The archives that the installed wheel of this project carries, one an architecture."""
    return _within(*CARRIED)


def _within(package: str, folder: str = "") -> tuple[Path, ...]:
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations or ()) if spec else ()
    return tuple(path for place in places for path in sorted(Path(place, folder).absolute().glob("*.zip")))


def find(key: str, store: Store | None) -> CompiledKernel | None:
    """The kernel of a key, which goes into `store`; None where no bundle at hand has it, or it cannot be used
    here, which is said."""
    at_hand = paths()
    if not at_hand:
        return None
    with _lock:
        if at_hand not in _index:
            # The first archive that has a kernel serves it.
            _index[at_hand] = {k: place for path in at_hand[::-1] for k, place in _keys(path).items()}
        place = _index[at_hand].get(key)
    if place is None:
        return None
    try:
        with zipfile.ZipFile(_checked(place.path)) as opened:
            entry = archives.adopt(unpack(archives.member(opened, f"{place.key}.so"), place.key))
    except (LoweringError, OSError, *archives.MALFORMED) as error:
        _say(place.path, f"the kernel {place.key[:12]} of {place.path} is not used: {error}")
        return None
    try:
        if store is not None and store.may_write():
            store.write(key, entry, cache.size_limit())
            cache.count("stores")
            sources.save_memo(store.folder)
    except OSError as error:
        log.info("a kernel of %s is not kept in the cache: %s", place.path, error)
    return CompiledKernel(entry, "disk")


def keys_of(path: Path) -> tuple[set[str], str | None]:
    """Keys that the kernels of an archive have here, and why none of them can be used, or None.

    :raises LoweringError, OSError: if the archive is no bundle, or others can have written it.
    """
    parts = [listed["parts"] for listed in _listed(path)]
    reasons = {archives.misfit(x["toolchain"]) for x in parts}
    return set(map(_key_here, parts)), None if None in reasons else "; ".join(map(str, reasons))


def _listed(path: Path) -> list[dict[str, Any]]:
    """The manifest of an archive."""
    try:
        with zipfile.ZipFile(_checked(path)) as opened:
            return archives.manifest(path, opened)
    except archives.MALFORMED as error:
        raise LoweringError(str(error)) from None


def _key_here(parts: dict[str, Any]) -> str:
    return key_of({**parts, "toolchain": dict(toolchain.identity())})


def _keys(path: Path) -> dict[str, Place]:
    """The kernels of an archive that can be used here, by the keys that they have here; why others cannot is
    said."""
    found = {}
    try:
        for listed in _listed(path):
            reason = archives.misfit(listed["parts"]["toolchain"])
            if reason is None:
                found[_key_here(listed["parts"])] = Place(path, listed["key"])
            else:
                _say(path, f"kernels of {path} are not used: {reason}")
    except (LoweringError, OSError, *archives.MALFORMED) as error:
        _say(path, f"the bundle {path} is not used: {error}")
    return found


def _say(path: Path, message: str) -> None:
    """A warning, once; not of what nobody asked for, the wheel's own, of which `doctor` tells."""
    if path in carried():
        log.info("%s", message)
    else:
        cache.warn_once(message)


def _checked(path: Path) -> Path:
    """The path. Untrusted where others can have written the file, or what leads to it."""
    try:
        trust.check_folder(path.parent)
        trust.check_entry(path, directory=False)
    except Untrusted as error:
        raise Untrusted(f"others can have written it: {error}") from None
    return path
