"""Runs compiled CuTe DSL kernels on the CPU, from their PTX, with asynchrony modelled and races reported.

::

    from lowering import emulator

    with emulator.run(arch="sm_90a", seed=1) as session:
        my_jit_function(cpu_a, cpu_b, cpu_d, config=config)
    print(session.timeline)

The PTX is what the compiler made for the GPU, and the launch is what the compiled host function makes. It
serves correctness, never speed. ``docs/how_the_emulator_works.md`` says what is modelled.
"""

from .inspect import Inspector, Stop
from .reports import EmulatorError, Kind, Place, Report, Severity, SourceLine
from .session import Session, active, active_arch, active_sms, call_compiled, launch, run
from .timeline import Event, Timeline, draw_plot, draw_text

__all__ = [
    "EmulatorError", "Event", "Inspector", "Kind", "Place", "Report", "Session", "Severity", "SourceLine",
    "Stop", "Timeline", "active", "active_arch", "active_sms", "call_compiled", "draw_plot", "draw_text",
    "launch", "run",
]  # fmt: skip
