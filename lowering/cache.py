"""The disk cache: where it is, whether it is used, and what it did.

On by default, in ``$KERNELS_DSL_CACHE_DIR``, else ``$XDG_CACHE_HOME/kernels_dsl``, else
``~/.cache/kernels_dsl``. ``KERNELS_DSL_CACHE=0`` switches it off; ``KERNELS_DSL_NO_COMPILE=1`` makes a
compile an error, for servers that must only run what was compiled beforehand.

The folder, all that leads to it and all that is loaded from it must be this user's or root's alone, see
`lowering.trust`: it holds machine code. One that is not is neither read nor written.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from lowering import places, reach, trust
from lowering.errors import Untrusted
from lowering.locks import fcntl
from lowering.records import frozen
from lowering.store import Store

log = logging.getLogger("lowering")

DEFAULT_LIMIT = 4 << 30
_ON, _OFF = {"1", "on", "true", "yes"}, {"0", "off", "false", "no"}


@frozen
class Stats:
    """Counts of kernels that this process handled since it started."""

    memory_hits: int = 0
    disk_hits: int = 0
    compiles: int = 0
    stores: int = 0
    store_failures: int = 0
    damaged: int = 0


_counts = Stats()
_chosen_dir: Path | None = None
_enabled: bool | None = None
_refuse: bool | None = None
_warned: set[str] = set()
_lock = threading.Lock()
_memo_of: Path | None = None


def dir() -> Path:
    """The folder that the cache is in, whether or not it exists yet."""
    if _chosen_dir is not None:
        return _chosen_dir
    if named := os.environ.get("KERNELS_DSL_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base).absolute() / "kernels_dsl"


def set_dir(path: str | os.PathLike[str] | None) -> None:
    """Use another folder from now on in this process; None goes back to the default."""
    global _chosen_dir
    _chosen_dir = None if path is None else Path(path).expanduser().absolute()


def disable(off: bool = True) -> None:
    """Switch the disk cache off for this process, or on again with ``disable(False)``."""
    global _enabled
    _enabled = not off


def enabled() -> bool:
    """True if kernels are looked up and kept on disk."""
    return _enabled if _enabled is not None else _flag("KERNELS_DSL_CACHE", True)


def refuse_compile(refuse: bool = True) -> None:
    """Make every compile of this process an error (`CompileRefused`), or allow them again."""
    global _refuse
    _refuse = refuse


def compiling_refused() -> bool:
    """True if a compile is an error in this process."""
    return _refuse if _refuse is not None else _flag("KERNELS_DSL_NO_COMPILE", False)


def _flag(variable: str, default: bool) -> bool:
    text = os.environ.get(variable, "").strip().lower()
    if not text:
        return default
    if text not in _ON | _OFF:
        warn_once(f"{variable}={text!r} is not understood: use 0 or 1; taking {int(default)}")
        return default
    return text in _ON


def size_limit() -> int:
    """Bytes that the cache may take on disk (``KERNELS_DSL_CACHE_BYTES``); the longest unused go first."""
    text = os.environ.get("KERNELS_DSL_CACHE_BYTES", "")
    if text and not text.isdigit():
        warn_once(f"KERNELS_DSL_CACHE_BYTES={text!r} is not a number of bytes; taking {DEFAULT_LIMIT}")
    return int(text) if text.isdigit() else DEFAULT_LIMIT


def store() -> Store | None:
    """The folder, ready for use, or None where it is switched off or cannot be used (said once)."""
    global _memo_of
    if not enabled():
        return None
    reason = refusal()
    if reason is not None:
        warn_once(f"{reason}; kernels are kept in memory only")
        return None
    folder = dir()
    with _lock:
        fresh, _memo_of = _memo_of != folder, folder
    if fresh:
        places.unread.append(folder)
        reach.remember_in(folder)
    return Store(folder, on_damaged=lambda: count("damaged"))


def emulated() -> Store | None:
    """The folder within, ready for use, of kernels compiled for the emulator; None as for `store`."""
    whole = store()
    if whole is None:
        return None
    folder = whole.folder / "emulated"
    try:
        trust.make_folder(folder)
        trust.check_entry(folder, directory=True)
    except (Untrusted, OSError) as error:
        warn_once(f"kernels for the emulator are kept in memory only: {error}")
        return None
    return Store(folder, on_damaged=lambda: count("damaged"))


def refusal() -> str | None:
    """Reason not to use the cache folder; None where it can be used. Makes the folder if there is none.

    It is looked at each time, which takes a system call for each component of the path.
    """
    folder = dir()
    if fcntl is None:
        return f"the kernel cache {folder} is not used: this system has no file locks (Python's fcntl)"
    try:
        try:
            trust.check_folder(folder)
        except FileNotFoundError:
            trust.check_parents(folder)
            trust.make_folder(folder)
            trust.check_folder(folder)
    except Untrusted as error:
        return f"the kernel cache {folder} is not used, neither read nor written: {error}"
    except OSError as error:
        return f"the kernel cache {folder} cannot be used ({error.strerror or error})"
    return None


def kept() -> bool:
    """True if a kernel that is compiled now will be found by later processes."""
    ready = store()
    return ready is not None and ready.may_write()


def warn_once(message: str) -> None:
    """Log a warning, once in this process."""
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)


def count(what: str) -> None:
    """Add one to a counter of `Stats`."""
    global _counts
    with _lock:
        _counts = replace(_counts, **{what: getattr(_counts, what) + 1})


def stats() -> dict[str, int | str]:
    """Counters of this process, and what is on disk: ``entries``, ``bytes``, ``dir``."""
    found: dict[str, int | str] = {f.name: getattr(_counts, f.name) for f in fields(_counts)}
    ready = store()
    entries = ready.entries() if ready is not None else []
    return {**found, "entries": len(entries), "bytes": sum(e.size for e in entries), "dir": str(dir())}


def clear() -> int:
    """Remove every kernel from the folder, those for the emulator too; what is loaded stays usable.

    Returns how many there were.
    """
    return sum(ready.clear() for ready in (store(), emulated()) if ready is not None)


@contextmanager
def use(path: str | os.PathLike[str]) -> Iterator[None]:
    """Use another folder within a ``with`` block."""
    before = _chosen_dir
    set_dir(path)
    try:
        yield
    finally:
        set_dir(before)
