"""The disk store: whole entries or none, whatever happens to the files."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading

import pytest

from lowering import cache
from lowering.errors import DamagedEntry
from lowering.store import FOOTER, Entry, Store, unpack

KEY = "ab" * 32
LIMIT = 1 << 30


def entry(key: str = KEY, size: int = 500) -> Entry:
    body = random.Random(key).randbytes(size)
    return Entry.make(body, ".version 8.8\n" * 20, b"\x7fELF" + body, {"key": key, "name": "kernel"})


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path)


def test_round_trip(store):
    path = store.write(KEY, entry(), LIMIT)
    found = store.read(KEY)
    assert found == entry()
    assert (found.ptx, found.cubin[:4]) == (".version 8.8\n" * 20, b"\x7fELF")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert store.read("cd" * 32) is None


def test_every_truncation_is_noticed():
    data = entry().pack()
    for length in range(len(data)):
        with pytest.raises(DamagedEntry):
            unpack(data[:length], KEY)


def test_every_flipped_byte_is_noticed(seed):
    data = entry(size=100).pack()
    generator = random.Random(seed)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= generator.randint(1, 255)
        with pytest.raises(DamagedEntry):
            unpack(bytes(damaged), KEY)


def test_zeroed_blocks_are_noticed():
    data = entry(size=4000).pack()
    for at in range(0, len(data) - 64, 64):
        damaged = data[:at] + bytes(64) + data[at + 64 :]
        with pytest.raises(DamagedEntry):
            unpack(damaged, KEY)


@pytest.mark.parametrize("damage", ["cut", "empty", "zeroed", "grown", "other"])
def test_a_damaged_entry_is_set_aside_and_can_be_replaced(store, damage, caplog):
    path = store.write(KEY, entry(), LIMIT)
    data = path.read_bytes()
    other = entry("cd" * 32).pack()
    path.write_bytes(
        {"cut": data[:-1], "empty": b"", "zeroed": bytes(len(data)), "grown": data + b"x", "other": other}[
            damage
        ]
    )
    with caplog.at_level(logging.WARNING, "lowering"):
        assert store.read(KEY) is None
    assert KEY in caplog.text
    assert not path.exists()
    assert len(list((store.folder / "damaged").iterdir())) == 1
    store.write(KEY, entry(), LIMIT)
    assert store.read(KEY) == entry()


def test_damaged_entries_do_not_pile_up(store):
    for _ in range(20):
        store.write(KEY, entry(), LIMIT).write_bytes(b"")
        assert store.read(KEY) is None
    assert len(list((store.folder / "damaged").iterdir())) == 16


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(store, step, monkeypatch):
    """ENOSPC at each step: an OSError, no entry, no temporary file."""

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":
        real = os.fdopen

        def fdopen(*args, **kwargs):
            file = real(*args, **kwargs)
            return type(
                "Full", (), {"__enter__": lambda s: s, "__exit__": lambda s, *a: file.close(), "write": full}
            )()

        monkeypatch.setattr(os, "fdopen", fdopen)
    else:
        monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"):
        store.write(KEY, entry(), LIMIT)
    monkeypatch.undo()
    assert [p for p in store.kernels.rglob("*") if p.is_file()] == []
    store.write(KEY, entry(), LIMIT)
    assert store.read(KEY) == entry()


def test_a_real_limit_on_file_size(tmp_path):
    """The system itself refuses the write: the entry is absent, not cut short."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    script = (
        "import sys; from pathlib import Path; from lowering.store import *\n"
        "store = Store(Path(sys.argv[1]))\n"
        "entry = Entry.make(bytes(range(256)) * 99, 'ptx', b'cubin', {'key': 'ab' * 32})\n"
        "try:\n    store.write('ab' * 32, entry, 1 << 30)\n"
        "except OSError as error:\n"
        "    print(error.errno, [p.name for p in store.kernels.rglob('*') if p.is_file()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{errno.EFBIG} []"


def test_the_longest_unused_goes_first(store):
    keys = [f"{i:02d}" * 32 for i in range(5)]
    for age, key in enumerate(keys):
        path = store.write(key, entry(key), LIMIT)
        os.utime(path, (1000 - age, 1000 - age))
    size = store.path(keys[0]).stat().st_size
    new = "ff" * 32
    store.write(new, entry(new), 3 * size + 10)
    assert {e.key for e in store.entries()} == {keys[0], keys[1], new}


def test_a_kernel_larger_than_the_limit_is_kept_alone(store):
    store.write("cd" * 32, entry("cd" * 32), LIMIT)
    store.write(KEY, entry(), 10)
    assert {e.key for e in store.entries()} == {KEY}


def test_leftovers_of_killed_processes_go(store):
    path = store.write(KEY, entry(), LIMIT)
    old, new = path.with_name(".old.tmp"), path.with_name(".new.tmp")
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    store.write(KEY, entry(), LIMIT)
    assert not old.exists()
    assert new.exists()


def test_the_lock_excludes_and_ends_with_its_holder(store):
    inside: list[str] = []

    def contend(name: str) -> None:
        with store.lock(KEY, name) as held:
            assert held
            inside.append(name)
            assert len(inside) == 1
            threading.Event().wait(0.02)
            inside.remove(name)

    threads = [threading.Thread(target=contend, args=(str(i),)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == []
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from lowering.store import Store\n"
            f"with Store(Path(sys.argv[1])).lock({KEY!r}, 'x'):\n"
            "    print('held', flush=True); time.sleep(60)",
            str(store.folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    with store.lock(KEY, "next") as held:
        assert held


def test_no_lock_where_the_folder_is_read_only(store, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with store.lock(KEY, "kernel") as held:
        assert not held


class TestFolder:
    """The place of the cache, and folders that are not trusted."""

    def test_private_and_made_on_demand(self, tmp_path):
        with cache.use(tmp_path / "a" / "b"):
            assert cache.store() is not None
        assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700

    def test_a_folder_that_all_can_write_is_not_used(self, tmp_path, caplog):
        folder = tmp_path / "open"
        folder.mkdir()
        folder.chmod(0o777)
        with cache.use(folder), caplog.at_level(logging.WARNING, "lowering"):
            assert cache.store() is None
        assert "writable by" in caplog.text

    def test_a_folder_that_cannot_be_made(self, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        with cache.use(tmp_path / "file" / "cache"), caplog.at_level(logging.WARNING, "lowering"):
            assert cache.store() is None
        assert "memory only" in caplog.text

    def test_environment(self, monkeypatch, tmp_path):
        monkeypatch.delenv("KERNELS_DSL_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.dir() == tmp_path / "kernels_dsl"
        monkeypatch.setenv("KERNELS_DSL_CACHE_DIR", str(tmp_path / "named"))
        assert cache.dir() == tmp_path / "named"
        assert cache.enabled()
        monkeypatch.setenv("KERNELS_DSL_CACHE", "0")
        assert not cache.enabled()
        assert cache.store() is None
        assert not cache.compiling_refused()
        monkeypatch.setenv("KERNELS_DSL_NO_COMPILE", "1")
        assert cache.compiling_refused()

    def test_clear_and_stats(self, cache_dir):
        store = cache.store()
        store.write(KEY, entry(), LIMIT)
        stats = cache.stats()
        assert (stats["entries"], stats["dir"]) == (1, str(cache_dir))
        assert stats["bytes"] == len(entry().pack()) > FOOTER.size
        assert cache.clear() == 1
        assert cache.stats()["entries"] == 0
