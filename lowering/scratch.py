"""Temporary files and folders that do not outlive a process that is killed.

Each is locked while it is in use, and a lock ends with the process that holds it, even with one that is
killed. So what is old and not locked is nobody's: `sweep` removes it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowering import trust
from lowering.errors import LoweringError, Untrusted
from lowering.locks import fcntl

PREFIX = "kernels-dsl-"
# Between making a file and locking it a process may be stopped for a while.
STALE_SECONDS = 3600.0
# Where a temporary folder may be if the system's own choice is not safe.
FALLBACKS = ("/tmp", "/var/tmp", "/dev/shm")

_swept: set[Path] = set()


@contextmanager
def folder() -> Iterator[Path]:
    """A private temporary folder, removed at the end of the block; if this process is killed, by a later one.

    :raises LoweringError: if there is no place where nobody else can exchange its files.
    """
    if fcntl is None:  # Windows, where a user's temporary folder is its own
        with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    above = _place()
    if above not in _swept:
        _swept.add(above)
        sweep(above, f"{PREFIX}*")
    path = tempfile.mkdtemp(prefix=PREFIX, dir=above)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _try_lock(descriptor)
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _place() -> Path:
    """The folder for temporary files, or the first of `FALLBACKS` where others cannot rename this user's."""
    refused = ""
    for place in (tempfile.gettempdir(), *FALLBACKS):
        try:
            trust.check_parents(place)
        except Untrusted as error:
            refused = refused or str(error)
            continue
        if os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    why = refused or "none of them may be written"
    raise LoweringError(f"there is no safe folder for temporary files; set TMPDIR to one of your own: {why}")


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all, whatever happens to this process.

    :raises OSError: if it cannot be written, with nothing left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, mode)
        _try_lock(descriptor)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass
        raise


def sweep(above: Path, pattern: str, seconds: float = STALE_SECONDS) -> None:
    """Remove this user's files and folders that match a pattern, are old, and are locked by nobody."""
    try:
        found = list(above.glob(pattern))
    except OSError:
        return
    for path in found:
        try:
            _remove_stale(path, seconds)
        except OSError:
            pass  # gone meanwhile, or not to be removed by this user


def _remove_stale(path: Path, seconds: float) -> None:
    about = path.lstat()
    if about.st_uid != os.geteuid() or time.time() - about.st_mtime < seconds:
        return
    if not (stat.S_ISDIR(about.st_mode) or stat.S_ISREG(about.st_mode)):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not _try_lock(descriptor):
            return
        if stat.S_ISDIR(about.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file or folder; False where somebody else has it, or the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
