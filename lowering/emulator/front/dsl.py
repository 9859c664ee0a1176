"""Hooks into the DSL: what it compiles within `emulator.run` runs emulated when it is called.

Three places of the DSL are replaced. Compile options get PTX and line information. ``to()``, from which every
call of a compiled function takes its executor, gives one that emulates. A function with TVM-FFI calling
convention is loaded with the emulator's runtime instead of CUDA's.
"""

from __future__ import annotations

import ctypes
import inspect
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lowering.emulator import call_stacks, ptx
from lowering.emulator.capture import HostCode, host_code
from lowering.emulator.reports import EmulatorError
from lowering.emulator.views import by_extent

from .memory import Allocations, reachable
from .patches import Patches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowering.emulator.session import Session

_KEPT = "emulated_host_code"
_own = threading.local()


@contextmanager
def untouched() -> Iterator[None]:
    """Within it, this thread's compiles are the DSL's own: `lowering.jit` has its own way to emulate."""
    before = getattr(_own, "active", False)
    _own.active = True
    try:
        yield
    finally:
        _own.active = before


class GivenArguments(NamedTuple):
    """The arguments of the call that this thread makes, as the program passed them."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    signature: inspect.Signature | None


@contextmanager
def _given(arguments: GivenArguments) -> Iterator[None]:
    before = getattr(_own, "given", None)
    _own.given = arguments
    try:
        yield
    finally:
        _own.given = before


def _foreign() -> bool:
    return not getattr(_own, "active", False)


class Hooks:
    """The DSL's hooks while a session is active."""

    def __init__(
        self, current: Callable[[], Session | None], allocations: Allocations, on_gpu: Callable[[Any], bool]
    ) -> None:
        self.current, self.allocations, self.on_gpu = current, allocations, on_gpu
        self.recording = ExitStack()
        self._caches: dict[Any, dict[str, Any]] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="kernels-dsl-emulated-")

    def install(self, patches: Patches) -> None:
        """Replace the DSL's functions."""
        from cutlass.base_dsl.compiler import CompileOptions
        from cutlass.base_dsl.dsl import BaseDSL
        from cutlass.cutlass_dsl import cuda_jit_executor

        self.recording.enter_context(call_stacks.recorded())
        self._options(patches, CompileOptions)
        self._executor(patches, cuda_jit_executor.CudaDialectJitCompiledFunction)
        self._direct_calls(patches, BaseDSL)
        self._arch(patches, BaseDSL)
        self._tvm_ffi(patches)
        self._hardware(patches)
        self._tensors(patches)

    def close(self) -> None:
        """Remove the folder of intermediate files."""
        self.recording.close()
        self.folder.cleanup()

    def _options(self, patches: Patches, options_class: Any) -> None:
        from cutlass.base_dsl import compiler

        original = options_class.apply_envar_settings

        def apply(options: Any, envar: Any, function_name: str) -> None:
            session = self.current()
            if session is not None and _foreign():
                options.options[compiler.KeepPTX].value = True
                options.options[compiler.GenerateLineInfo].value = True
                options.options[compiler.DumpDir].value = self.folder.name
                if not options.options[compiler.GPUArch].value:
                    options.options[compiler.GPUArch].value = session.arch
            original(options, envar, function_name)

        patches.set(options_class, "apply_envar_settings", apply)

    def _executor(self, patches: Patches, compiled_class: Any) -> None:
        original = compiled_class.to

        def to(compiled: Any, device: Any = None) -> Any:
            return original(compiled, device) if self.current() is None else Executor(self, compiled)

        patches.set(compiled_class, "to", to)
        called = compiled_class.__call__

        def call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
            with _given(GivenArguments(args, kwargs, compiled.execution_args.signature)):
                return called(compiled, *args, **kwargs)

        patches.set(compiled_class, "__call__", call)

    def _direct_calls(self, patches: Patches, dsl_class: Any) -> None:
        """Calls of ``@cute.jit`` functions without ``cute.compile``."""
        original = dsl_class._func

        def function(dsl: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
            session = self.current()
            if session is not None and _foreign():
                self._own_caches(patches, dsl, session.arch)
            with _given(GivenArguments(args, kwargs, inspect.signature(body))):
                return original(dsl, body, *args, **kwargs)

        patches.set(dsl_class, "_func", function)

    def _arch(self, patches: Patches, dsl_class: Any) -> None:
        """The arch that a program asks for is the session's, not that of the compile before."""
        from cutlass.base_dsl import Arch

        original = dsl_class.get_arch_enum

        def get_arch_enum(dsl: Any) -> Any:
            session = self.current()
            if session is None or not _foreign():
                return original(dsl)
            return Arch.from_string(session.arch)

        patches.set(dsl_class, "get_arch_enum", get_arch_enum)

    def _own_caches(self, patches: Patches, dsl: Any, arch: str) -> None:
        """Keep functions compiled for the emulator apart: others lack PTX, these launch nothing."""
        if dsl not in self._caches:
            patches.set(dsl, "jit_cache", dsl.jit_cache)
            patches.set(dsl.envar, "disable_file_caching", True)
            self._caches[dsl] = {}
        dsl.jit_cache = self._caches[dsl].setdefault(arch, type(dsl.jit_cache)(max_elems=None))

    def _tvm_ffi(self, patches: Patches) -> None:
        import tvm_ffi
        from cutlass.base_dsl.tvm_ffi_builder import spec
        from cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder import TVMFFIFunctionBuilder
        from cutlass.cutlass_dsl import tvm_ffi_provider

        base = tvm_ffi_provider.TVMFFIJitCompiledFunctionBase
        create = base._create_tvm_ffi_function

        def load(compiled: Any) -> Any:
            if not _foreign():
                return create(compiled)
            code = self.host_code(compiled)
            function = _tvm_ffi_function(code.entry(f"__tvm_ffi_{compiled.function_name}"))
            code.keep.append(function)
            address = ctypes.cast(function, ctypes.c_void_p).value
            return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=code)

        patches.set(base, "_create_tvm_ffi_function", load)
        for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
            function_class = getattr(tvm_ffi_provider, name)
            patches.set(function_class, "__call__", self._calling(function_class.__call__))

        # Arguments are CPU tensors where the program was compiled for CUDA tensors: the check passes.
        decode, device_type = (
            TVMFFIFunctionBuilder.decode_param_tensor,
            TVMFFIFunctionBuilder.load_dltensor_device_type,
        )

        def decode_tensor(builder: Any, block: Any, param: Any, *args: Any) -> Any:
            builder.emulated_device_type = param.dlpack_device_type if _foreign() else None
            return decode(builder, block, param, *args)

        def load_device_type(builder: Any, tensor: Any) -> Any:
            wanted = getattr(builder, "emulated_device_type", None)
            return device_type(builder, tensor) if wanted is None else builder.i32(wanted)

        patches.set(TVMFFIFunctionBuilder, "decode_param_tensor", decode_tensor)
        patches.set(TVMFFIFunctionBuilder, "load_dltensor_device_type", load_device_type)
        initialise = spec.Tensor.__init__

        def tensor_spec(made: Any, *args: Any, **kwargs: Any) -> None:
            if _foreign() and kwargs.get("device_type") == "cpu":
                kwargs["device_type"] = "cuda"  # what the program believes its tensors to be
            initialise(made, *args, **kwargs)

        patches.set(spec.Tensor, "__init__", tensor_spec)

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
            code = vars(compiled).get(_KEPT)
            if code is None:
                return original(compiled, *args, **kwargs)
            signature = getattr(getattr(compiled, "execution_args", None), "signature", None)
            with _given(GivenArguments(args, kwargs, signature)):
                return self.emulate(compiled, code, lambda: original(compiled, *args, **kwargs))

        return call

    def _hardware(self, patches: Patches) -> None:
        from cutlass.utils import HardwareInfo

        from .driver import L2_BYTES

        def sms(*_: Any) -> int:
            session = self.current()
            assert session is not None
            return session.device_sms

        def initialise(info: Any, device_id: int = 0) -> None:
            info.device_id, info.driver_version = device_id, 13000

        def clusters(_: Any, cluster_size: int, stream: Any = None) -> int:
            return max(1, sms() // int(cluster_size))

        patches.set(HardwareInfo, "__init__", initialise)
        patches.set(HardwareInfo, "get_max_active_clusters", clusters)
        patches.set(HardwareInfo, "get_device_multiprocessor_count", sms)
        patches.set(HardwareInfo, "get_l2_cache_size_in_bytes", lambda _: L2_BYTES)

    def _tensors(self, patches: Patches) -> None:
        """``from_dlpack`` of a CPU tensor that stands for one on the GPU gives a tensor in global memory."""
        from cutlass.cute import runtime

        initialise = runtime._Tensor.__init__

        def from_dlpack(made: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
            initialise(made, tensor, *args, **kwargs)
            if self.current() is not None and _foreign() and self.on_gpu(tensor):
                _say_cuda(made._dlpack_data)

        patches.set(runtime._Tensor, "__init__", from_dlpack)

    def host_code(self, compiled: Any) -> HostCode:
        """The host code of a compiled function with the emulator's runtime under it, made once.

        :raises EmulatorError: if it was compiled without PTX, that is outside of `emulator.run`.
        """
        code = vars(compiled).get(_KEPT)
        if code is None:
            text = getattr(compiled, "__ptx__", None)
            if compiled.has_gpu_module and not (isinstance(text, str) and ".version" in text):
                raise EmulatorError(
                    f"{compiled.function_name} was compiled before lowering.emulator.run(...) began, without "
                    "PTX to emulate: call cute.compile within it"
                )
            module = ptx.parse(text) if text else ptx.Module("", {}, {}, {})
            code = host_code(compiled.ir_module, module)
            setattr(compiled, _KEPT, code)
        return code

    def emulate(self, compiled: Any, code: HostCode, call: Callable[[], Any]) -> Any:
        """Make the host call, then execute the launches that it recorded."""
        session = self.current()
        if session is None:
            raise EmulatorError(
                f"{compiled.function_name} was compiled for the emulator: call it within "
                "lowering.emulator.run(...)"
            )
        given = getattr(_own, "given", None)
        extents = (
            reachable(given.signature, given.args, given.kwargs, self.allocations)
            if given is not None
            else list(self.allocations())
        )
        views = by_extent(((e.start, e.size), e.view) for e in extents if e.view is not None)
        return session.call_host(code, call, [(e.name, e.start, e.size) for e in extents], views)


def refuse_object_files(patches: Patches) -> None:
    """Make the loading of compiled kernels from object files an error: they have no PTX to emulate."""
    from cutlass.cute import runtime

    def load_module(path: Any, *_: Any, **__: Any) -> Any:
        raise EmulatorError(
            f"{path} holds a compiled kernel without its PTX: switch the program's cache of kernels off, "
            "so that it compiles them here"
        )

    patches.set(runtime, "load_module", load_module)


_K_DL_CPU, _K_DL_CUDA = 1, 2
# Bytes from the start of a managed tensor to its device type: after the data pointer of the plain struct; the
# versioned one has version, context, deleter and flags before it.
_DEVICE_AT = {b"dltensor": 8, b"dltensor_versioned": 40}


def _say_cuda(capsule: Any) -> None:
    """Turn the device of a DLPack capsule from the CPU into the first GPU."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    for name, offset in _DEVICE_AT.items():
        if api.PyCapsule_IsValid(capsule, name):
            device = ctypes.c_int32.from_address(api.PyCapsule_GetPointer(capsule, name) + offset)
            if device.value == _K_DL_CPU:
                device.value = _K_DL_CUDA


def _tvm_ffi_function(packed: int) -> Any:
    """A C function of TVM-FFI's calling convention, from the engine's, which takes pointers to everything."""
    target = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(packed)

    def call(handle: int | None, args: int | None, count: int, result: int | None) -> int:
        cells = [
            ctypes.c_void_p(handle),
            ctypes.c_void_p(args),
            ctypes.c_int32(count),
            ctypes.c_void_p(result),
        ]
        status = ctypes.c_int32(0)
        packed_cells = (ctypes.c_void_p * 5)(*(ctypes.addressof(cell) for cell in (*cells, status)))
        target(ctypes.addressof(packed_cells))
        return status.value

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)(
        call
    )


class Executor:
    """Stands for the DSL's executor of a compiled function: a call emulates."""

    def __init__(self, hooks: Hooks, compiled: Any) -> None:
        self.hooks, self.compiled = hooks, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _given(GivenArguments(args, kwargs, self.compiled.execution_args.signature)):
            pointers, _ = self.generate_execution_args(*args, **kwargs)
            return self.run_compiled_program(pointers)

    def generate_execution_args(self, *args: Any, **kwargs: Any) -> Any:
        """The C arguments of a call, as the DSL makes them."""
        return self.compiled.execution_args.generate_execution_args(args, kwargs)

    def run_compiled_program(self, pointers: Sequence[Any]) -> int:
        """Call the host function with these C arguments and emulate its launches."""
        hooks, compiled = self.hooks, self.compiled
        code = hooks.host_code(compiled)
        entry = code.entry(f"_mlir_ciface_{compiled.function_name}")
        result = ctypes.c_int32(0)
        cells = [p if type(p) is ctypes.c_void_p else ctypes.c_void_p(p) for p in pointers]
        packed = (ctypes.c_void_p * (len(cells) + 1))(*cells, ctypes.addressof(result))

        def call() -> None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)(ctypes.addressof(packed))
            if result.value and code.recorder.error is None:
                raise EmulatorError(
                    f"the host function {compiled.function_name} returned error {result.value}"
                )

        hooks.emulate(compiled, code, call)
        return 0
