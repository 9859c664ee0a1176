"""The emulator's front door: the active session, and the emulated call of a JIT function."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import ptx, schedules
from .capture import DeviceFacts, HostCode, HostFunction, host_function, launches
from .engine import execute
from .global_shadow import GlobalShadow
from .memory import GlobalMemory, extent
from .reports import EmulatorError, Kind, Report, ReportLog, where_to_look
from .state import Launch
from .stats import Stats
from .timeline import Timeline
from .views import View, by_extent, view_of

if TYPE_CHECKING:
    from lowering.function import JitFunction

    from .front.progress import Progress


FULL_SMS = 132  # of an H100 or H200
SMS_VARIABLE = "KERNELS_DSL_EMULATE_SMS"


_one_call = threading.RLock()
"""Held during an emulated call: what a host function launches is recorded for one call at a time."""


@dataclass
class Session:
    """Settings and results of emulated calls. Made by `run`.

    ``reports``: what was found. ``timeline``: what ran when, in emulated steps; printing it draws the first
    CTA. ``stats``: counts, in all and by source line. ``launches``: grid, block, cluster and shared memory of
    every launch, in order.
    """

    arch: str
    seed: int = 0
    sms: int | None = None
    raise_on_report: bool = True
    resident: int = 8
    check: bool = True
    max_steps: int = 50_000_000
    inspector: Any = None
    uninitialised: list[Any] = field(default_factory=list)
    log: ReportLog = field(default_factory=ReportLog)
    timeline: Timeline = field(default_factory=Timeline)
    stats: Stats = field(default_factory=Stats)
    launches: list[Launch] = field(default_factory=list)
    steps: int = 0
    before: GlobalShadow | None = None
    seeds: int = 1
    order_matters: bool = False
    progress: Progress | None = None
    seed_of: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.seeds, bool) or self.seeds != int(self.seeds) or self.seeds < 1:
            raise EmulatorError(f"seeds is {self.seeds!r}, must be a whole number of schedules from 1 on")
        if self.sms is not None and (isinstance(self.sms, bool) or self.sms != int(self.sms) or self.sms < 1):
            raise EmulatorError(f"sms is {self.sms!r}, must be None or a whole number of SMs from 1 on")

    @property
    def reports(self) -> list[Report]:
        """Findings so far, one for each place."""
        return self.log.reports

    def mark_uninitialised(self, tensor: Any) -> None:
        """Report reads of this tensor's bytes that come before a kernel has written them."""
        self.uninitialised.append(tensor)

    def call(
        self,
        module: ptx.Module,
        host: HostFunction,
        values: Sequence[Sequence[int | float]],
        tensors: Sequence[tuple[str, Any]],
    ) -> None:
        """Call a host function and execute its launches; ``tensors`` is what the kernels may touch."""
        with _one_call:
            found = launches(host, values, self.device)
            views = by_extent((extent(tensor), view_of(name, tensor)) for name, tensor in tensors)
            self._execute_all(module, found, [(name, *extent(tensor)) for name, tensor in tensors], views)

    def call_host(
        self,
        code: HostCode,
        call: Callable[[], Any],
        extents: Sequence[tuple[str, int, int]],
        views: Mapping[tuple[int, int], View] | None = None,
    ) -> Any:
        """Make a call of compiled host code and execute its launches.

        ``extents``: name, address and bytes of what the kernels may touch; ``views``: the tensors among them,
        by address and bytes. Returns what ``call`` returns.
        """
        with _one_call:
            with code.recorder.recording(self.device) as found:
                result = call()
            self._execute_all(code.module, found, extents, views)
        return result

    @property
    def device_sms(self) -> int:
        """SMs that the emulated GPU claims to have."""
        return self.sms or FULL_SMS

    @property
    def device(self) -> DeviceFacts:
        """Facts of the emulated GPU that a host function sees."""
        return DeviceFacts(self.arch, self.device_sms)

    def _execute_all(
        self,
        module: ptx.Module,
        found: Sequence[Launch],
        extents: Sequence[tuple[str, int, int]],
        views: Mapping[tuple[int, int], View] | None = None,
    ) -> None:
        memory = GlobalMemory()
        marked = [extent(t) for t in self.uninitialised]
        for name, start, size in extents:
            memory.register(start, size, name, (start, size) in marked, (views or {}).get((start, size)))
        for one in found:
            self.execute(module, one, memory)

    def execute(self, module: ptx.Module, launch: Launch, memory: GlobalMemory) -> None:
        """Run one launch under these settings; findings are added and, by default, raised."""
        from lowering.arch import limits

        known = len(self.reports)
        self.launches.append(launch)
        most = limits(self.arch).smem_per_block
        if launch.smem > most:
            raise EmulatorError(
                f"kernel {launch.kernel} asks for {launch.smem} bytes of shared memory; "
                f"{self.arch} has {most}"
            )
        before = schedules.copy(memory) if self.seeds > 1 else []
        first: list[schedules.RegionCopy] = []
        # The session's own seed comes last: its result stays.
        for seed in range(self.seed + self.seeds - 1, self.seed - 1, -1):
            self._execute_once(module, launch, memory, seed)
            if self.seeds > 1:
                if first:
                    self._compare(launch, memory, first, seed)
                else:
                    first = schedules.copy(memory)
                if seed != self.seed:
                    schedules.restore(memory, before)
        new = [report for report in self.reports[known:] if not report.warning]
        if self.raise_on_report and new:
            texts = [str(report) for report in new]
            if len(new) > 1:
                texts += ["look first at:", *(f"  {suspect}" for suspect in where_to_look(new))]
            raise EmulatorError("\n".join(texts), tuple(new))

    def _execute_once(self, module: ptx.Module, launch: Launch, memory: GlobalMemory, seed: int) -> None:
        kept = seed == self.seed
        watching = self.progress.launch(len(self.launches), launch, seed) if self.progress else None
        with watching or nullcontext(None) as started:
            try:
                machine = execute(
                    module,
                    launch,
                    memory,
                    self.log,
                    seed=seed,
                    sms=self.device_sms,
                    resident=max(self.resident, self.sms or 0),
                    timeline=self.timeline if kept else None,
                    stats=self.stats if kept else None,
                    check=self.check,
                    watch=self.inspector if kept else None,
                    max_steps=self.max_steps,
                    first_step=self.steps,
                    before=self.before,
                    started=started,
                )
            finally:
                self.seed_of += [seed] * (len(self.reports) - len(self.seed_of))
        if kept:
            self.steps, self.before = machine.step, machine.accesses
            self.before.before = None

    def _compare(
        self, launch: Launch, memory: GlobalMemory, first: list[schedules.RegionCopy], seed: int
    ) -> None:
        where = None if self.order_matters else schedules.difference(memory, first)
        if where is not None:
            self.log.add(
                Report(
                    Kind.SCHEDULE_DEPENDENT,
                    f"{where} differ between seeds {self.seed + self.seeds - 1} and {seed}; where any order "
                    "of atomics is meant to give a result, say order_matters",
                    launch.kernel,
                )
            )
            self.seed_of += [seed] * (len(self.reports) - len(self.seed_of))


