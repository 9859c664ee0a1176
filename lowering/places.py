"""Places of modules' sources: whose they are, and whether a file is still the one that was read.

Nothing is imported and no source is read here: `sources` does that, for a process that has to.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowering.records import frozen

# A file changed within this many seconds may change again without a new modification time.
RACY_SECONDS = 2.0

unread: list[Path] = []
"""Cache folders in which earlier processes left facts of sources, which `sources` has not read."""


@frozen
class Fingerprint:
    """The hash of a module and of what it reaches; ``files`` maps each path to its stat, for `changed`."""

    digest: str
    files: dict[str, tuple[int, int]]

    def changed(self) -> list[str]:
        """Paths whose file is no longer the one that was hashed."""
        return changed(self.files)


def changed(files: dict[str, tuple[int, int]]) -> list[str]:
    """Paths of ``files`` whose file no longer has the stamp that is given for it."""
    return [path for path, stamp in files.items() if file_stamp(path) != stamp]


def locate(module: str) -> tuple[str, str] | None:
    """(path of its source, name of its package) of a module, or None. Nothing is imported."""
    loaded = sys.modules.get(module)
    path = getattr(loaded, "__file__", None)
    if path is not None:
        if not path.endswith(".py"):
            return None
        package = module if Path(path).name == "__init__.py" else module.rpartition(".")[0]
        return os.path.abspath(path), package
    spec = _find_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    return os.path.abspath(spec.origin), package


def search_locations(package: str) -> list[str]:
    """Folders in which a package's modules are looked for; none if it is no package."""
    loaded = sys.modules.get(package) or _find_spec(package)
    return list(
        getattr(loaded, "__path__", None) or getattr(loaded, "submodule_search_locations", None) or ()
    )


@lru_cache(maxsize=4096)
def _find_spec(module: str) -> Any:
    parent, _, _ = module.rpartition(".")
    if module == "__main__":
        return None
    if not parent:
        try:
            return importlib.util.find_spec(module)
        except (ImportError, ValueError):  # ValueError: a loaded module without a __spec__
            return None
    above = _find_spec(parent)
    if above is None or above.submodule_search_locations is None:
        return None
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(module, above.submodule_search_locations, None) if find else None
        except KeyError:  # inside a namespace package that is not loaded, which the finder asks for by name
            return None
        if spec is not None:
            return spec
    return None


# In the key by version already, wherever they are installed.
_TOOLCHAIN = frozenset({"cutlass", "nvidia_cutlass_dsl", "tvm_ffi", "cuda", "torch", "numpy"})


_PREFIXES = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)


@lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    # The standard library's and site's folders as `sysconfig` has them, which takes 3 ms to import and ask.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = [os.path.dirname(os.__file__)]
    paths += [os.path.join(prefix, sys.platlibdir, version) for prefix in _PREFIXES]
    paths += site.getsitepackages() + [site.getusersitepackages()]
    return tuple(sorted({os.path.abspath(p) + os.sep for p in paths if p}))


def is_first_party(module: str, path: str, root: str = "") -> bool:
    """True if a module's source belongs to the project of the module ``root``."""
    top = module.partition(".")[0]
    if top == "lowering" or top in _TOOLCHAIN:
        return False
    if root and top == root.partition(".")[0]:
        return True
    return not path.startswith(_library_folders()) and f"{os.sep}dist-packages{os.sep}" not in path


@lru_cache(maxsize=1024)
def is_foreign(top: str, root: str) -> bool:
    """True if a top-level name is a library: decided once, so that its submodules are not looked up."""
    if top == root.partition(".")[0]:
        return False
    if top in _TOOLCHAIN or top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return True
    spec = _find_spec(top)
    if spec is None or (spec.submodule_search_locations is None and not (spec.origin or "").endswith(".py")):
        return True
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return not is_first_party(top, os.path.abspath(origin), root)


def file_stamp(path: str) -> tuple[int, int]:
    """(modification time in ns, size) of a file; zeros if there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)
