"""The front door: programs that do not know of the emulator run in it.

`entered` hooks into the DSL, so that what ``cute.compile`` returns and what ``@cute.jit`` functions launch is
emulated; with ``pretend`` PyTorch and the CUDA driver answer as with one GPU.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from lowering.emulator.reports import EmulatorError

from .memory import Extent, live_tensors
from .patches import Patches

if TYPE_CHECKING:
    from lowering.emulator.session import Session

    from .devices import Placement
    from .driver import Driver

DEVICE_NAME = "emulated NVIDIA {arch}"
# Programs that keep compiled kernels on disk would load them past the emulator.
_NO_CACHES = {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}

_lock = threading.RLock()
_open = 0
_hooks = ExitStack()
_devices: list[Pretended] = []


def pretending() -> bool:
    """True if PyTorch's ``"cuda"`` is the CPU now."""
    return bool(_devices)


@contextmanager
def entered(current: Callable[[], Session | None], session: Session, *, pretend: bool) -> Iterator[None]:
    """Keep the hooks in place within this block; blocks may nest, and overlap in several threads.

    :raises EmulatorError: with ``pretend``, where another GPU is pretended already.
    """
    global _open
    with _lock:
        if pretend and _devices and _devices[0].driver.facts != session.device:
            raise EmulatorError(
                f"torch_cuda=True pretends {session.device} within a block that pretends "
                f"{_devices[0].driver.facts}: a process sees one GPU at a time"
            )
        if not _open:
            _hooks.enter_context(_hook(current))
        _open += 1
    try:
        with _pretend(session) if pretend and not _devices else nullcontext():
            yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                _hooks.close()


@contextmanager
def _hook(current: Callable[[], Session | None]) -> Iterator[None]:
    from lowering.dsl_import import without_jax

    with without_jax():
        import cutlass  # noqa: F401

    from .dsl import Hooks

    patches, hooks = Patches(), Hooks(current, _allocations, _on_gpu)
    try:
        hooks.install(patches)
        yield
    finally:
        patches.undo()
        hooks.close()


@contextmanager
def _pretend(session: Session) -> Iterator[None]:
    from . import benchmarks, dsl, torch_cuda
    from .devices import Placement
    from .driver import Driver

    name = DEVICE_NAME.format(arch=session.arch)
    patches, placement = Patches(), Placement()
    driver = Driver(session.device, name)
    try:
        for variable, value in {**_NO_CACHES, "CUTE_DSL_ARCH": session.arch}.items():
            patches.environment(variable, value)
        driver.install(patches)
        placement.install(patches)
        torch_cuda.install(patches, session.device, name)
        benchmarks.install(patches)
        dsl.refuse_object_files(patches)
        _devices.append(Pretended(driver, placement))
        with placement:
            yield
    finally:
        patches.undo()
        _devices.clear()


class Pretended(NamedTuple):
    """The GPU that a program sees."""

    driver: Driver
    placement: Placement


def _on_gpu(tensor: Any) -> bool:
    """True if a tensor stands for one on the GPU; without a pretended GPU every tensor does."""
    return not _devices or not hasattr(tensor, "untyped_storage") or _devices[0].placement.on_gpu(tensor)


def _allocations() -> Iterator[Extent]:
    if not _devices:
        return live_tensors()
    return itertools.chain(_devices[0].placement.allocations(), _devices[0].driver.allocations())
