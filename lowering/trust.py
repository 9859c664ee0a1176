"""Files that may be loaded as code: those that nobody but this user and root can have written.

The rule is the one that OpenSSH has for its keys (``StrictModes``), for every component of the path from
``/`` to the file, symbolic links included:

- it belongs to this user or to root;
- it is writable by nobody else. Above the trusted folder a sticky directory such as ``/tmp`` is fine: others
  can write there, but not rename or replace what is this user's. Write permission of a group that has no
  other member, the private group of systems with umask 002, is nobody else's either.

A path that passes stays good until this user or root changes it, so it can be opened by name afterwards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from lowering.errors import Untrusted
from lowering.records import frozen

MAX_LINKS = 40


@frozen
class Component:
    """A directory, link or file that opening a path goes through."""

    path: str
    about: os.stat_result

    def __str__(self) -> str:
        return f"{self.path} (owner {self.about.st_uid}, mode {stat.S_IMODE(self.about.st_mode):04o})"


def components(path: str | os.PathLike[str]) -> Iterator[Component]:
    """Every component from ``/`` to ``path``, in the order in which the kernel looks at them.

    :raises OSError: at the first that does not exist or cannot be looked at.
    """
    here, links = "/", 0
    waiting = _parts(os.path.join(os.getcwd(), path))
    yield Component(here, os.lstat(here))
    while waiting:
        part = waiting.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)
            yield Component(here, os.lstat(here))
            continue
        step = Component(os.path.join(here, part), os.lstat(os.path.join(here, part)))
        yield step
        if not stat.S_ISLNK(step.about.st_mode):
            here = step.path
            continue
        links += 1
        if links > MAX_LINKS:
            raise Untrusted(f"{step.path} is one of more than {MAX_LINKS} symbolic links")
        target = os.readlink(step.path)
        here = "/" if target.startswith("/") else here
        waiting += _parts(target)


def _parts(path: str | os.PathLike[str]) -> list[str]:
    return os.fspath(path).split("/")[::-1]


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Check a folder that code is loaded from, and all that leads to it.

    :raises Untrusted: naming the component, its owner and mode, and what mends it.
    :raises OSError: if it does not exist or cannot be looked at.
    """
    found = list(components(folder))
    for component in found[:-1]:
        _check_above(component)
    check_inside(found[-1], directory=True)


def check_parents(path: str | os.PathLike[str]) -> None:
    """Check what leads to a path, as far as it exists: nobody else may be able to put something there.

    :raises Untrusted: as `check_folder`.
    """
    try:
        for component in components(path):
            _check_above(component)
    except FileNotFoundError:
        pass


def check_inside(component: Component, *, directory: bool) -> None:
    """Check something in a trusted folder, or the folder itself: no link, of one's own, and private to write.

    :raises Untrusted: as `check_folder`.
    """
    mode = component.about.st_mode
    if stat.S_ISLNK(mode):
        raise Untrusted(f"{component} is a symbolic link; mend it with: rm {_quoted(component)}")
    if not (stat.S_ISDIR(mode) if directory else stat.S_ISREG(mode)):
        kind = "directory" if directory else "regular file"
        raise Untrusted(f"{component} is not a {kind}; mend it with: rm -r {_quoted(component)}")
    if component.about.st_uid not in (_own_id(), 0):
        raise Untrusted(f"{_foreign(component)}; mend it with: rm -r {_quoted(component)}")
    if who := _other_writers(component):
        # The content of a file may have been changed already; what a folder holds is checked on its own.
        command = f"chmod go-w {_quoted(component)}" if directory else f"rm {_quoted(component)}"
        raise Untrusted(f"{component} is writable by {who}; mend it with: {command}")


def check_entry(path: Path, *, directory: bool) -> None:
    """`check_inside` for a path.

    :raises OSError: if it does not exist or cannot be looked at.
    """
    check_inside(Component(str(path), os.lstat(path)), directory=directory)


def read_file(path: Path) -> bytes:
    """The content of a file in a folder that was checked; the very file that is read is checked, too.

    :raises Untrusted: as `check_folder`.
    :raises OSError: if there is none, or it cannot be read.
    """
    try:
        # Not blocking: opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if path.is_symlink():
            check_entry(path, directory=False)
        raise
    try:
        check_inside(Component(str(path), os.fstat(descriptor)), directory=False)
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def make_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it, for this user alone whatever the umask is.

    :raises OSError: if one cannot be made.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        if folder == folder.parent:
            break
        folder = folder.parent
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)


def _quoted(component: Component) -> str:
    """A component's path for a shell."""
    import shlex  # for messages alone

    return shlex.quote(component.path)


def _check_above(component: Component) -> None:
    owner, mode = component.about.st_uid, component.about.st_mode
    if owner not in (_own_id(), 0) and not _is_outer_root(owner):
        raise Untrusted(f"{_foreign(component)}, who can replace what is in it; choose another place")
    if stat.S_ISLNK(mode) or mode & stat.S_ISVTX:
        return  # a link's mode means nothing; a sticky directory keeps what is this user's
    if who := _other_writers(component):
        raise Untrusted(
            f"{component} is writable by {who}, who can replace what is in it; "
            f"mend it with: chmod go-w {_quoted(component)}"
        )


def _own_id() -> int:
    """This user's number. Untrusted where there is none, as on Windows, whose files say no owner here."""
    if not hasattr(os, "geteuid"):
        raise Untrusted("this system has no owners of files that can be checked")
    return os.geteuid()


def _foreign(component: Component) -> str:
    return f"{component} belongs to {_user(component.about.st_uid)}, not to you (uid {os.geteuid()}) or root"


def _other_writers(component: Component) -> str:
    """Others who can write, in words; empty if nobody."""
    mode = component.about.st_mode
    if mode & stat.S_IWOTH:
        return "everybody"
    if mode & stat.S_IWGRP and not _is_private_group(component):
        return f"group {component.about.st_gid}"
    return ""


def _is_private_group(component: Component) -> bool:
    """True if a component's group is its owner's alone: of the same name, and without other members."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(component.about.st_uid)
        group = grp.getgrgid(component.about.st_gid)
        # With an access control list the group's bits are those of all who are named in it.
        listed = "system.posix_acl_access" in os.listxattr(component.path, follow_symlinks=False)
    except (KeyError, OSError):
        return False
    return (
        not listed
        and user.pw_gid == group.gr_gid
        and user.pw_name == group.gr_name
        and set(group.gr_mem) <= {user.pw_name}
    )


def _is_outer_root(owner: int) -> bool:
    """True if an owner may be the root of the system around a container without privileges.

    In a user namespace, what belongs to somebody who has no id there shows as the overflow id: the system's
    root, or another user of the system, which cannot be told apart from inside.
    """
    try:
        overflow = int(Path("/proc/sys/fs/overflowuid").read_text())
        return owner == overflow and not any(first <= owner < first + size for first, _, size in _uid_map())
    except (OSError, ValueError):
        return False


def _uid_map() -> list[tuple[int, ...]]:
    """The ranges of this process's user namespace: first id inside, first id outside, how many."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


def _user(uid: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(uid).pw_name!r} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
