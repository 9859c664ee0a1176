"""Loading a library from bytes: what was checked is what is loaded, whatever happens to files meanwhile.

The bytes are copied to an anonymous file in memory, which is then sealed: nobody can change it any more, not
even this process. The dynamic loader maps that file.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

from lowering.locks import fcntl

log = logging.getLogger("lowering")

# From <linux/fcntl.h>: Python names them only where the C library of its build did.
_F_ADD_SEALS, _SEAL, _SHRINK, _GROW, _WRITE = 1033, 1, 2, 4, 8

_MODULE_FUNCTIONS = ("ffi.Module.load_from_file.so", "ffi.ModuleGetFunction", "ffi.ModuleGlobalsAdd")

_serial = itertools.count(1)


def load_function(library: bytes, entry: str, name: str) -> Callable[..., Any]:
    """The function `entry` of a shared object that is loaded from its bytes, after `ffi.load`.

    :param name: shown in ``/proc/*/maps``.
    """
    import tvm_ffi
    from tvm_ffi import core

    # The private name is there as soon as `core` is; the public one imports the whole package.
    find: Any = getattr(core, "_get_global_func", None) or tvm_ffi.get_global_func
    load, get, keep = (find(function, True) for function in _MODULE_FUNCTIONS)
    if load is not None and get is not None and keep is not None:
        try:
            descriptor = sealed_copy(library, name)
            try:
                module = load(_fresh_path(descriptor), "so")
            finally:
                os.close(descriptor)  # what is loaded stays mapped
            keep(module)
            if (found := get(module, entry, False)) is not None:
                return found
        except Exception as error:
            # A system without anonymous files, without /proc, or that lets nobody run code from one.
            log.info("%s is loaded from a temporary file: %s", name, error)
    from lowering import scratch  # here, since most systems need no file

    with scratch.folder() as folder:
        path = folder / "kernel.so"
        path.write_bytes(library)
        return tvm_ffi.load_module(str(path))[entry]


def sealed_copy(data: bytes, name: str) -> int:
    """A descriptor of an anonymous file with these bytes, which can no longer be changed.

    :raises OSError: where the system has no such files.
    """
    if fcntl is None:
        raise OSError("this system has no sealed files")
    descriptor = os.memfd_create(f"kernels-dsl-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        waiting = memoryview(data)
        while waiting:
            waiting = waiting[os.write(descriptor, waiting) :]
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL | _SHRINK | _GROW | _WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _fresh_path(descriptor: int) -> str:
    """A path of the open file that was never used before.

    The dynamic loader takes a path that it has seen for the library that it has, and descriptors are used
    again. So the path spells a serial number: "./" and "/" mean nothing in it, and stand for 1 and 0.
    """
    bits = f"{next(_serial):b}"
    return "/proc/self/fd/" + "".join("./" if bit == "1" else "/" for bit in bits) + str(descriptor)
