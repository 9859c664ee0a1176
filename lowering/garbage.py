"""Imports of many modules, without a look for garbage among what they make."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_look_for_garbage() -> Iterator[None]:
    """Imports make objects that stay; looking among them for garbage takes a third of the compiler's time.

    `kernels_dsl` has the same for its own imports, of which `lowering` is one.

    The next allocation would catch up on it. So all young objects join the old ones, among which Python looks
    seldom: `gc.unfreeze` puts there what `gc.freeze` sets aside. Objects that the caller froze stay frozen.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
