"""A compiled kernel as something to call.

The compiled host function is called through TVM-FFI, which takes torch tensors as they are, checks each
(dtype, rank, strides, alignment, device), makes the tensors' device current, launches on torch's current
stream there, and restores the device. That is the whole launch path: about 5 µs with four tensors.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lowering import arch as arch_module
from lowering import ffi, sealed, toolchain
from lowering.errors import ArgumentValueError, LoweringError, plain, without_colours
from lowering.launches import ENTRY, LaunchFacts
from lowering.store import Entry

if TYPE_CHECKING:
    from lowering.inspect import KernelResources

_runtime: list[ctypes.CDLL] = []
_runtime_lock = threading.Lock()


def load_runtime() -> None:
    """Load what every compiled host function needs.

    A kernel's shared object names these libraries without a path, and the loader takes the ones that are
    already there.
    """
    ffi.load()
    with _runtime_lock:
        if not _runtime:
            _runtime.append(ctypes.CDLL(str(toolchain.runtime_library())))


class CompiledKernel:
    """One kernel, compiled for one signature, configuration and architecture.

    Attributes: ``key`` (hex), ``name``, ``arch``, ``source`` ("memory", "disk" or "compiled": where this
    lookup found it), ``seconds`` (that the compile took, whenever it was), ``launches`` (block and dynamic
    shared memory of each launch, where they are constants).
    """

    def __init__(self, entry: Entry, source: str) -> None:
        facts = entry.facts
        self.key: str = facts["key"]
        self.name: str = facts["name"]
        self.arch: str = facts["arch"]
        self.seconds: float = facts["seconds"]
        self._is_shared_object = facts["kind"] == "shared"
        self.launches = tuple(
            LaunchFacts(entry=f["entry"], block=tuple(f["block"]), dynamic_smem=f["dynamic_smem"])
            for f in facts["launches"]
        )
        self.source = source
        self.entry = entry
        self.launched = False

    def __repr__(self) -> str:
        return f"<CompiledKernel {self.name} {self.arch} {self.key[:12]} from {self.source}>"

    @cached_property
    def launch(self) -> Callable[..., Any]:
        """The raw callable: takes the runtime arguments, positionally, and launches.

        It checks what `JitFunction` keys on, and raises TypeError or ValueError naming the argument. The
        library is loaded at the first use of this attribute, from the bytes that were checked and not from
        the cache's file; the machine code at the first call: do both before a CUDA graph capture.
        """
        load_runtime()
        try:
            if self._is_shared_object:
                return sealed.load_function(self.entry.library, ENTRY, self.name)
            from lowering import scratch  # here, since libraries need neither file nor compiler
            from lowering.dsl_import import without_jax

            with without_jax():
                import cutlass.cute as cute

            with scratch.folder() as folder:
                path = folder / "kernel.o"
                path.write_bytes(self.entry.library)
                return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[ENTRY]
        except Exception as error:
            raise LoweringError(
                f"the compiled kernel {self.name!r} could not be loaded: {plain(error)}"
            ) from without_colours(error)

    def __call__(self, *args: Any) -> None:
        if not self.launched:
            self._check_device(args)
        try:
            self.launch(*args)
        except Exception as error:
            without_colours(error)
            raise
        self.launched = True

    def _check_device(self, args: Sequence[Any]) -> None:
        """Refuse a GPU that this kernel's machine code does not run on."""
        for arg in args:
            device = getattr(arg, "device", None)
            if device is not None and device.type == "cuda":
                gpu = arch_module.arch_of_device(device.index)
                if not arch_module.runs_on(self.arch, gpu):
                    raise ArgumentValueError(
                        f"{self.name!r} was compiled for {self.arch}, which does not run on {device} ({gpu})"
                    )
                return

    def ptx(self) -> str:
        """The PTX text."""
        return self.entry.ptx

    def cubin(self) -> bytes:
        """The machine code, an ELF file."""
        return self.entry.cubin

    def sass(self) -> str:
        """The machine code, disassembled; needs ``nvdisasm`` but no GPU."""
        from lowering import inspect

        return inspect.sass(self.entry.cubin)

    def resources(self) -> list[KernelResources]:
        """Registers, stack, shared memory, spills and instruction counts of each entry; needs no GPU."""
        from lowering import inspect

        return inspect.resources(self.entry.cubin, self.launches)
