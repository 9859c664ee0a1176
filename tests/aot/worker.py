"""Run the common calls on a GPU in a process that may not compile, and compare them with float64.

    KERNELS_DSL_NO_COMPILE=1 KERNELS_DSL_BUNDLES=kernels.zip KERNELS_DSL_CACHE_DIR=EMPTY \
        python -m tests.aot.worker [--seconds 120] [--match TEXT]

The exit status is 1 where a call had no kernel or a wrong result. Without the bundle each call would be
refused, so that one which runs had its kernels from there.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

import lowering
from kernels_dsl.aot.calls.call import BF16, Call, Source
from kernels_dsl.aot.common import common_calls
from lowering.arch import arch_of_device
from tests.aot import references


class Values(Source):
    """Makes random tensors on a device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def values(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """Of the normal distribution; fp8 ones rounded. fp16 matrices are smaller: a gate multiplies two sums
        of many products, and the result must be below 65504."""
        narrow = dtype.itemsize == 1
        made = torch.randn(shape, dtype=BF16 if narrow else dtype, device=self.device)
        if dtype is torch.float16 and len(shape) == 2:
            made /= 4
        return made.to(dtype) if narrow else made

    def factors(self, *shape: int) -> torch.Tensor:
        """From 0.5 to 1.5."""
        return torch.rand(shape, device=self.device) + 0.5

    def scores(self, *shape: int) -> torch.Tensor:
        """Of the normal distribution."""
        return torch.randn(shape, device=self.device)


def run_calls(calls: Iterable[Call], source: Source, seconds: float) -> int:
    """Run and compare calls until the time is over; says what failed. Returns the number of failures."""
    end, failed = time.monotonic() + seconds, 0
    worst: dict[str, float] = {}
    times: list[float] = []
    for left, call in enumerate(calls):
        if time.monotonic() > end:
            print(f"stopped after {seconds:.0f} s and {left} calls")
            break
        try:
            error = _error(call._replace(operation=_timed(call.operation, times)), source)
            worst[call.name] = max(worst.get(call.name, 0.0), error)
        except Exception as problem:  # of any call: the others go on
            failed += 1
            print(f"FAILED {call.label}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            if isinstance(problem, torch.AcceleratorError):
                raise  # nothing runs after it
    for name, error in worst.items():
        print(f"{name}: largest relative error {error:.2g}")
    if times:
        shown = [times[0], statistics.median(times), max(times)]
        text = "ms of a call till the GPU is done, not of gradients: first {:.1f}, median {:.1f}, most {:.1f}"
        print(text.format(*shown))
    print(f"{len(times)} calls ran, {failed} failed")
    return failed


def _error(call: Call, source: Source) -> float:
    """Of a call's results, which are freed before the next one's are made."""
    return references.check(call, call.run(source))


def _timed(operation: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """The operation; its milliseconds are added to `times`."""

    def run(**arguments: Any) -> Any:
        _wait()
        start = time.perf_counter()
        result = operation(**arguments)
        _wait()
        times.append((time.perf_counter() - start) * 1e3)
        return result

    return run


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="to stop after (%(default)s)")
    parser.add_argument("--match", default="", help="only calls whose name contains this")
    options = parser.parse_args()
    if not os.environ.get("KERNELS_DSL_NO_COMPILE") or not os.environ.get("KERNELS_DSL_BUNDLES"):
        parser.error("KERNELS_DSL_NO_COMPILE and KERNELS_DSL_BUNDLES must be set")
    torch.manual_seed(0)
    arch = arch_of_device(0)
    calls = [call for call in common_calls(arch) if options.match in call.label]
    random.Random(0).shuffle(calls)  # those that are left out for want of time are of each operation
    print(f"{len(calls)} calls on {torch.cuda.get_device_name(0)}, {arch}", flush=True)
    failed = run_calls(calls, Values("cuda"), options.seconds)
    print(lowering.cache.stats(), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
