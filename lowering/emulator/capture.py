"""Runs a compiled host function on the CPU and records the kernel launches that it makes.

The host function's calls into the CUDA runtime are answered by Python callbacks; a launch is recorded with
its grid, attributes and parameter bytes. Tensor maps among the parameters are built by the host code itself.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lowering import arch

from .ptx import Module
from .reports import EmulatorError
from .state import Launch

_REFUSED = 801  # cudaErrorNotSupported
_ATTRIBUTES = {2: "cooperative", 4: "cluster", 6: "programmatic"}


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of the emulated GPU for the host function."""

    arch: str
    sms: int

    def attribute(self, number: int) -> int:
        """A device attribute by its number in the CUDA runtime; 0 for those that nothing here depends on."""
        limits = arch.limits(self.arch)
        major, minor = arch.capability(self.arch)
        known = {
            1: limits.max_threads_per_block,
            8: 48 * 1024,  # shared memory of a block that did not ask for more
            10: 32,
            12: limits.registers_per_sm,
            16: self.sms,
            39: limits.max_threads_per_sm,
            75: major,
            76: minor,
            81: limits.smem_per_sm,
            82: limits.registers_per_sm,
            95: 1,  # cooperative launches
            97: limits.smem_per_block,
        }
        return known.get(number, 0)


@dataclass
class HostFunction:
    """A compiled host function: its execution engine, entry and argument types."""

    engine: Any
    entry: int
    argument_types: list[str]
    callbacks: list[Any]
    recorder: _Recorder


def _struct_leaves(text: str) -> list[str]:
    """Scalar leaves of an LLVM type such as ``struct<(ptr<1>, struct<(i32, i64)>)>``, in order."""
    return re.findall(r"\b(i1|i8|i16|i32|i64|f16|bf16|f32|f64|half|ptr)\b", text.replace("!llvm.", ""))


def pack(type_text: str, values: Sequence[int | float]) -> bytes:
    """Bytes of an argument of ``type_text`` whose scalar leaves are ``values``, with C alignment.

    Raises ValueError where their number differs.
    """
    leaves = _struct_leaves(type_text)
    if len(leaves) != len(values):
        raise ValueError(
            f"the host function's argument {type_text} has {len(leaves)} values; got {len(values)}"
        )
    kinds: dict[str, Any] = {
        "i1": ctypes.c_bool,
        "i8": ctypes.c_int8,
        "i16": ctypes.c_int16,
        "i32": ctypes.c_int32,
        "i64": ctypes.c_int64,
        "f32": ctypes.c_float,
        "f64": ctypes.c_double,
        "ptr": ctypes.c_uint64,
        "f16": ctypes.c_uint16,
        "bf16": ctypes.c_uint16,
    }
    structure = _ctypes_of(_parse_type(type_text.replace("!llvm.", "")), kinds)
    remaining = list(values)
    instance = structure()
    filled = _fill(instance, remaining)
    return bytes(filled)


def _parse_type(text: str) -> Any:
    """LLVM type text as a nested list of leaf names."""
    text = text.strip()
    if not text.startswith("struct<"):
        leaf = re.match(r"\w+", text)
        assert leaf is not None
        return leaf.group(0)
    inside = text[text.index("(") + 1 : text.rindex(")")]
    parts, depth, start = [], 0, 0
    for i, char in enumerate(inside):
        if char in "(<":
            depth += 1
        elif char in ")>":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(inside[start:i])
            start = i + 1
    if inside[start:].strip():
        parts.append(inside[start:])
    return [_parse_type(p) for p in parts]


def _ctypes_of(tree: Any, kinds: dict[str, Any]) -> Any:
    if isinstance(tree, str):
        return type("Leaf", (ctypes.Structure,), {"_fields_": [("v", kinds[tree])]})
    fields = [(f"f{i}", _ctypes_of(part, kinds)) for i, part in enumerate(tree)]
    return type("Node", (ctypes.Structure,), {"_fields_": fields})


def _fill(instance: Any, values: list) -> Any:
    for name, kind in instance._fields_:
        if name == "v":
            value = values.pop(0)
            if kind in (ctypes.c_float, ctypes.c_double):
                instance.v = float(value)
            elif kind is ctypes.c_bool:
                instance.v = bool(value)
            else:
                instance.v = int(value)
        else:
            _fill(getattr(instance, name), values)
    return instance


