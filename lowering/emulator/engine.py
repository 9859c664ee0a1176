"""Runs captured launches: one place that puts parser, memory and machine together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import copies, cp_async, loads, matrix, remote, sync, tensormaps, warp_ops
from .global_shadow import GlobalShadow
from .machine import Machine
from .memory import GlobalMemory
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
}


def _place(kernel: str, machine: Machine | None) -> str:
    """The kernel and the instruction that was executed, in words."""
    warp, ins = machine.at if machine is not None else (None, None)
    if machine is None or ins is None:
        return f"kernel {kernel}"
    source = machine.source(ins)
    who = f", {warp.name}" if warp is not None else ", asynchronously"
    return f"kernel {kernel}, PTX line {ins.line}{', ' + source if source else ''}{who}, at {ins.text!r}"


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
            handlers=HANDLERS,
            timeline=timeline,
            stats=stats,
            check=check,
            watch=watch,
            max_steps=max_steps,
            before=before,
        )
        machine.step = first_step
        if started is not None:
            started(machine)
        machine.run()
    except PtxError as error:
        log.add(Report(Kind.UNKNOWN_OPCODE, str(error), kernel.name))
        raise EmulatorError(f"kernel {kernel.name}: {error}", tuple(log.reports)) from None
    except EmulatorError as error:
        if kernel.name in str(error):
            raise
        raise EmulatorError(f"{_place(kernel.name, machine)}: {error}", error.reports) from None
    except Exception as error:
        if machine is not None and machine.at[1] is None:
            raise
        text = f"{_place(kernel.name, machine)}: the emulator failed: {type(error).__name__}: {error}"
        raise EmulatorError(text, tuple(log.reports)) from error
    finally:
        if stats is not None:
            stats.finish(module.files)
    return machine
