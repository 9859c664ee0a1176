"""The part of `tvm_ffi` that a launch needs, without the rest of the package.

The package's `__init__` imports code generators, dataclasses, containers and a C++ builder: 25 ms that a
kernel from the cache does not need. A launch needs the shared library, the extension module and the exception
classes, and with PyTorch of some versions the module that gives tensors their exchange. So the package is put
in place with its `__init__` deferred, as `importlib.util.LazyLoader` does. Code that asks it for another
name, such as the DSL, runs it then, in the same module.

Its extension module imports cuda-python's driver, 12 ms, to compare arguments with `CUstream`. Nothing is one
before somebody else has imported that: `DeferredDriver` stands in for it until then.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lowering import records

log = logging.getLogger("lowering")

NAME = "tvm_ffi"
# `core` is given classes by `error`, and by `_dtype` one that arguments are compared with.
NEEDED = ("core", "error")
# Modules that others of the package import from it; those may be imported before `__init__` runs.
_PRIVATE = ("_dtype", "_ffi_api")
_EXCHANGE = "__dlpack_c_exchange_api__"  # of tensors; the package gives it to those of older PyTorch
_DRIVER = "cuda.bindings.driver"
_DUNDERS = ("__all__", "__version__", "__version_tuple__")  # that `__init__` defines
_lock = threading.RLock()
_importing: list[str] = []  # not empty while the thread that holds the lock imports a part of the package


class DeferredPackage(ModuleType):
    """A package whose `__init__` runs when a missing name is asked for; an ordinary module from then on."""

    def __getattr__(self, name: str) -> Any:
        if name in _PRIVATE:
            return importlib.import_module(f"{NAME}.{name}")
        if not name.startswith("__") or name in _DUNDERS:
            _run_init(self)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        _run_init(self)
        return sorted(self.__dict__)


def _run_init(package: ModuleType) -> None:
    """Run a deferred `__init__`, once. Other threads wait until it has run; it may ask the package itself."""
    with _lock:
        if _importing or type(package) is not DeferredPackage:
            return
        _importing.append(NAME)
        try:
            package.__spec__.loader.exec_module(package)  # type: ignore[union-attr]
            package.__class__ = ModuleType  # type: ignore[assignment]
        finally:
            _importing.clear()


class DeferredDriver(ModuleType):
    """The names of `cuda.bindings.driver`, for code that asks it for classes to compare arguments with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name == "CUstream" and _DRIVER not in sys.modules:
            return _NoStream
        return getattr(importlib.import_module(_DRIVER), name)


class _NoStream:
    """A class without instances: `CUstream`, while its module is not imported."""


class _NoDtype(str):
    """The same in place of `tvm_ffi.dtype`, whose module takes a millisecond and puts its own there."""


class QuickDataclasses(ModuleType):
    """The standard library's `dataclasses`, but what this thread decorates meanwhile is quick to create."""

    def __init__(self) -> None:
        super().__init__(dataclasses.__name__)
        self.thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name == "dataclass" and threading.get_ident() == self.thread:
            return records.plain
        return getattr(dataclasses, name)


@contextmanager
def _quick_dataclasses() -> Iterator[None]:
    """In the block, `import dataclasses` gives the quick ones: the extension module has four, 2 ms of it."""
    sys.modules[dataclasses.__name__] = QuickDataclasses()
    try:
        yield
    finally:
        sys.modules[dataclasses.__name__] = dataclasses


@contextmanager
def _deferred_driver() -> Iterator[None]:
    """In the block, `from cuda.bindings import driver` gives the deferred one, unless it is there.

    Other threads import the real modules from it: the package that stands in has the real one's folder.
    """
    parent = _DRIVER.rpartition(".")[0]
    spec = None if parent in sys.modules else importlib.util.find_spec(parent)
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    package = ModuleType(parent)
    package.__path__ = list(spec.submodule_search_locations)
    package.driver = DeferredDriver(_DRIVER)  # type: ignore[attr-defined]
    package.__spec__ = spec
    sys.modules[parent] = package
    try:
        yield
    finally:
        if sys.modules.get(parent) is package:
            del sys.modules[parent]


def load() -> None:
    """Import `tvm_ffi`: in a process that has PyTorch, NEEDED alone."""
    with _lock:
        if NAME in sys.modules or "torch" not in sys.modules:
            importlib.import_module(NAME)  # waits for another thread that imports it
            return
        spec = importlib.util.find_spec(NAME)
        library = Path(spec.origin or "").parent / "lib" / "libtvm_ffi.so" if spec else Path()
        if spec is None or not library.is_file():  # not laid out as its wheels are
            importlib.import_module(NAME)
            return
        package = importlib.util.module_from_spec(spec)
        package.__class__ = DeferredPackage
        sys.modules[NAME] = package
        _importing.append(NAME)
        try:
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            exchanges = hasattr(sys.modules["torch"].Tensor, _EXCHANGE)
            with _deferred_driver():
                with _quick_dataclasses():
                    importlib.import_module(f"{NAME}.core")
                for name in NEEDED if exchanges else (*NEEDED, "_optional_torch_c_dlpack"):
                    importlib.import_module(f"{NAME}.{name}")
            sys.modules[f"{NAME}.core"]._set_class_dtype(_NoDtype)
        except (ImportError, OSError, AttributeError) as error:
            log.info("%s is imported whole: %s", NAME, error)
            _importing.clear()
            _run_init(package)
        finally:
            _importing.clear()