_sessions: list[Session] = []


@contextmanager
def run(
    arch: str = "sm_90a", seed: int = 0, *, torch_cuda: bool = False, **settings: Any
) -> Iterator[Session]:
    """Within this block, JIT functions called with CPU tensors and what the DSL compiles run emulated.

    :param arch: what to compile for: ``sm_80``, ``sm_89``, ``sm_90a``…
    :param seed: orders warps and the completion of asynchronous work; the same seed, the same run.
    :param torch_cuda: True: PyTorch's ``"cuda"`` is the CPU within the block, and ``torch.cuda`` answers as
        with one GPU of ``arch``: for programs that make their own tensors.
    :param settings: of `Session`: ``seeds`` (schedules that each launch is run under, from the same memory;
        the result of ``seed`` stays), ``order_matters`` (True: schedules may leave different results),
        ``sms`` (SMs that the emulated GPU claims to have; few of them make the
        CTAs of a persistent kernel take several tiles; None: as many as a typical GPU of ``arch``),
        ``raise_on_report`` (True: a finding is an `EmulatorError` after its launch; False: findings are
        collected in ``session.reports``), ``resident`` (clusters that run at a time), ``check`` (False: no
        race detection, somewhat faster), ``max_steps``, ``inspector``.
    """
    from lowering.arch import check

    from . import front

    check(arch)
    session = Session(arch, seed, **settings)
    with front.entered(active, session, pretend=torch_cuda):
        _sessions.append(session)
        try:
            yield session
        finally:
            _sessions.remove(session)


