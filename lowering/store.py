"""One folder of compiled kernels, shared by processes that may die at any moment.

An entry is one file, so that it is there whole or not at all. It *is* the shared object, with more behind
it that the loader does not look at::

    shared object | PTX, deflated | cubin, deflated | facts, JSON | footer

The footer has the four lengths and a SHA-256 over everything before the hash: a shared object with damaged
bytes in it would still load. Entries are written to a temporary file and renamed. A lock file per kernel
makes processes that start together compile once. What is read must be this user's or root's alone
(`lowering.trust`): it is code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowering import trust
from lowering.errors import DamagedEntry
from lowering.locks import fcntl
from lowering.records import frozen

log = logging.getLogger("lowering")

MAGIC = b"KDSLENT1"
FOOTER = struct.Struct("<8s4Q32s")
WAIT_SECONDS = 900.0
KEPT_DAMAGED = 16
DAMAGED_SECONDS = 30 * 86400.0
UNUSED_LOCK_SECONDS = 86400.0


@frozen
class Entry:
    """A kernel as it is stored. ``facts`` is JSON: key, key parts, name, arch, kind, launches, seconds."""

    library: bytes
    deflated_ptx: bytes
    deflated_cubin: bytes
    facts: dict[str, Any]

    @classmethod
    def make(cls, library: bytes, ptx: str, cubin: bytes, facts: dict[str, Any]) -> Entry:
        return cls(library, zlib.compress(ptx.encode(), 6), zlib.compress(cubin, 6), facts)

    @property
    def ptx(self) -> str:
        return zlib.decompress(self.deflated_ptx).decode()

    @property
    def cubin(self) -> bytes:
        return zlib.decompress(self.deflated_cubin)

    def pack(self) -> bytes:
        facts = json.dumps(self.facts, sort_keys=True).encode()
        parts = [self.library, self.deflated_ptx, self.deflated_cubin, facts]
        body = b"".join(parts)
        lengths = [len(part) for part in parts]
        digest = _digest(body, lengths)
        return body + FOOTER.pack(MAGIC, *lengths, digest)


@frozen
class StoredFile:
    """A file of the cache: the key it is under, bytes, seconds since the epoch of its last use."""

    key: str
    path: Path
    size: int
    used: float


def _digest(body: bytes, lengths: list[int]) -> bytes:
    digest = hashlib.sha256(body)
    digest.update(MAGIC + struct.pack("<4Q", *lengths))
    return digest.digest()


def unpack(data: bytes, key: str | None = None) -> Entry:
    """Take an entry apart.

    :param key: the key it must have been stored under, if that is known.
    :raises DamagedEntry: if a single byte is not as it was written.
    """
    if len(data) < FOOTER.size:
        raise DamagedEntry(f"{len(data)} bytes are too few for an entry")
    magic, *lengths, digest = FOOTER.unpack(data[-FOOTER.size :])
    body = data[: -FOOTER.size]
    if magic != MAGIC:
        raise DamagedEntry("the footer is missing")
    if sum(lengths) != len(body):
        raise DamagedEntry(f"{len(body)} bytes where the footer says {sum(lengths)}")
    if _digest(body, lengths) != digest:
        raise DamagedEntry("the content does not match its SHA-256")
    ends = [sum(lengths[: i + 1]) for i in range(4)]
    library, ptx, cubin, facts = (body[end - size : end] for end, size in zip(ends, lengths))
    entry = Entry(library, ptx, cubin, json.loads(facts))
    if key is not None and entry.facts.get("key") != key:
        raise DamagedEntry(f"it is the entry of another kernel, {entry.facts.get('key')}")
    return entry


class Store:
    """The files under one folder."""

    def __init__(self, folder: Path, on_damaged: Callable[[], None] = lambda: None) -> None:
        """:param folder: checked already. :param on_damaged: called for every damaged entry."""
        self.folder = folder
        self.kernels = folder / "kernels"
        self._on_damaged = on_damaged

    def path(self, key: str) -> Path:
        return self.kernels / key[:2] / f"{key}.so"

    def read(self, key: str) -> Entry | None:
        """The entry of a key, or None. A damaged one is set aside, and is None.

        :raises Untrusted: if the file, or a folder that it is in, is not this user's or root's alone.
        :raises OSError: if the file is there and cannot be read.
        """
        path = self.path(key)
        try:
            self._check_folders(path)
            data = trust.read_file(path)
        except FileNotFoundError:
            return None
        try:
            entry = unpack(data, key)
        except (DamagedEntry, ValueError) as error:
            self.set_aside(key, str(error))
            return None
        try:
            os.utime(path)  # the least recently used go first
        except OSError:
            pass
        return entry

    def set_aside(self, key: str, reason: str) -> None:
        """Move an entry out of the way, keeping it for a look at what went wrong."""
        self._on_damaged()
        log.warning("a cached kernel is damaged and will be compiled again (%s): %s", reason, self.path(key))
        aside = self.folder / "damaged"
        try:
            trust.make_folder(aside)
            moved = aside / f"{key}.{time.time_ns()}.so"
            os.replace(self.path(key), moved)
            os.utime(moved)  # from now on its age is the time since it was set aside
            for path in self._damaged()[:-KEPT_DAMAGED]:
                path.unlink(missing_ok=True)
        except OSError:
            pass  # a read-only folder: the entry stays, and is refused again next time

    def _damaged(self) -> list[Path]:
        """Entries set aside, the longest ago first."""
        return sorted((self.folder / "damaged").glob("*.so"), key=lambda path: path.name.split(".")[-2])

    def _check_folders(self, path: Path) -> None:
        trust.check_entry(self.kernels, directory=True)
        trust.check_entry(path.parent, directory=True)

    def may_write(self) -> bool:
        """True if an entry can be kept here, as far as permissions tell."""
        return os.access(self.kernels if self.kernels.is_dir() else self.folder, os.W_OK | os.X_OK)

    def write(self, key: str, entry: Entry, limit: int) -> Path:
        """Store an entry: whole, or not at all.

        :param limit: bytes that all kernels together may take; the least recently used go.
        :raises Untrusted: if the folders that it would be in are not this user's or root's alone.
        :raises OSError: if it cannot be written, with nothing left behind.
        """
        from lowering import scratch  # here, since a kernel that is in the cache needs none of it

        path = self.path(key)
        trust.make_folder(path.parent)
        self._check_folders(path)
        scratch.replace_file(path, entry.pack())
        self._prune(limit, keep=key)
        return path

    def entries(self) -> list[StoredFile]:
        """Every kernel on disk, whole or not."""
        found = []
        for path in self.kernels.glob("??/*.so"):
            try:
                about = path.stat()
            except OSError:
                continue
            found.append(StoredFile(path.stem, path, about.st_size, about.st_mtime))
        return found

    def _prune(self, limit: int, keep: str) -> None:
        entries = sorted(self.entries(), key=lambda e: e.used)
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= limit:
                break
            if entry.key != keep:
                try:
                    entry.path.unlink()
                    total -= entry.size
                except OSError:
                    pass
        self._sweep()

    def _sweep(self) -> None:
        """Remove what killed processes left, and what is of no use any more."""
        from lowering import scratch

        scratch.sweep(self.kernels, "??/.*.tmp")
        scratch.sweep(self.folder, ".*.tmp")
        scratch.sweep(self.folder / "locks", "*", UNUSED_LOCK_SECONDS)
        scratch.sweep(self.folder / "damaged", "*.so", DAMAGED_SECONDS)

    def clear(self) -> int:
        """Remove every kernel, and what was set aside; returns how many kernels there were."""
        entries = self.entries()
        for path in [entry.path for entry in entries] + self._damaged():
            path.unlink(missing_ok=True)
        return len(entries)

    @contextmanager
    def lock(self, key: str, name: str) -> Iterator[bool]:
        """Hold the lock of one kernel against other processes. It ends with the process that holds it.

        Yields False where there can be no lock (a read-only folder, a file system without locks), or where
        another process held it for longer than any compile takes.
        """
        lock = self._locked(key, name)
        if lock is None:
            yield False
            return
        try:
            yield lock.held
        finally:
            if lock.held:
                # Not left to the close: a process forked meanwhile has a copy of the descriptor.
                fcntl.flock(lock.descriptor, fcntl.LOCK_UN)
            os.close(lock.descriptor)

    def _locked(self, key: str, name: str) -> _Lock | None:
        """The lock of a kernel, once it is held or was waited for too long; None where there can be none."""
        if fcntl is None:
            return None
        # One of 4096 files: a folder that does not grow. Two kernels that share one wait for each other.
        path = self.folder / "locks" / key[:3]
        while True:
            try:
                trust.make_folder(path.parent)
                trust.check_entry(path.parent, directory=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(path, flags, 0o600)
            except OSError:
                return None
            held = _acquire(descriptor, name)
            if not held or _is_open_file(path, descriptor):
                if held:
                    os.utime(descriptor)  # in use: not for `_sweep`
                return _Lock(descriptor, held)
            os.close(descriptor)  # removed by another process's `_sweep` before it was locked here


@frozen
class _Lock:
    """An open lock file, and whether it is locked."""

    descriptor: int
    held: bool


def _is_open_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _acquire(descriptor: int, name: str) -> bool:
    started = time.monotonic()
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                return False
        waited = time.monotonic() - started
        if waited > WAIT_SECONDS:
            log.warning("waited %.0f s for another process to compile %s; compiling it here", waited, name)
            return False
        if waited > 1.0 and not said:
            said = True
            log.warning("waiting for another process that compiles %s", name)
        time.sleep(0.01 if waited < 1.0 else 0.05)
