"""Layouts in which others can write to the cache, or to what leads to it: refused, with what mends them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
import torch
from user_kernels import Config, affine, same

import lowering
from lowering import CompileRefused, cache, function, trust
from lowering.errors import Untrusted
from lowering.store import Entry, Store

KEY = "ab" * 32
OTHER = 65534  # nobody
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def entry() -> Entry:
    return Entry.make(b"library", ".version 8.8", b"\x7fELF", {"key": KEY, "name": "kernel"})


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A folder with a cache in it that holds one kernel; the cache is the one in use."""
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_enabled", None)
    folder = tmp_path / "home"
    folder.mkdir(mode=0o755)
    with cache.use(folder / "cache"):
        cache.store().write(KEY, entry(), 1 << 30)
        assert cache.store().read(KEY) == entry()
        yield folder


def reading() -> Entry | None:
    """The result of a lookup: None, with the store refused or the entry refused."""
    store = cache.store()
    if store is None:
        return None
    try:
        return store.read(KEY)
    except Untrusted as error:
        logging.getLogger("lowering").warning("%s", error)
        return None


# (what is changed, relative to the home; how; what the message must say)
LAYOUTS = {
    "cache writable by all": ("cache", 0o777, None, "writable by everybody; mend it with: chmod go-w"),
    "cache writable by all, sticky": ("cache", 0o1777, None, "writable by everybody"),
    "cache writable by a foreign group": ("cache", 0o770, (-1, 1234), "writable by group 1234"),
    "cache of another user": ("cache", 0o755, (OTHER, -1), f"uid {OTHER}"),
    "parent writable by all": (".", 0o777, None, "writable by everybody"),
    "parent writable by a foreign group": (".", 0o775, (-1, 1234), "writable by group 1234"),
    "parent of another user": (".", 0o755, (OTHER, -1), f"uid {OTHER}"),
    "kernels/ writable by all": ("cache/kernels", 0o777, None, "writable by everybody"),
    "kernels/ of another user": ("cache/kernels", 0o755, (OTHER, -1), f"uid {OTHER}"),
    "its folder writable by all": ("cache/kernels/ab", 0o777, None, "writable by everybody"),
    "its folder of another user": ("cache/kernels/ab", 0o700, (OTHER, -1), f"uid {OTHER}"),
    "entry writable by all": (f"cache/kernels/ab/{KEY}.so", 0o666, None, "everybody; mend it with: rm"),
    "entry writable by a foreign group": (f"cache/kernels/ab/{KEY}.so", 0o660, (-1, 1234), "group 1234"),
    "entry of another user": (f"cache/kernels/ab/{KEY}.so", 0o666, (OTHER, -1), f"uid {OTHER}"),
    "entry of another user, private": (f"cache/kernels/ab/{KEY}.so", 0o600, (OTHER, -1), f"uid {OTHER}"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_others_can_write_is_refused(home, caplog, layout):
    place, mode, owner, said = LAYOUTS[layout]
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user or group")
        os.chown(home / place, *owner)
    os.chmod(home / place, mode)
    with caplog.at_level(logging.WARNING, "lowering"):
        assert reading() is None
        reading()
    assert said in caplog.text
    assert f"mode {mode:04o}" in caplog.text
    assert str((home / place).resolve()) in caplog.text


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("entry")])
def test_nothing_is_written_there_either(home, layout):
    place, mode, owner, _ = LAYOUTS[layout]
    if owner is not None and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user or group")
    if owner is not None:
        os.chown(home / place, *owner)
    os.chmod(home / place, mode)
    before = sorted(home.rglob("*"))
    new = "ab" + "cd" * 31
    store = cache.store()
    if store is not None:
        with pytest.raises(Untrusted):
            store.write(new, entry(), 1 << 30)
    assert sorted(home.rglob("*")) == before


def test_what_the_message_says_mends_it(home, caplog):
    (home / "cache" / "kernels").chmod(0o777)
    with caplog.at_level(logging.WARNING, "lowering"):
        assert reading() is None
    command = caplog.text.rsplit("mend it with: ", 1)[1].split("\n")[0]
    assert os.system(command) == 0
    assert reading() == entry()


@needs_root
def test_a_link_in_the_folder_of_another_user_is_refused(home, tmp_path, caplog):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "link").symlink_to(home / "cache")
    os.chown(theirs, OTHER, -1)
    with cache.use(theirs / "link"), caplog.at_level(logging.WARNING, "lowering"):
        assert reading() is None
    assert str(theirs) in caplog.text


@needs_root
def test_a_link_of_another_user_is_refused(home, tmp_path):
    (tmp_path / "link").symlink_to(home / "cache")
    os.lchown(tmp_path / "link", OTHER, -1)
    with cache.use(tmp_path / "link"):
        assert reading() is None


def test_what_a_link_leads_to_is_looked_at(home, tmp_path):
    (tmp_path / "link").symlink_to(home / "cache")
    with cache.use(tmp_path / "link"):
        assert reading() == entry()
        home.chmod(0o777)
        assert reading() is None


@pytest.mark.parametrize("place", ["cache/kernels", f"cache/kernels/ab/{KEY}.so"])
def test_inside_the_cache_there_are_no_links(home, tmp_path, place):
    moved = tmp_path / "moved"
    (home / place).rename(moved)
    (home / place).symlink_to(moved)
    assert reading() is None


def test_a_pipe_in_place_of_an_entry_does_not_hang(home):
    path = cache.store().path(KEY)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert reading() is None