def active() -> Session | None:
    """The innermost session, or None."""
    return _sessions[-1] if _sessions else None


def active_arch() -> str | None:
    """The architecture that is emulated now, or None outside `run`."""
    return _sessions[-1].arch if _sessions else None


def active_sms() -> int | None:
    """The SMs that the emulated GPU was given, by `run` or by the environment; None: as a typical GPU.

    :raises EmulatorError: where the environment's number is none.
    """
    return _sessions[-1].sms if _sessions else _from_environment().sms


def _from_environment(arch: str = "sm_90a") -> Session:
    """The session of calls outside of `run`."""
    settings = {"seed": os.environ.get("KERNELS_DSL_EMULATE_SEED"), "sms": os.environ.get(SMS_VARIABLE)}
    numbers: dict[str, Any] = {}
    for name, text in settings.items():
        if text:
            if not text.isdecimal():
                raise EmulatorError(f"KERNELS_DSL_EMULATE_{name.upper()} is {text!r}, must be a number")
            numbers[name] = int(text)
    return Session(arch, **numbers)


@dataclass
class _Loaded:
    module: ptx.Module
    host: HostFunction
    made: Any


_loaded: dict[str, _Loaded] = {}


def load(function: JitFunction, args: Sequence[Any], constants: dict[str, Any], arch: str) -> _Loaded:
    """The function compiled for the emulator: in this process, or by an earlier one."""
    from lowering.signature import key_of

    from . import kept

    parts = function.key_parts(args, constants, arch)
    key = key_of(parts)
    found = _loaded.get(key)
    if found is None:
        made = kept.made(function, args, constants, arch, parts)
        module = ptx.parse(made.ptx)
        found = _loaded[key] = _Loaded(
            module, host_function(made.ir_module, made.function_name, module), made
        )
    return found


def launch(function: JitFunction, args: Sequence[Any], constants: dict[str, Any], arch: str) -> None:
    """The emulated call: the compiled host function runs, and each of its launches is executed.

    :raises EmulatorError: for a deadlock, an unknown instruction, or (by default) any finding.
    """
    session = active() or _from_environment(arch)
    loaded = load(function, args, constants, arch)
    classes = iter(loaded.made.signature)
    values: list[list[int | float]] = []
    runtime = iter(args)
    for parameter in loaded.made.parameters:
        if parameter.is_stream:
            values.append([0])
        elif parameter.is_runtime:
            values += _leaves(next(classes), next(runtime))
    from lowering.signature import named_tensors

    named = named_tensors(function.runtime_parameters, args, by_address=True)
    session.call(loaded.module, loaded.host, values, [(f"argument {n!r}", t) for n, t in named])


def call_compiled(compiled: Any, values: Sequence[Sequence[int | float]], tensors: Mapping[str, Any]) -> None:
    """Emulate what ``cute.compile`` returned, for kernels that do not come through `lowering.jit`.

    :param compiled: compiled with ``--keep-ptx --dump-dir D``; ``--generate-line-info`` gives source lines.
    :param values: for each argument of the host function its values in order: for a tensor the address, the
        dynamic extents, the dynamic strides; for a scalar the number; for a stream 0.
    :param tensors: the CPU tensors that the kernels may touch, by name.
    :raises EmulatorError: as `launch`; also outside of `run`.
    """
    session = active()
    if session is None:
        raise EmulatorError("call_compiled runs within lowering.emulator.run(arch=...)")
    module = ptx.parse(compiled.__ptx__)
    host = host_function(compiled.ir_module, compiled.function_name, module)
    session.call(module, host, values, list(tensors.items()))


def _leaves(kind: Any, value: Any) -> list[list[int | float]]:
    """The host function's arguments for one runtime argument: none, one, or one for each item of a tuple."""
    from lowering.signature import NoneClass, ScalarClass, TupleClass

    if isinstance(kind, NoneClass):
        return []
    if isinstance(kind, TupleClass):
        return [leaf for k, v in zip(kind.items, value) for leaf in _leaves(k, v)]
    if isinstance(kind, ScalarClass):
        return [[value]]
    strides = [s for s, fixed in zip(value.stride(), kind.strides) if fixed is None]
    return [[value.data_ptr(), *value.shape, *strides]]