class _Recorder:
    """Answers the runtime's symbols; ``launches`` gets (kernel handle, config bytes, argument pointers)."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.module: Module | None = None
        self.launches: list[Launch] = []
        self.error: str | None = None
        self.device = DeviceFacts("sm_90a", 132)
        self.calls = 0  # calls of the host code that are being recorded

    @contextmanager
    def recording(self, device: DeviceFacts) -> Iterator[list[Launch]]:
        """Take launches within this block into the list that it gives.

        Raises :class:`EmulatorError` where the host code asked for something that the recorder refused.
        """
        self.launches, self.device, self.error = [], device, None
        self.calls += 1
        try:
            yield self.launches
        except Exception as error:
            if self.error is None:
                raise
            raise EmulatorError(self.error) from error
        finally:
            self.calls -= 1
        if self.error:
            raise EmulatorError(self.error)

    def attribute(self, out: int, number: int, device: int) -> int:
        ctypes.c_int.from_address(out).value = self.device.attribute(number)
        return 0

    def library(self, out: int) -> int:
        ctypes.c_uint64.from_address(out).value = 0x11B
        return 0

    def kernel(self, out: int, name: bytes) -> int:
        handle = 0x1000 + len(self.names)
        self.names[handle] = name.decode()
        ctypes.c_uint64.from_address(out).value = handle
        return 0

    def launch(self, config: int, handle: int, args: int) -> int:
        raw = (ctypes.c_uint32 * 6).from_address(config)
        smem, _, attributes = (ctypes.c_uint64 * 3).from_address(config + 24)
        count = ctypes.c_uint32.from_address(config + 48).value
        cluster, found = (1, 1, 1), {}
        for i in range(count):
            kind = ctypes.c_int32.from_address(attributes + 72 * i).value
            value = tuple((ctypes.c_uint32 * 3).from_address(attributes + 72 * i + 8))
            if kind == 4:
                cluster = value  # type: ignore[assignment]
            elif value[0]:
                found[_ATTRIBUTES.get(kind, f"attribute {kind}")] = value[0]
        return self.record(handle, tuple(raw[:3]), tuple(raw[3:]), smem, args, cluster, found)

    def record(
        self, handle: int, grid: tuple, block: tuple, smem: int, args: int, cluster: tuple, found: dict
    ) -> int:
        name = self.names.get(handle)
        assert self.module is not None
        if not self.calls:
            self.error = "compiled for the emulator: call it within lowering.emulator.run(...)"
            return _REFUSED
        if name is None and len(self.module.kernels) == 1:
            name = next(iter(self.module.kernels))
        if name not in self.module.kernels:
            self.error = f"the host function launches kernel {name!r}, which the PTX does not have"
            return _REFUSED
        params = bytearray()
        for i, param in enumerate(self.module.kernels[name].params):
            pointer = ctypes.c_uint64.from_address(args + 8 * i).value
            params.extend(b"\0" * (param.offset - len(params)))
            params.extend(ctypes.string_at(pointer, param.size))
        self.launches.append(Launch(name, grid, block, cluster, smem, bytes(params), found))
        return 0

    def raise_in_tvm_ffi(self, code: int) -> None:
        """Set the error of a TVM-FFI call whose host function failed."""
        text = self.error or f"the host function returned error {code}"
        library = _tvm_ffi_library()
        if library is not None:
            library.TVMFFIErrorSetRaisedFromCStr(b"RuntimeError", text.encode())


def _callbacks(recorder: _Recorder) -> dict[str, Any]:
    """ctypes callbacks by runtime symbol."""
    p, i, u64, s = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p

    def make(result: Any, arguments: list[Any], function: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(function)

    def put_int(value: int) -> Any:
        def put(out: int, *_: Any) -> int:
            ctypes.c_int.from_address(out).value = value
            return 0

        return put

    def launch_plain(
        handle: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, stream: int, smem: int, args: int
    ) -> int:
        return recorder.record(handle, (gx, gy, gz), (bx, by, bz), smem or 0, args, (1, 1, 1), {})

    return {
        "_cudaLibraryLoadData": make(i, [p, p, p, p, i, p, p, i], lambda out, *_: recorder.library(out)),
        "_cudaLibraryGetKernel": make(i, [p, p, s], lambda out, lib, name: recorder.kernel(out, name)),
        "_cudaLibraryUnload": make(i, [p], lambda *_: 0),
        "_cudaKernelSetAttributeForDevice": make(i, [p, i, i, i], lambda *_: 0),
        "_cudaFuncSetAttribute": make(i, [p, i, i], lambda *_: 0),
        "_cudaGetDevice": make(i, [p], put_int(0)),
        "_cudaSetDevice": make(i, [i], lambda *_: 0),
        "_cudaDeviceGetAttribute": make(i, [p, i, i], recorder.attribute),
        "_cuKernelGetAttribute": make(i, [p, i, p, i], put_int(0)),
        "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": make(i, [p, p, i, u64], put_int(1)),
        "_cudaLaunchKernelEx": make(i, [p, p, p], recorder.launch),
        "_cudaLaunchKernel": make(i, [p, i, i, i, i, i, i, p, u64, p], launch_plain),
        "_cudaGetDeviceCount": make(i, [p], put_int(1)),
        "_cudaDeviceSynchronize": make(i, [], lambda: 0),
        "_cudaStreamSynchronize": make(i, [p], lambda *_: 0),
        "CuteDSLRT_TVMFFISetRaisedCudaError": make(
            None, [p, i], lambda _, code: recorder.raise_in_tvm_ffi(code)
        ),
        "cuda_dialect_get_error_name": make(s, [i], lambda *_: b"error"),
        "cuda_dialect_init_library_once": make(i, [p, p, p, p], lambda *_: 0),
        "cuda_dialect_unload_library_once": make(None, [p], lambda *_: None),
    }


def _declared(module_text: str) -> list[str]:
    """Names of functions that the module declares and does not define."""
    names = []
    for match in re.finditer(r"^\s*llvm\.func (?:\w+ )*@\"?([\w.$]+)\"?\(.*$", module_text, re.M):
        if not match.group(0).rstrip().endswith("{"):
            names.append(match.group(1))
    return names


@dataclass
class HostCode:
    """A lowered host module in this process, with the recorder under it instead of the CUDA runtime."""

    engine: Any
    text: str
    recorder: _Recorder
    module: Module
    keep: list[Any]

    def entry(self, symbol: str) -> int:
        """The address of a function of the module.

        :raises EmulatorError: if it has none of that name.
        """
        address = self.engine.raw_lookup(symbol)
        if not address:
            raise EmulatorError(f"the compiled module has no host function {symbol}")
        return address


def _tvm_ffi_library() -> Any:
    """The library that host code with TVM-FFI calling convention calls, or None."""
    try:
        from tvm_ffi import libinfo

        return ctypes.CDLL(libinfo.find_libtvm_ffi())
    except (ImportError, OSError, RuntimeError):
        return None


def host_code(ir_module: Any, module: Module) -> HostCode:
    """Load the host code of a compiled function (its lowered ``ir_module``) into this process.

    ``module`` is the parsed PTX, whose parameter declarations give the sizes of the kernels' arguments.
    """
    from cutlass._mlir.execution_engine import ExecutionEngine

    recorder = _Recorder()
    recorder.module = module
    callbacks = _callbacks(recorder)
    text = str(ir_module)
    engine = ExecutionEngine(ir_module, opt_level=0, shared_libs=[])
    zero = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    tvm_ffi = _tvm_ffi_library()
    keep: list[Any] = [zero]
    for name in _declared(text):
        if name in callbacks:
            function = callbacks[name]
        elif name.startswith(("_cu", "cuda")):
            function = _unanswered(recorder, name)
        elif hasattr(tvm_ffi, name):
            function = getattr(tvm_ffi, name)
        elif name in ("printf", "malloc", "free", "memcpy", "memset", "abort"):
            continue
        else:
            function = zero
        keep.append(function)
        engine.raw_register_runtime(name, ctypes.cast(function, ctypes.c_void_p))
    code = HostCode(engine, text, recorder, module, keep)
    library = ctypes.c_uint64(0x11B)
    cell = ctypes.c_void_p(ctypes.addressof(library))
    result = ctypes.c_int(0)
    load = engine.raw_lookup("cuda_load_to_device")
    if load:
        device = ctypes.c_int(0)
        _call(load, [cell, device, result])
    return code


def _unanswered(recorder: _Recorder, name: str) -> Any:
    """A function of the CUDA runtime that the emulator does not answer: an error of the call."""

    def refuse() -> int:
        recorder.error = f"the host function calls {name.lstrip('_')}, which the emulator does not answer"
        return _REFUSED

    return ctypes.CFUNCTYPE(ctypes.c_int)(refuse)


def host_function(ir_module: Any, function_name: str, module: Module) -> HostFunction:
    """Load a compiled function's host code and find its C entry and the types of its arguments.

    Raises :class:`EmulatorError` where the host function is not found.
    """
    code = host_code(ir_module, module)
    signature = re.search(
        rf"llvm\.func @\"?_mlir_ciface_{re.escape(function_name)}\"?\((.*?)\) -> i32", code.text
    )
    if signature is None:
        raise EmulatorError(f"the compiled module has no host function {function_name}")
    types = [part.strip() for part in re.split(r"%arg\d+: ", signature.group(1))[1:]]
    types = [re.sub(r"\s*\{[^{}]*\}\s*,?$", "", t).rstrip(",").strip() for t in types]
    entry = code.entry("_mlir_ciface_" + function_name)
    return HostFunction(code.engine, entry, types, code.keep, code.recorder)


def _call(pointer: int, cells: list[Any]) -> None:
    packed = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(c) for c in cells])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(pointer)(ctypes.addressof(packed))


def launches(
    host: HostFunction, arguments: Sequence[Sequence[int | float]], device: DeviceFacts
) -> list[Launch]:
    """Call the host function; each argument is the list of its scalar leaves (pointer, extents, strides).

    ``device`` is what it sees of the GPU.
    Returns the launches in order. Raises :class:`EmulatorError` where the function reports an error.
    """
    if len(arguments) != len(host.argument_types):
        raise EmulatorError(
            f"the host function takes {len(host.argument_types)} arguments; got {len(arguments)}"
        )
    buffers = [
        ctypes.create_string_buffer(pack(t, v) or b"\0", max(len(pack(t, v)), 8))
        for t, v in zip(host.argument_types, arguments, strict=True)
    ]
    result = ctypes.c_int(0)
    with host.recorder.recording(device) as found:
        _call(host.entry, [*buffers, result])
        if result.value and host.recorder.error is None:
            raise EmulatorError(f"the host function returned error {result.value}")
    return found