def test_a_sticky_parent_is_fine_and_links_without_end_are_not(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with cache.use(shared / "mine"):
        assert cache.store() is not None
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with cache.use(tmp_path / "a"):
        assert cache.store() is None


def test_dots_in_a_path_are_followed_as_the_system_does(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mine").mkdir(mode=0o700)
    trust.check_folder(tmp_path / "mine" / ".." / "mine" / ".")
    with pytest.raises(Untrusted, match="open"):
        trust.check_folder(tmp_path / "open" / ".." / "mine")
    (tmp_path / "open" / "inner").mkdir()
    with pytest.raises(Untrusted, match="open"):
        trust.check_folder(tmp_path / "open" / "inner" / "..")


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077])
def test_what_is_made_is_private_under_any_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        with cache.use(tmp_path / "above" / "cache"):
            store = cache.store()
            store.write(KEY, entry(), 1 << 30)
            with store.lock(KEY, "kernel"):
                pass
            store.path(KEY).write_bytes(b"")
            assert store.read(KEY) is None  # into damaged/
            store.write(KEY, entry(), 1 << 30)
            assert store.read(KEY) == entry()
    finally:
        os.umask(before)
    for path in (tmp_path / "above").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_private_group_of_a_user_is_nobody_else(home, monkeypatch):
    """With umask 002 what other programs made, ``~/.cache`` say, is writable by a group of one."""
    import grp
    import pwd
    from types import SimpleNamespace

    home.chmod(0o775)
    about = home.stat()
    members: list[str] = []
    user = SimpleNamespace(pw_name="anna", pw_gid=about.st_gid)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    group = SimpleNamespace(gr_name="anna", gr_gid=about.st_gid, gr_mem=members)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    monkeypatch.setattr(os, "listxattr", lambda path, follow_symlinks=True: [])
    assert reading() == entry()
    members.append("berta")
    assert reading() is None
    members.clear()
    monkeypatch.setattr(os, "listxattr", lambda path, follow_symlinks=True: ["system.posix_acl_access"])
    assert reading() is None


@needs_root
def test_in_a_container_without_root_the_outer_root_is_taken_for_root(home, monkeypatch):
    os.chown(home, OTHER, -1)
    assert reading() is None
    monkeypatch.setattr(trust, "_uid_map", lambda: [(0, 1000, 1)])
    assert reading() == entry()
    os.chown(home / "cache", OTHER, -1)
    assert reading() is None  # above the cache alone


@pytest.mark.usefixtures("cache_dir")
class TestKernels:
    """Whole lookups: compile, load, what is loaded."""

    def compile(self):
        x = torch.empty(64, device="meta")
        constants = {"config": Config(), "function": same}
        return lowering.jit(affine).compile(x, x, (2.0, x), 64, arch="sm_90a", **constants)

    def test_an_entry_that_others_could_write_is_not_loaded_but_replaced(self, cache_dir, caplog):
        path = Store(cache_dir).path(self.compile().key)
        path.chmod(0o666)
        function.forget_loaded()
        with caplog.at_level(logging.WARNING, "lowering"):
            assert self.compile().source == "compiled"
        assert str(path) in caplog.text
        function.forget_loaded()
        assert self.compile().source == "disk"

    @pytest.mark.parametrize("place", [".", "kernels", "kernels/*/*.so"])
    def test_where_compiling_is_refused_the_error_says_why(self, cache_dir, place):
        self.compile()
        (found,) = cache_dir.glob(place) if place != "." else [cache_dir]
        found.chmod(0o777)
        function.forget_loaded()
        cache.refuse_compile()
        with pytest.raises(CompileRefused, match=rf"{found} .*writable by everybody; mend it with"):
            self.compile()

    def test_what_is_loaded_is_what_was_checked(self, cache_dir):
        """The file is exchanged between the check of its hash and the load: the checked bytes are loaded."""
        key = self.compile().key
        function.forget_loaded()
        kernel = self.compile()
        assert kernel.source == "disk"
        Store(cache_dir).path(key).write_bytes(b"another library")
        assert callable(kernel.launch)
        maps = Path("/proc/self/maps").read_text()
        assert f"kernels-dsl-{kernel.name}" in maps
        assert str(cache_dir) not in maps

    def test_without_anonymous_files_a_private_copy_is_loaded(self, cache_dir, monkeypatch):
        def refuse(*args):
            raise OSError(38, "Function not implemented")

        kernel = self.compile()
        monkeypatch.setattr(os, "memfd_create", refuse)
        Store(cache_dir).path(kernel.key).unlink()
        assert callable(kernel.launch)


def test_a_sealed_copy_cannot_be_changed():
    from lowering import sealed

    descriptor = sealed.sealed_copy(b"code", "name")
    try:
        for change in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 1)):
            with pytest.raises(PermissionError):
                change()
        assert os.pread(descriptor, 10, 0) == b"code"
        assert sealed._fresh_path(descriptor) != sealed._fresh_path(descriptor)
        assert Path(sealed._fresh_path(descriptor)).read_bytes() == b"code"
    finally:
        os.close(descriptor)


def test_the_record_of_sources_is_not_taken_from_others(home, caplog):
    from lowering import sources

    path = home / "cache" / sources.MEMO_NAME
    path.write_text("{}")
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING, "lowering"):
        sources.load_memo(home / "cache")
    assert str(path) in caplog.text
