"""`jit`: a host function that is compiled at its first call, kept on disk, and launched in microseconds.

A call goes through up to four steps, each of which ends the search:

1. a memo on the exact dtypes, shapes, strides, alignments and configuration objects: no work at all;
2. the key of the call (signature, configuration, sources, architecture, toolchain) among the kernels that
   this process has loaded;
3. the same key on disk;
4. a compile, in at most one process of those that want this kernel.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from lowering import arch as arch_module
from lowering import cache, ffi, places, reach, toolchain
from lowering.address import Address
from lowering.constants import Canonicalizer
from lowering.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CaptureError,
    CompileRefused,
    LinkError,
    LoweringError,
    without_colours,
)
from lowering.launch import CompiledKernel
from lowering.signature import (
    ArgumentClass,
    Parameter,
    classify,
    is_wide,
    key_of,
    named_tensors,
    parameters_of,
)
from lowering.store import Entry, Store

RUNTIME_LIBRARIES = (toolchain.RUNTIME_NAME, "libtvm_ffi.so", "libc.so.6")
MEMO_LIMIT = 8192
EMULATE_VARIABLE = "KERNELS_DSL_EMULATE"
# Types that are told apart by value; other configuration objects by identity, which is quicker.
_BY_VALUE = frozenset((bool, int, float, str, type(None)))
_NOT_TENSORS = frozenset((tuple, list, bool, int, float, type(None), Address))

_KERNEL_OBJECT = """\
an object of type {kind} cannot be a key of the kernel cache, which must know all that decides the machine \
code. Make it in a host function, from configuration (callers pass it by keyword; the stream is filled in):
    def host(x: cute.Tensor, y: cute.Tensor, tile: cutlass.Constexpr, stream):
        {kind}(tile)(x, y, stream)
    kernel = lowering.jit(host)"""

_kernels: dict[str, CompiledKernel] = {}
_generation = [0]
# Held by the thread of this process that compiles; the DSL takes one at a time anyway.
_building = threading.RLock()


def jit(
    host_fn: Callable[..., Any] | str | None = None,
    *,
    name: str | None = None,
    check: Callable[..., None] | None = None,
    options: str = "",
) -> Any:
    """Make a host function compile at its first call. Usable as a decorator.

    :param host_fn: a function that launches kernels, or ``"module:qualname"``, which is not imported until a
        compile is needed. A plain function is traced as it stands, which is right unless its own control
        flow depends on runtime values; then it carries ``@cute.jit`` (below this decorator, which must then
        be spelled ``@jit``: the DSL takes ``@lowering.jit`` for its own). Its parameters are, in any
        order: ``cute.Tensor``; tuples of tensors and scalars; ``Int32``, ``Int64``, ``Float32``… scalars;
        things that may be None; ``stream``, which is filled in with torch's current stream; and
        configuration annotated ``cutlass.Constexpr``, which callers pass by keyword.
    :param name: for messages and listings; the function's own otherwise.
    :param check: called with the same arguments before a kernel is first used with these shapes; raises on
        shapes that do not fit together.
    :param options: more of the DSL's compile options.
    """
    if host_fn is None:
        return lambda function: JitFunction(function, name=name, check=check, options=options)
    return JitFunction(host_fn, name=name, check=check, options=options)


class JitFunction:
    """A host function with its compiled kernels. Made by `jit`."""

    def __init__(
        self,
        target: Callable[..., Any] | str,
        *,
        name: str | None = None,
        check: Callable[..., None] | None = None,
        options: str = "",
    ) -> None:
        if isinstance(target, str):
            if target.count(":") != 1:
                raise ArgumentTypeError(f"host_fn must be a function or 'module:qualname', got {target!r}")
            own_name = target.partition(":")[2]
        elif callable(target):
            own_name = getattr(target, "__name__", type(target).__name__)
        else:
            raise ArgumentTypeError(
                f"host_fn must be a function or 'module:qualname', got {type(target).__name__}"
            )
        self.target = target
        self.name = name or own_name
        self.options = options
        self._check = check
        self._memo: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._found: dict[Any, CompiledKernel] = {}
        self._constant_files: dict[str, tuple[int, int]] = {}
        self._constant_keys: dict[Any, tuple[str, tuple[Any, ...]]] = {}
        if "torch" in sys.modules:
            # What the first call needs, off its time. tvm_ffi imports torch, so only where that is paid for.
            ffi.load()

    def __repr__(self) -> str:
        return f"<JitFunction {self.name}>"

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the host function."""
        if isinstance(self.target, str):
            module, _, qualname = self.target.partition(":")
            cache.store()  # brings in what earlier processes learned about the sources
            return reach.function_parameters(module, qualname)
        return parameters_of(self.target)

    @cached_property
    def runtime_parameters(self) -> tuple[Parameter, ...]:
        """Those of them that a caller passes positionally."""
        return tuple(p for p in self.parameters if p.is_runtime)

    @cached_property
    def fingerprint(self) -> places.Fingerprint:
        """The hash of the host function's source and of what it reaches, taken once in this process."""
        if isinstance(self.target, str):
            return reach.module_fingerprint(self.target.partition(":")[0])
        canonical = Canonicalizer()
        try:
            text = canonical.text(self.name, self.target)
        except ArgumentTypeError as error:
            if inspect.isroutine(self.target):
                raise
            raise ArgumentTypeError(_KERNEL_OBJECT.format(kind=type(self.target).__name__)) from error
        return places.Fingerprint(hashlib.sha256(text.encode()).hexdigest(), canonical.files)

    def __call__(self, *args: Any, **constants: Any) -> None:
        """Launch on the current stream of the tensors' device, compiling first if need be.

        :raises ArgumentTypeError, ArgumentValueError: naming the argument, before anything is launched.
        :raises CaptureError: if this is a first call inside a CUDA graph capture.
        :raises CompileRefused: if a compile is needed and not allowed.
        """
        try:
            token: list[Any] = []
            for arg in args:
                if type(arg) in _NOT_TENSORS:
                    _add_other(token, arg)
                else:
                    token += (arg.dtype, arg.shape, arg.stride(), arg.data_ptr() & 15, arg.get_device())
            for key, value in constants.items():
                token.append(key)
                if type(value) in _BY_VALUE:
                    token += (type(value), value)
                else:
                    token.append(id(value))
            memo_key = tuple(token)
            found = self._memo.get(memo_key)
        except (AttributeError, TypeError, RuntimeError):  # the longer way says what is wrong
            memo_key, found = None, None
        if found is not None:
            try:
                found[0](*args)
            except Exception as error:
                without_colours(error)
                raise
            return
        self._first_call(memo_key, args, constants)

    def _first_call(self, memo_key: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        if self._check is not None:
            self._check(*args, **constants)
        device = self._device(args)
        if device is None:
            return self._emulate(args, constants)
        kernel = self._lookup(args, constants, arch_module.arch_of_device(device))
        if not kernel.launched:
            if _capturing():
                raise CaptureError(
                    f"{self.name!r} is called for the first time inside a CUDA graph capture, where its "
                    "machine code cannot be loaded: call it once with these arguments before the capture "
                    "(a warm-up)"
                )
        kernel(*args)
        if memo_key is not None:
            if len(self._memo) >= MEMO_LIMIT:
                self._memo.clear()
            # The configuration objects are kept, so that their ids stay theirs.
            self._memo[memo_key] = (kernel.launch, tuple(constants.values()))
        return None

    def compile(self, *args: Any, arch: str | None = None, **constants: Any) -> CompiledKernel:
        """Find or compile the kernel for these arguments, without launching it.

        :param args: CUDA tensors, or tensors on ``device="meta"`` as specifications, which need no GPU.
        :param arch: such as ``"sm_90a"``; None is the GPU that the tensors are on, else GPU 0.
        :raises LoweringError: if ``arch`` is None and there is no GPU.
        """
        if arch is None:
            if arch_module.device_count() == 0:
                raise LoweringError(
                    f"compiling {self.name!r} on a machine without a GPU: "
                    "say for which arch, as in arch='sm_90a'"
                )
            on_gpu = (t.device.index for _, t in named_tensors((), args) if t.device.type == "cuda")
            arch = arch_module.arch_of_device(next(on_gpu, 0))
        if self._check is not None:
            self._check(*args, **constants)
        return self._lookup(args, constants, arch_module.check(arch))

    def signature(self, *args: Any) -> tuple[ArgumentClass, ...]:
        """Parts of these runtime arguments that decide which kernel serves them."""
        return classify(self.runtime_parameters, args)

    def key_parts(self, args: Sequence[Any], constants: dict[str, Any], arch: str) -> dict[str, Any]:
        """Everything that a kernel's key is a hash of."""
        return self._parts(self._constants_text(constants), self.signature(*args), arch)

    def key(self, *args: Any, arch: str, **constants: Any) -> str:
        """The key of the kernel for these arguments, under which the cache keeps it; compiles nothing."""
        return key_of(self.key_parts(args, constants, arch))

    def _parts(self, constants: str, signature: tuple[ArgumentClass, ...], arch: str) -> dict[str, Any]:
        return {
            "function": self.name,
            "sources": self.fingerprint.digest,
            "signature": [str(c) for c in signature],
            "constants": constants,
            "arch": arch,
            "options": self.options,
            "toolchain": toolchain.identity(),
            "environment": toolchain.environment(),
        }

    def _constants_text(self, constants: dict[str, Any]) -> str:
        wanted = {p.name: p for p in self.parameters if p.is_constexpr}
        for given in constants:
            if given not in wanted:
                kind = (
                    "a runtime argument: pass it positionally"
                    if given in {p.name for p in self.parameters}
                    else "unknown"
                )
                raise ArgumentTypeError(
                    f"{self.name!r}: keyword {given!r} is {kind}; its configuration is {sorted(wanted)}"
                )
        missing = [n for n, p in wanted.items() if n not in constants and not p.has_default]
        if missing:
            raise ArgumentTypeError(f"{self.name!r} misses the configuration {missing}, passed by keyword")
        token = tuple(
            (k, type(v), v if type(v) in _BY_VALUE else id(v)) for k, v in sorted(constants.items())
        )
        known = self._constant_keys.get(token)
        if known is None:
            canonical = Canonicalizer()
            text = ";".join(f"{k}={canonical.text(k, v)}" for k, v in sorted(constants.items()))
            if len(self._constant_keys) >= MEMO_LIMIT:
                self._constant_keys.clear()
            self._constant_files.update(canonical.files)
            known = self._constant_keys[token] = (text, tuple(constants.values()))
        return known[0]

    def _lookup(self, args: Sequence[Any], constants: dict[str, Any], arch: str) -> CompiledKernel:
        with reach.one_look():
            text, signature = self._constants_text(constants), self.signature(*args)
            short = (text, signature, arch, _generation[0])
            kernel = self._found.get(short)
            if kernel is None:
                parts = self._parts(text, signature, arch)
                key = key_of(parts)
                kernel = _kernels.get(key)
        if kernel is not None:
            cache.count("memory_hits")
            kernel.source = "memory"
        else:
            kernel = self._load_or_compile(parts, key, args, constants)
        self._found[short] = kernel
        return kernel

    def _load_or_compile(
        self, parts: dict[str, Any], key: str, args: Sequence[Any], constants: dict[str, Any]
    ) -> CompiledKernel:
        store = cache.store()
        kernel = _from_disk(store, key)
        if kernel is None:
            if _capturing():
                raise CaptureError(
                    f"{self.name!r} would have to be compiled inside a CUDA graph capture: call it once with "
                    "these arguments before the capture (a warm-up)"
                )
            with _building, store.lock(key, self.name) if store is not None else nullcontext():
                # Another thread or process may have made it while this one waited.
                kernel = _kernels.get(key) or _from_disk(store, key) or _from_bundles(store, key)
                kernel = kernel or self._compile(store, parts, key, args, constants)
                return _kernels.setdefault(key, kernel)
        return _kernels.setdefault(key, kernel)

    def _compile(
        self,
        store: Store | None,
        parts: dict[str, Any],
        key: str,
        args: Sequence[Any],
        constants: dict[str, Any],
    ) -> CompiledKernel:
        # Here, since a kernel that is in the cache needs neither.
        from lowering.compile import compile_host
        from lowering.link import link_shared

        if cache.compiling_refused():
            raise CompileRefused(
                f"{self.name!r} is not compiled for {parts['arch']} with {parts['signature']}, and compiling "
                f"is refused (KERNELS_DSL_NO_COMPILE or lowering.cache.refuse_compile); "
                f"{_refused(store, key) or f'cache: {cache.dir()}'}"
            )
        signature = self.signature(*args)
        made = compile_host(
            self.target,
            self.parameters,
            signature,
            constants,
            arch=parts["arch"],
            name=self.name,
            options=self.options,
        )
        try:
            library, kind = link_shared(made.object, RUNTIME_LIBRARIES), "shared"
        except LinkError as error:
            cache.warn_once(
                f"compiled kernels cannot be linked here ({error}); loading them will import the compiler"
            )
            library, kind = made.object, "object"
        facts = {
            "key": key,
            "parts": parts,
            "name": self.name,
            "arch": parts["arch"],
            "kind": kind,
            "seconds": made.seconds,
            "launches": [vars(launch) for launch in made.launches],
        }
        entry = Entry.make(library, made.ptx, made.cubin, facts)
        if store is not None and self.may_be_kept():
            _keep(store, key, entry)
        return CompiledKernel(entry, "compiled")

    def may_be_kept(self) -> bool:
        """Not if a source changed since it was hashed: the kernel may come from the new text."""
        changed = self.fingerprint.changed() + places.changed(self._constant_files)
        if changed:
            cache.warn_once(
                f"{changed[0]} changed while this process was using it: "
                "kernels made from it are kept in memory only"
            )
        return not changed

    def _device(self, args: Sequence[Any]) -> int | None:
        """The GPU that the tensors are on; None if they are on the CPU.

        :raises ArgumentTypeError, ArgumentValueError: naming the tensor that is elsewhere than the first.
        """
        first: tuple[str, Any] | None = None
        for name, tensor in named_tensors(self.runtime_parameters, args):
            if tensor.device.type not in ("cuda", "cpu"):
                raise ArgumentTypeError(
                    f"argument {name!r} is on device {tensor.device}, expected a CUDA tensor; meta tensors "
                    f"serve for {self.name}.compile(..., arch=...)"
                )
            if first is None:
                first = (name, tensor)
            elif tensor.device != first[1].device:
                raise ArgumentValueError(
                    f"argument {name!r} is on device {tensor.device}, "
                    f"expected {first[1].device}, where {first[0]!r} is"
                )
        if first is None:
            raise ArgumentTypeError(f"{self.name!r} needs at least one tensor argument")
        on_gpu = first[1].device.type == "cuda" and not _gpu_is_pretended()
        return first[1].device.index if on_gpu else None

    def _emulate(self, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        arch = emulated_arch()
        if arch is None:
            name = next(n for n, t in named_tensors(self.runtime_parameters, args) if t.device.type == "cpu")
            raise ArgumentTypeError(
                f"argument {name!r} is on the CPU, expected a CUDA tensor; to run {self.name!r} on the CPU, "
                f"call it within lowering.emulator.run(arch='sm_90a') or set {EMULATE_VARIABLE}=sm_90a"
            )
        recorded = _recording()
        if recorded is not None:
            from lowering.recording import RecordedCall

            recorded[1].append(RecordedCall(self, args, constants))
            return
        from lowering import emulator

        emulator.launch(self, args, constants, arch)


def _gpu_is_pretended() -> bool:
    """True if `lowering.emulator.run(torch_cuda=True)` holds: tensors on "cuda" are on the CPU."""
    front = sys.modules.get("lowering.emulator.front")
    return front is not None and front.pretending()


def emulated_arch() -> str | None:
    """The architecture that CPU tensors are emulated or recorded for now, or None where they are an error."""
    recorded = _recording()
    if recorded is not None:
        return recorded[0]
    emulator = sys.modules.get("lowering.emulator")
    active = getattr(emulator, "active_arch", None)
    return (active() if active is not None else None) or os.environ.get(EMULATE_VARIABLE) or None


def emulated_sms() -> int | None:
    """SMs of the emulated GPU where some number was asked for, or None for those of a typical one."""
    if _recording() is not None:
        return None
    from lowering import emulator

    return emulator.active_sms()


def _recording() -> tuple[str, list[Any]] | None:
    module = sys.modules.get("lowering.recording")
    return None if module is None else module.active()


def forget_loaded() -> None:
    """Drop every kernel that this process has in memory, so that the next call looks on disk again.

    `JitFunction`s that have already launched keep what they launched.
    """
    _kernels.clear()
    _generation[0] += 1


def _from_disk(store: Store | None, key: str) -> CompiledKernel | None:
    if store is None:
        return None
    try:
        entry = store.read(key)
    except OSError as error:
        cache.warn_once(f"a cached kernel cannot be read ({error}); compiling it")
        return None
    if entry is None:
        return None
    cache.count("disk_hits")
    return CompiledKernel(entry, "disk")


def _from_bundles(store: Store | None, key: str) -> CompiledKernel | None:
    from lowering import shipped  # here, since a kernel that is in the cache needs none of it

    return shipped.find(key, store)


def _refused(store: Store | None, key: str) -> str | None:
    """Reason not to use the disk cache, or the kernel that it has under a key; None where there is none."""
    if store is None:
        return cache.refusal() if cache.enabled() else "the disk cache is switched off"
    try:
        store.read(key)
    except OSError as error:
        return f"the cached one is not used: {error}"
    return None


def _keep(store: Store, key: str, entry: Entry) -> None:
    try:
        store.write(key, entry, cache.size_limit())
    except OSError as error:
        cache.count("store_failures")
        cache.warn_once(
            f"compiled kernels cannot be kept in {store.folder} ({error.strerror or error}): "
            "this process has them in memory, the next one compiles again"
        )
        return
    from lowering import sources  # here, since a kernel that is in the cache needs none of it

    cache.count("stores")
    sources.save_memo(store.folder)


def _capturing() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def _add_other(token: list[Any], arg: Any) -> None:
    """A runtime argument that is no tensor, for the memo's key: what it is, not its value if a number, but
    whether that is wide."""
    kind = type(arg)
    if kind is float:
        token.append(kind)
    elif isinstance(arg, (tuple, list)):
        token.append(len(arg))
        for item in arg:
            if type(item) in _NOT_TENSORS:
                _add_other(token, item)
            else:
                token += (item.dtype, item.shape, item.stride(), item.data_ptr() & 15, item.get_device())
    else:
        token += (kind, is_wide(arg))
