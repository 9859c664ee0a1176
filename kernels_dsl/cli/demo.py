"""`demo`: with a GPU compile, run, check and time; without one compile the same kernels and show them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

from kernels_dsl.cli import demo_check, kernels
from kernels_dsl.cli.errors import CheckFailed

ARCHS = ("sm_90a", "sm_89")
DEFAULT_KERNELS = 3
# Six K tiles go round a ring of three stages; M and N fit no tile, so that the edges are run too.
EMULATED_SHAPE = (80, 72, 384)
EMULATED_STAGES = 3


def add_command(commands: Any) -> None:
    """Add `demo` to the parser."""
    parser = commands.add_parser("demo", help="the main job, from start to end", description=__doc__)
    parser.add_argument("--compile-only", action="store_true", help="as on a machine without a GPU")
    parser.add_argument(
        "--kernels",
        type=int,
        default=DEFAULT_KERNELS,
        help="without a GPU: how many for each arch (%(default)s)",
    )
    parser.add_argument("--no-emulator", action="store_true", help="without a GPU: do not run the emulator")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the part that fits this machine; CheckFailed where anything that it shows does not hold."""
    from lowering import arch

    if arch.device_count() and not args.compile_only:
        from kernels_dsl.cli import demo_gpu

        demo_gpu.run()
        return 0
    print("No GPU is used: kernels are compiled and looked at; none is run on a GPU, nothing is timed.")
    for name in ARCHS:
        compile_and_show(name, args.kernels)
    for name in ARCHS:
        second_process(name, args.kernels)
    if args.no_emulator:
        print("\nEmulator: not run (--no-emulator).")
    else:
        emulate()
    print("\nNot done here, for lack of a GPU: running on a GPU, speed, comparison with cuBLAS.")
    return 0


def compile_and_show(arch: str, count: int) -> None:
    """Compile `count` kernels for `arch`, show each, show that a second lookup compiles nothing."""
    chosen = kernels.spread(kernels.shipped(arch), count)
    print(f"\n{arch}: {len(chosen)} of its kernels")
    for kernel in chosen:
        compiled = kernel.compile(arch)
        print(f"  {kernel.name}: {kernels.origin(compiled)}")
        for line in kernels.report_lines(compiled):
            print(f"    {line}")
        if kernels.spilling(compiled):
            raise CheckFailed(f"{kernel.name} spills registers on {arch}")
        start = time.perf_counter()
        again = kernel.compile(arch)
        milliseconds = (time.perf_counter() - start) * 1e3
        if again.source != "memory":
            raise CheckFailed(
                f"a second lookup of {kernel.name} was not served from memory but: {again.source}"
            )
    print(f"  a second lookup in this process: from memory, {milliseconds:.2f} ms, no compile")


_LOOKUP = """
import sys, time
from kernels_dsl.cli import demo_check, kernels
chosen = kernels.spread(kernels.shipped(sys.argv[1]), int(sys.argv[2]))
start = time.perf_counter()
sources = {kernel.compile(sys.argv[1]).source for kernel in chosen}
print(" ".join(sorted(sources)), (time.perf_counter() - start) / len(chosen) * 1e3, "cutlass" in sys.modules)
"""


def second_process(arch: str, count: int) -> None:
    """Look the same kernels up in a new process that may not compile."""
    environment = {**os.environ, "KERNELS_DSL_NO_COMPILE": "1"}
    command = [sys.executable, "-c", _LOOKUP, arch, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise CheckFailed(
            f"a second process did not find the kernels for {arch}:\n{done.stderr.strip()[-2000:]}"
        )
    source, milliseconds, imported = done.stdout.split()
    compiler = "the compiler was imported" if imported == "True" else "the compiler was not imported"
    print(
        f"\n{arch}, a second process, compiling forbidden: "
        f"from {source}, {float(milliseconds):.1f} ms each; {compiler}"
    )


def emulate() -> None:
    """Run a small GEMM of each family in the emulator, check it bit for bit, show the Hopper timeline."""
    from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig

    stages = EMULATED_STAGES
    session = emulate_one(ARCHS[0], Sm90GemmConfig(64, 64, stages=stages))
    print("  one of its CTAs (L: TMA load, W: WGMMA, S: TMA store, |: a barrier changes phase, .: waiting):")
    print(session.timeline)
    emulate_one(ARCHS[1], Sm80GemmConfig(64, 64, 64, stages, warps_m=2, warps_n=2))


def emulate_one(arch: str, config: Any) -> Any:
    """Run and check one GEMM emulated for `arch`; CheckFailed where it is wrong. Returns the session."""
    import torch

    import kernels_dsl
    from lowering import emulator

    m, n, k = EMULATED_SHAPE
    a = demo_check.integers((m, k), torch.bfloat16, seed=1)
    b = demo_check.integers((k, n), torch.bfloat16, seed=2)
    print(f"\nEmulator: gemm {m}x{n}x{k}, bf16, the PTX compiled for {arch} executed on this CPU")
    start = time.perf_counter()
    try:
        with emulator.run(arch=arch) as session:
            d = kernels_dsl.gemm(a, b, config=config)
    except emulator.EmulatorError as error:
        raise CheckFailed(str(error)) from error
    demo_check.exact(d, a, b, f"emulated gemm, {arch}")
    seconds = time.perf_counter() - start
    print(f"  equal to the float64 reference, bit for bit; {seconds:.1f} s, compile included")
    print(f"  no race, no wrong barrier, no access out of bounds was found in {session.steps} steps")
    return session
