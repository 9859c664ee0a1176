"""The demo on a GPU: compile at the first call, check, time against PyTorch, call again, start again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels_dsl.cli import demo_check
from kernels_dsl.cli.errors import CheckFailed
from kernels_dsl.measure import host_us, interleaved

DEVICE = "cuda"


@dataclass(frozen=True)
class Problem:
    """One GEMM of the demo: D = activation(A @ B + bias)."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    bias: bool = False
    activation: str | None = None

    def __str__(self) -> str:
        extras = " + bias" * self.bias + (f", {self.activation}" if self.activation else "")
        return f"{self.m}x{self.n}x{self.k} {self.dtype}{extras}"


PROBLEMS = (
    Problem(8192, 8192, 8192),
    Problem(4096, 4096, 4096),
    Problem(4096, 4096, 4096, dtype="float16"),
    Problem(1000, 2056, 4104, bias=True, activation="gelu"),
)

_SECOND_PROCESS = """
import json, sys, time
import torch
m, n, k, dtype = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
out = torch.mm(a, b.t())
torch.cuda.synchronize()
import kernels_dsl
gemm = kernels_dsl.gemm
start = time.perf_counter()
gemm(a, b.t(), out=out)
torch.cuda.synchronize()
print(json.dumps([(time.perf_counter() - start) * 1e3, "cutlass" in sys.modules]))
"""


def operands(problem: Problem) -> tuple[Any, Any, dict[str, Any]]:
    """a (M, K), b (K, N) as the transpose of a contiguous (N, K), and the epilogue's keyword arguments."""
    import torch

    dtype = getattr(torch, problem.dtype)
    a = demo_check.normal((problem.m, problem.k), dtype, 1, DEVICE)
    b = demo_check.normal((problem.n, problem.k), dtype, 2, DEVICE)
    epilogue: dict[str, Any] = {"activation": problem.activation} if problem.activation else {}
    if problem.bias:
        epilogue["bias"] = demo_check.normal((problem.n,), dtype, 3, DEVICE)
    return a, b.t(), epilogue


def in_pytorch(a: Any, b: Any, epilogue: dict[str, Any], out: Any) -> Callable[[], Any]:
    """The same with PyTorch's own calls: cuBLAS, and elementwise kernels where there is an epilogue."""
    import torch

    if not epilogue:
        return lambda: torch.mm(a, b, out=out)
    return lambda: demo_check.product(a, b, **epilogue)


def one(problem: Problem) -> float:
    """First call, check, second call, timing of one problem; the ratio to PyTorch (above 1: faster)."""
    import torch

    import kernels_dsl
    from lowering import cache

    a, b, epilogue = operands(problem)
    out = torch.full((problem.m, problem.n), float("nan"), dtype=a.dtype, device=DEVICE)
    torch.cuda.synchronize()
    before = cache.stats()["compiles"]
    start = time.perf_counter()
    kernels_dsl.gemm(a, b, out=out, **epilogue)
    torch.cuda.synchronize()
    first_ms = (time.perf_counter() - start) * 1e3
    compiled = int(cache.stats()["compiles"]) - int(before)
    accuracy = demo_check.close(out, a, b, epilogue, str(problem))

    start = time.perf_counter()
    kernels_dsl.gemm(a, b, out=out, **epilogue)
    torch.cuda.synchronize()
    second_ms = (time.perf_counter() - start) * 1e3
    if int(cache.stats()["compiles"]) - int(before) != compiled:
        raise CheckFailed(f"{problem}: the second call compiled again")

    peer = in_pytorch(a, b, epilogue, torch.empty_like(out))
    calls = {"ours": lambda _set: kernels_dsl.gemm(a, b, out=out, **epilogue), "torch": lambda _set: peer()}
    timings = interleaved(calls)
    rates = {
        name: 2.0 * problem.m * problem.n * problem.k / timing.ms / 1e9 for name, timing in timings.items()
    }
    ratio = timings["torch"].ms / timings["ours"].ms
    origin = f"{compiled} compiled" if compiled else "found in the cache, nothing compiled"
    print(f"\n{problem}")
    print(f"  first call {first_ms:.1f} ms ({origin}); second call {second_ms:.2f} ms, nothing compiled")
    print(f"  right: {accuracy}")
    print(
        f"  {timings['ours'].ms:.4f} ms, {rates['ours']:.0f} TFLOPS; "
        f"PyTorch {timings['torch'].ms:.4f} ms, {rates['torch']:.0f} TFLOPS; ratio {ratio:.3f}"
    )
    return ratio


def second_process(problem: Problem) -> None:
    """The first call of a new process that may not compile."""
    command = [
        sys.executable,
        "-c",
        _SECOND_PROCESS,
        *map(str, (problem.m, problem.n, problem.k, problem.dtype)),
    ]
    environment = {**os.environ, "KERNELS_DSL_NO_COMPILE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise CheckFailed(f"a second process could not run {problem}:\n{done.stderr.strip()[-2000:]}")
    milliseconds, imported = json.loads(done.stdout.splitlines()[-1])
    compiler = "the compiler was imported" if imported else "the compiler was not imported"
    print(
        f"\nA second process, compiling forbidden: first call of {problem} "
        f"in {milliseconds:.1f} ms; {compiler}."
    )


def host_time() -> None:
    """Host time of an eager call, beside torch.mm's."""
    import torch

    import kernels_dsl

    a, b = (torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    ours = host_us(lambda: kernels_dsl.gemm(a, b, out=out))
    peer = host_us(lambda: torch.mm(a, b, out=out))
    print(f"\nHost time of a call: {ours:.1f} us (torch.mm {peer:.1f} us).")


def run() -> None:
    """The whole demo on the current GPU; CheckFailed where something does not hold."""
    from lowering import arch, cache

    device = arch.device(0)
    print(f"{device.name} ({device.arch}, {device.sm_count} SMs); kernel cache: {cache.dir()}")
    ratios = [one(problem) for problem in PROBLEMS]
    second_process(PROBLEMS[0])
    host_time()
    print(
        f"\nAll {len(ratios)} results are within tolerance of float64. "
        "Ratio to PyTorch, same run, taking turns: "
        + ", ".join(f"{ratio:.3f}" for ratio in ratios)
        + " (above 1: faster)."
    )
