"""A cubin in the driver's hands: what it says about kernels on this GPU, through cuda-python.

`lowering.inspect` reads a cubin without a GPU; this asks the driver, which knows what it makes of one on the
GPU at hand: attributes, and how many blocks or clusters are resident at a time.
"""

from __future__ import annotations

from typing import Any

from lowering import arch as arch_module
from lowering.arch import ask_driver
from lowering.errors import ArgumentValueError, LoweringError
from lowering.records import frozen


@frozen
class LoadedAttributes:
    """Attributes that the driver gives of one kernel. Bytes and counts."""

    registers: int
    static_smem: int
    local_bytes: int
    constant_bytes: int
    max_threads: int


class LoadedCubin:
    """A cubin, loaded. A context manager: the driver's handles end with it."""

    def __init__(self, cubin: bytes, device: int = 0) -> None:
        """:param cubin: the ELF bytes. :param device: the GPU, as PyTorch counts them.

        :raises LoweringError: without a GPU, or if the driver refuses the cubin.
        """
        arch_module.device(device)
        self._device = ask_driver("cuDeviceGet", device)
        self._library: Any = ask_driver("cuLibraryLoadData", cubin, None, None, 0, None, None, 0)

    def __enter__(self) -> LoadedCubin:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._library is not None:
            ask_driver("cuLibraryUnload", self._library)
            self._library = None

    def _kernel(self, entry: str) -> Any:
        try:
            return ask_driver("cuLibraryGetKernel", self._library, entry.encode())
        except LoweringError as error:
            raise ArgumentValueError(f"the cubin has no entry {entry!r} ({error})") from error

    def attributes(self, entry: str) -> LoadedAttributes:
        """Attributes of one entry on this GPU."""
        kernel, names = self._kernel(entry), arch_module._driver().CUfunction_attribute

        def ask(name: str) -> int:
            key = getattr(names, f"CU_FUNC_ATTRIBUTE_{name}")
            return int(ask_driver("cuKernelGetAttribute", key, kernel, self._device))

        return LoadedAttributes(
            registers=ask("NUM_REGS"),
            static_smem=ask("SHARED_SIZE_BYTES"),
            local_bytes=ask("LOCAL_SIZE_BYTES"),
            constant_bytes=ask("CONST_SIZE_BYTES"),
            max_threads=ask("MAX_THREADS_PER_BLOCK"),
        )

    def _function(self, entry: str, dynamic_smem: int) -> Any:
        """The function in the device's primary context, allowed its shared memory."""
        kernel, names = self._kernel(entry), arch_module._driver().CUfunction_attribute
        key = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ask_driver("cuKernelSetAttribute", key, dynamic_smem, kernel, self._device)
        return ask_driver("cuKernelGetFunction", kernel)

    def resident_blocks(self, entry: str, threads: int, dynamic_smem: int = 0) -> int:
        """Blocks of one entry that an SM holds at a time.

        :param threads: of a block. :param dynamic_smem: bytes of a block.
        """
        with _PrimaryContext(self._device):
            function = self._function(entry, dynamic_smem)
            name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            return int(ask_driver(name, function, threads, dynamic_smem))

    def resident_clusters(
        self, entry: str, cluster: tuple[int, int, int], threads: int, dynamic_smem: int = 0
    ) -> int:
        """Clusters of one entry that the whole GPU holds at a time.

        :param cluster: blocks in each direction. :param threads: of a block.
        """
        driver = arch_module._driver()
        with _PrimaryContext(self._device):
            function = self._function(entry, dynamic_smem)
            names = driver.CUfunction_attribute
            if cluster[0] * cluster[1] * cluster[2] > 8:
                key = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                ask_driver("cuKernelSetAttribute", key, 1, self._kernel(entry), self._device)
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimensions = attribute.value.clusterDim
            dimensions.x, dimensions.y, dimensions.z = cluster
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = dynamic_smem
            config.attrs, config.numAttrs = [attribute], 1
            return int(ask_driver("cuOccupancyMaxActiveClusters", function, config))


class _PrimaryContext:
    """The device's primary context (PyTorch's), made current within a block."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        ask_driver("cuCtxPushCurrent", ask_driver("cuDevicePrimaryCtxRetain", self._device))

    def __exit__(self, *exception: object) -> None:
        ask_driver("cuCtxPopCurrent")
        ask_driver("cuDevicePrimaryCtxRelease", self._device)
