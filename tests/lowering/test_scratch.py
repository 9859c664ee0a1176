"""Temporary files: gone at the end, removed later where a process was killed, left alone where one lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lowering import LoweringError, scratch
from lowering.store import Entry, Store

KEY = "ab" * 32
OLD = time.time() - 10 * scratch.STALE_SECONDS
HOLD = """
import os, sys, time
from pathlib import Path
from lowering import scratch
with scratch.folder() as folder:
    (folder / "kernel.o").write_bytes(b"half")
    os.utime(folder, (1000, 1000))
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files, as a new process finds it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_swept", set())
    return tmp_path


def holder(temporary: Path) -> tuple[subprocess.Popen, Path]:
    """A process in the middle of a compile, and its folder, made long ago."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_private_and_goes_with_its_block(temporary):
    with pytest.raises(KeyError), scratch.folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_bytes(b"x")
        raise KeyError
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(temporary):
    (dead, left), (living, used) = holder(temporary), holder(temporary)
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert left.is_dir()
        with scratch.folder():
            assert not left.exists()
            assert (used / "kernel.o").is_file()
    finally:
        living.kill()
        living.wait()


def test_what_is_young_or_not_ours_stays(temporary):
    names = ("young", "link", "other")
    young, link, other = (temporary / f"{scratch.PREFIX}{name}" for name in names)
    young.mkdir()
    target = temporary / "target"
    target.mkdir()
    link.symlink_to(target)
    os.utime(link, (OLD, OLD), follow_symlinks=False)
    other.mkdir()
    os.utime(other, (OLD, OLD))
    if os.geteuid() == 0:
        os.chown(other, 65534, -1)
    scratch.sweep(temporary, f"{scratch.PREFIX}*")
    assert young.exists()
    assert link.is_symlink()
    assert target.exists()
    assert other.exists() == (os.geteuid() == 0)


def test_a_place_where_others_can_exchange_files_is_not_used(temporary, monkeypatch):
    """A compiled kernel is read back from there, and run."""
    temporary.chmod(0o777)
    with scratch.folder() as folder:
        assert folder.parent != temporary
    monkeypatch.setattr(scratch, "FALLBACKS", ())
    with pytest.raises(LoweringError, match=r"set TMPDIR.*writable by everybody"), scratch.folder():
        pass


def test_leftovers_in_the_cache_go_unless_they_are_in_use(tmp_path):
    store = Store(tmp_path)
    entry = Entry.make(b"library", ".version", b"\x7fELF", {"key": KEY})
    store.write(KEY, entry, 1 << 30)
    with store.lock("cd" * 32, "kernel"), store.lock("ef" * 32, "kernel"):
        pass
    leftovers = [
        store.path(KEY).with_name(".half.tmp"),
        tmp_path / ".sources.json.1.1.tmp",
        tmp_path / "locks" / "cdc",
        tmp_path / "damaged" / f"{KEY}.1.so",
    ]
    (tmp_path / "damaged").mkdir()
    for path in leftovers:
        path.write_bytes(b"")
        os.utime(path, (1000, 1000))
    used = store.path(KEY).with_name(".used.tmp")
    used.write_bytes(b"")
    descriptor = os.open(used, os.O_RDONLY)
    assert scratch._try_lock(descriptor)
    os.utime(used, (1000, 1000))
    store.write(KEY, entry, 1 << 30)
    assert [path for path in leftovers if path.exists()] == []
    assert used.exists()
    assert (tmp_path / "locks" / "efe").exists()
    os.close(descriptor)


def test_a_lock_file_that_is_removed_meanwhile_still_excludes(tmp_path):
    """Another process sweeps the lock file between its opening and its locking."""
    store = Store(tmp_path)
    real = os.open
    swept = []

    def opening(path, flags, *rest, **more):
        descriptor = real(path, flags, *rest, **more)
        if str(path).endswith("/aba") and not swept:
            swept.append(path)
            os.unlink(path)
        return descriptor

    os.open = opening
    try:
        with store.lock(KEY, "kernel") as held:
            assert held
            descriptor = real(tmp_path / "locks" / "aba", os.O_RDWR)
            assert not scratch._try_lock(descriptor)
            os.close(descriptor)
    finally:
        os.open = real
    assert swept


def test_a_strange_file_among_the_damaged_ones_is_left_alone(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "damaged").mkdir(mode=0o700)
    (tmp_path / "damaged" / "notes").write_text("mine")
    store.write(KEY, Entry.make(b"", "", b"", {"key": KEY}), 1 << 30).write_bytes(b"")
    assert store.read(KEY) is None
    assert (tmp_path / "damaged" / "notes").exists()
    assert store.clear() == 0
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["notes"]
