"""From a host function and a signature to machine code: the only module that imports the compiler.

``cute.compile`` is not thread-safe (several threads in it end the process), so one lock is around it;
compiles that should run side by side need processes. Nothing here needs a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowering import arch as arch_module
from lowering import cache, scratch
from lowering.dsl_import import without_jax
from lowering.errors import CompileError, CompileRefused, plain, without_colours
from lowering.launches import ENTRY, LaunchFacts
from lowering.signature import (
    TENSOR_DTYPES,
    ArgumentClass,
    NoneClass,
    Parameter,
    ScalarClass,
    TensorClass,
    TupleClass,
)

if TYPE_CHECKING:
    from lowering.function import JitFunction

log = logging.getLogger("lowering")

ANNOUNCE_SECONDS = 1.0
RESERVED = {"options", "is_experimental", "trace_finalize_hooks", "no_cache", "compile_only", "no_jit_engine"}

_compile_lock = threading.RLock()


@dataclass(frozen=True)
class Compiled:
    """Products of one compile. ``module`` (the DSL's IR) and ``function_name`` are kept for the emulator."""

    object: bytes
    ptx: str
    cubin: bytes
    launches: tuple[LaunchFacts, ...]
    seconds: float
    function_name: str
    module: Any = None


@dataclass(frozen=True)
class EmulatorCompile:
    """A kernel compiled with line information, its IR kept so that its host function can run on a CPU."""

    ir_module: Any
    function_name: str
    ptx: str
    cubin: bytes
    signature: tuple[ArgumentClass, ...]
    parameters: tuple[Parameter, ...]
    launches: tuple[LaunchFacts, ...]
    arch: str
    name: str
    seconds: float


def resolve(target: str | Callable[..., Any]) -> Callable[..., Any]:
    """The host function itself; a ``"module:qualname"`` is imported."""
    if not isinstance(target, str):
        return target
    module_name, _, qualname = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def compile_host(
    target: str | Callable[..., Any],
    parameters: Sequence[Parameter],
    signature: Sequence[ArgumentClass],
    constants: dict[str, Any],
    *,
    arch: str,
    name: str,
    options: str = "",
    for_emulator: bool = False,
) -> Compiled:
    """Compile one host function for one signature.

    :param target: the host function, or ``"module:qualname"``.
    :param parameters: all its parameters; ``signature`` has one entry for each runtime one.
    :param constants: the configuration, by parameter name.
    :param options: more of the DSL's compile options.
    :param for_emulator: with line information, and keep the DSL's IR in the result.
    :raises CompileError: if the DSL refuses, or a kernel wants more shared memory or threads than the
        architecture has (the DSL itself does not notice the first).
    """
    arch_module.check(arch)
    with (
        _compile_lock,
        _announced(name, arch, _afterwards()) as started,
        scratch.folder() as folder,
    ):
        with without_jax():
            import cutlass.cute as cute

        function = resolve(target)
        decorated = function if inspect.isroutine(function) else type(function).__call__  # a kernel object's
        if not hasattr(decorated, "__wrapped__"):
            # Traced as it stands. The DSL rewrites control flow only in functions that carry its own
            # decorator in their source, and takes any other decorated function for a global of that name.
            function = cute.jit(preprocess=False)(function)
        args, kwargs = _arguments(parameters, signature, constants)
        wanted = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        wanted += " --generate-line-info" * for_emulator + (f" {options}" if options else "")
        try:
            with warnings.catch_warnings(), _call_stacks(for_emulator):
                # Said of an empty tuple, which is fine: there is nothing in it to convert.
                warnings.filterwarnings("ignore", message=r"Argument .* cannot be converted to a JitArgument")
                with _own_compile():
                    # No engine of the DSL's own, which on a GPU would compile the host function twice more.
                    compiled = cute.compile(function, *args, **kwargs, no_jit_engine=True, options=wanted)
            object_path = folder / "kernel.o"
            if not for_emulator:  # which runs the host function from its IR
                compiled.export_to_c(str(object_path), function_name=ENTRY)
        except Exception as error:
            raise CompileError(
                f"compiling {name!r} for {arch} failed: {type(error).__name__}: {plain(error)}"
            ) from without_colours(error)
        result = Compiled(
            object=b"" if for_emulator else object_path.read_bytes(),
            ptx=_text(compiled.__ptx__),
            cubin=_bytes(compiled.__cubin__),
            launches=launch_facts(compiled.ir_module, compiled.function_name),
            seconds=time.perf_counter() - started,
            function_name=compiled.function_name,
            module=compiled.ir_module if for_emulator else None,
        )
    cache.count("compiles")
    check_budget(name, arch, result.launches)
    return result


def compile_for_emulator(
    function: JitFunction, args: Sequence[Any], constants: dict[str, Any], arch: str
) -> EmulatorCompile:
    """Compile in this process with line information, keeping the IR of the host function.

    The host function is run from that IR. `lowering.emulator.kept` keeps it for later processes.

    :param args: the runtime arguments; CPU and meta tensors serve as well as CUDA ones.
    :raises CompileError: as `compile_host`.
    :raises CompileRefused: if compiling is switched off.
    """
    from lowering.signature import classify

    if cache.compiling_refused():
        raise CompileRefused(
            f"{function.name!r} would have to be compiled for the emulator, and "
            "compiling is refused (KERNELS_DSL_NO_COMPILE or lowering.cache.refuse_compile)"
        )

    parameters = function.parameters
    signature = classify([p for p in parameters if p.is_runtime], args)
    made = compile_host(
        function.target,
        parameters,
        signature,
        constants,
        arch=arch,
        name=function.name,
        for_emulator=True,
    )
    return EmulatorCompile(
        ir_module=made.module,
        function_name=made.function_name,
        ptx=made.ptx,
        cubin=made.cubin,
        signature=signature,
        parameters=parameters,
        launches=made.launches,
        arch=arch,
        name=function.name,
        seconds=made.seconds,
    )


def _own_compile() -> AbstractContextManager[None]:
    """Keeps the emulator's hooks, if they are in place, out of a compile."""
    hooks = sys.modules.get("lowering.emulator.front.dsl")
    return nullcontext() if hooks is None else hooks.untouched()


def _call_stacks(for_emulator: bool) -> AbstractContextManager[None]:
    """Notes the Python call stacks that the emulator's reports show."""
    if not for_emulator:
        return nullcontext()
    from lowering.emulator import call_stacks

    return call_stacks.recorded()


def _afterwards() -> str:
    """Fate of a compiled kernel, for the announcement."""
    if not cache.kept():
        return "there is no disk cache to keep it, so that the next process compiles it again"
    return "this is done once, later runs take it from the cache"


@contextmanager
def _announced(name: str, arch: str, afterwards: str) -> Iterator[float]:
    """Say once, through logging, that a compile is taking long: a silent one is taken for a hang."""
    said = threading.Event()
    started = time.perf_counter()

    def say() -> None:
        said.set()
        log.warning("compiling %s for %s; %s", name, arch, afterwards)

    timer = threading.Timer(ANNOUNCE_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield started
    finally:
        timer.cancel()
        timer.join()  # or the interpreter could end while the thread does
        seconds = time.perf_counter() - started
        if seconds > ANNOUNCE_SECONDS and not said.is_set():
            # The compiler held the interpreter lock throughout, so the timer had no chance to speak.
            log.warning("compiled %s for %s in %.1f s; %s", name, arch, seconds, afterwards)
        else:
            log.info("compiled %s for %s in %.2f s", name, arch, seconds)


def _arguments(
    parameters: Sequence[Parameter], signature: Sequence[ArgumentClass], constants: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    from cutlass.cute.runtime import make_fake_stream

    positional: list[Any] = []
    by_name: dict[str, Any] = {}
    classes = iter(signature)
    skipped = False
    for parameter in parameters:
        if parameter.name in RESERVED:
            raise CompileError(
                f"a host function's parameter cannot be called {parameter.name!r}: the DSL takes it"
            )
        if parameter.is_stream:
            value: Any = make_fake_stream(use_tvm_ffi_env_stream=True)
        elif parameter.is_constexpr:
            if parameter.name not in constants:
                skipped = True  # it has a default
                continue
            value = constants[parameter.name]
        else:
            value = _stand_in(next(classes))
        if skipped:
            by_name[parameter.name] = value
        else:
            positional.append(value)
    return positional, by_name


def _stand_in(argument: ArgumentClass) -> Any:
    """Stand-in that the DSL is given for a runtime argument."""
    import cutlass
    from cutlass import cute

    if isinstance(argument, TupleClass):
        return tuple(_stand_in(item) for item in argument.items)
    if isinstance(argument, NoneClass):
        return None
    if isinstance(argument, ScalarClass):
        return getattr(cutlass, argument.type)(1)
    assert isinstance(argument, TensorClass)
    shape_bits, stride_bits = (64 if wide else 32 for wide in (argument.wide_shape, argument.wide_strides))
    shape = tuple(cute.sym_int(shape_bits) for _ in argument.strides)
    stride = tuple(
        cute.sym_int(stride_bits, divisibility=argument.stride_divisibility) if s is None else s
        for s in argument.strides
    )
    element = getattr(cutlass, TENSOR_DTYPES[argument.dtype][0])
    return cute.runtime.make_fake_tensor(element, shape, stride=stride, assumed_align=argument.align)


def _text(value: Any) -> str:
    # With a dump folder that vanished the DSL leaves a path here instead of the text.
    if not isinstance(value, str) or ".version" not in value:
        raise CompileError("the DSL kept no PTX for this kernel")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes) or value[:4] != b"\x7fELF":
        raise CompileError("the DSL kept no cubin for this kernel")
    return value


_CONSTANT = re.compile(r"^\s*(%\w+) = llvm\.mlir\.constant\((-?\d+) : i(?:32|64)\)", re.M)
_CONFIG = r"array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32"
_CONFIG_ALLOCA = re.compile(rf"^\s*(%\w+) = llvm\.alloca %\w+ x !llvm\.struct<\({_CONFIG}\)>", re.M)
_FIELD = re.compile(
    rf"^\s*(%\w+) = llvm\.getelementptr (%\w+)\[0, ([\d, ]+)\] .*!llvm\.struct<\({_CONFIG}\)>", re.M
)
_STORE = re.compile(r"^\s*llvm\.store (%\w+), (%\w+) :", re.M)
_KERNEL = re.compile(r"llvm\.mlir\.addressof @kernels_(\w+) :")


def launch_facts(module: Any, function_name: str) -> tuple[LaunchFacts, ...]:
    """Read the constants of every launch out of the host function's IR, in launch order.

    The launch configuration is the struct ``{grid[3], block[3], shared memory, stream, attributes, count}``
    that the host function fills in with constants or with values that it computes.
    """
    text = ""
    for operation in module.body.operations:
        if (
            "sym_name" in operation.attributes
            and str(operation.attributes["sym_name"]).strip('"') == function_name
        ):
            text = str(operation)
    constants = {name: int(value) for name, value in _CONSTANT.findall(text)}
    order = {name: i for i, name in enumerate(_CONFIG_ALLOCA.findall(text))}
    fields = {address: (config, where.replace(" ", "")) for address, config, where in _FIELD.findall(text)}
    values: list[dict[str, int | None]] = [{} for _ in order]
    for value, address in _STORE.findall(text):
        config, where = fields.get(address, ("", ""))
        if config in order:
            values[order[config]].setdefault(where, constants.get(value))
    entries = list(dict.fromkeys(_KERNEL.findall(text)))
    if len(entries) != len(values):
        # One kernel launched several times: the entries cannot be told apart by order alone.
        entries = entries * len(values) if len(entries) == 1 else ["?"] * len(values)
    return tuple(
        LaunchFacts(entry, tuple(v.get(f"1,{i}") for i in range(3)), v.get("2"))
        for entry, v in zip(entries, values)
    )


def check_budget(name: str, arch: str, launches: Sequence[LaunchFacts]) -> None:
    """Refuse what no GPU of this architecture can launch.

    :raises CompileError: naming the kernel, what it wants, and what there is.
    """
    limits = arch_module.limits(arch)
    for launch in launches:
        if launch.dynamic_smem is not None and launch.dynamic_smem > limits.smem_per_block:
            raise CompileError(
                f"{name!r} ({launch.entry}) wants {launch.dynamic_smem} bytes of shared memory; "
                f"{arch} has {limits.smem_per_block} for a block"
            )
        threads = 1
        for size in launch.block:
            threads *= size if size is not None else 1
        if threads > limits.max_threads_per_block:
            raise CompileError(
                f"{name!r} ({launch.entry}) wants {threads} threads a block; "
                f"{arch} allows {limits.max_threads_per_block}"
            )
