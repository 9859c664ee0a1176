"""Runs captured launches: one place that puts parser, memory and machine together."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from . import copies, cp_async, fast, fragments, loads, matrix, products, remote, sync, tensormaps, warp_ops
from .global_shadow import GlobalShadow
from .machine import Machine
from .memory import GlobalMemory
from .program import Handlers
from .ptx import Module
from .reports import EmulatorError, Kind, PtxError, ReportLog
from .reports import Report as Report
from .state import Launch
from .stats import Stats
from .timeline import Timeline

HANDLERS = {
    **loads.HANDLERS,
    **remote.HANDLERS,
    **tensormaps.HANDLERS,
    **warp_ops.HANDLERS,
    **sync.HANDLERS,
    **copies.HANDLERS,
    **cp_async.HANDLERS,
    **matrix.HANDLERS,
    **fragments.HANDLERS,
}


def _place(module: Module, kernel: str, machine: Machine | None, error: Exception) -> tuple[str, Report]:
    """The kernel and the instruction that was read or executed: in words, and as a report to fill in."""
    warp, ins = machine.at if machine is not None else (None, None)
    ins = getattr(error, "ins", None) or (machine and machine.program.executed(error)) or ins
    if ins is None:
        return f"kernel {kernel}", Report(Kind.UNKNOWN_OPCODE, str(error), kernel)
    number, line, _ = ins.source
    source = f"{module.files[number]}:{line}" if number in module.files else ""
    who = f", {warp.name}" if warp is not None else ", asynchronously" if machine is not None else ""
    text = f"kernel {kernel}, PTX line {ins.line}{', ' + source if source else ''}{who}, at {ins.text!r}"
    report = Report(Kind.UNKNOWN_OPCODE, str(error), kernel, ins.line, ins.text, source)
    return text, report


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Collect cycles seldom in this block, and not what was there before it again and again."""
    if gc.get_freeze_count():  # it is within another one
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(thresholds[0], 50_000) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _runner(machine: Machine) -> Any:
    """The runner of steps in compiled code; None without it."""
    if fast.kernels() is None:
        return None
    from .interpreted import Runner

    return Runner(machine)


def execute(
    module: Module,
    launch: Launch,
    memory: GlobalMemory,
    log: ReportLog,
    *,
    seed: int = 0,
    sms: int = 132,
    resident: int = 8,
    timeline: Timeline | None = None,
    stats: Stats | None = None,
    check: bool = True,
    watch: Any = None,
    max_steps: int | None = 50_000_000,
    first_step: int = 0,
    before: GlobalShadow | None = None,
    started: Callable[[Machine], None] | None = None,
) -> Machine:
    """Execute one launch to its end. Findings go to ``log``; ``before``: accesses of the launch before.

    ``started`` is given the machine before its first step.

    Raises :class:`EmulatorError` where execution cannot go on (deadlock, trap, an instruction that is not
    known, a launch that the hardware would refuse).
    """
    kernel = module.kernels.get(launch.kernel)
    if kernel is None:
        raise EmulatorError(f"the PTX has no kernel {launch.kernel!r}; it has {sorted(module.kernels)}")
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if threads > (kernel.max_threads or 1024) or threads == 0:
        raise EmulatorError(
            f"kernel {kernel.name}: a block of {threads} threads; it was compiled for "
            f"{kernel.max_threads or 1024}"
        )
    machine: Machine | None = None
    try:
        machine = Machine(
            kernel,
            launch,
            memory,
            log,
            files=module.files,
            seed=seed,
            sms=sms,
            resident=resident,
            handlers=Handlers(HANDLERS, products.handler_of),
            timeline=timeline,
            stats=stats,
            check=check,
            watch=watch,
            max_steps=max_steps,
            before=before,
            runner=_runner,
        )
        machine.step = first_step
        if started is not None:
            started(machine)
        with _few_collections():
            machine.run()
    except PtxError as error:
        place, report = _place(module, kernel.name, machine, error)
        log.add(report)
        raise EmulatorError(f"{place}: {error}", tuple(log.reports)) from error.__cause__
    except EmulatorError as error:
        if error.reports and f"kernel {kernel.name}" in str(error):
            raise  # a finding, which has its place
        place, _ = _place(module, kernel.name, machine, error)
        raise EmulatorError(f"{place}: {error}", error.reports) from None
    except Exception as error:
        if watch is not None and machine is not None and machine.at[1] is None:
            raise  # of the inspector, which is the user's
        place, _ = _place(module, kernel.name, machine, error)
        text = f"{place}: the emulator failed: {type(error).__name__}: {error}"
        raise EmulatorError(text, tuple(log.reports)) from error
    finally:
        if stats is not None:
            if machine is not None and machine.runner is not None:
                machine.runner.count(stats)
            stats.finish(module.files)
    return machine
