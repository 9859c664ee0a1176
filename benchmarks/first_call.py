"""Time of the first call in a new process: cold (compiles) and warm (the kernel is on disk).

Each measurement is a process of its own. The CUDA context and torch's own start-up are brought up first, so
that what is left is this project's share: the import of `kernels_dsl` and the first `gemm`, GPU included. The
packages have their byte code, as pip leaves them: an unpacked archive without it costs the first process two
seconds more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.harness import DTYPES

_CHILD = """
import json, sys, time
import torch
kind = getattr(torch, sys.argv[1])
a, b = (torch.randn(1024, 1024, device="cuda", dtype=kind) for _ in range(2))
out = torch.empty(1024, 1024, device="cuda", dtype=kind)
torch.mm(a, b, out=out)
torch.cuda.synchronize()
start = time.perf_counter()
import kernels_dsl
kernels_dsl.gemm
imported = time.perf_counter()
kernels_dsl.gemm(a, b, out=out)
torch.cuda.synchronize()
first = time.perf_counter()
kernels_dsl.gemm(a, b, out=out)
torch.cuda.synchronize()
second = time.perf_counter()
print(json.dumps({
    "import_ms": (imported - start) * 1e3,
    "first_ms": (first - imported) * 1e3,
    "second_ms": (second - first) * 1e3,
    "compiler_imported": "cutlass" in sys.modules,
}))
"""
WARM_RUNS = 3


def compile_packages() -> None:
    """Byte code for the DSL's package, which pip writes when it installs one. Quick where it is there."""
    spec = importlib.util.find_spec("cutlass")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", *folders], check=False)


def child(dtype: str, cache: str, refuse_compile: bool = False) -> dict[str, Any]:
    """Run one process with the cache folder `cache`; times in milliseconds. RuntimeError where it fails."""
    environment = {**os.environ, "KERNELS_DSL_CACHE_DIR": cache}
    if refuse_compile:
        environment["KERNELS_DSL_NO_COMPILE"] = "1"
    command = [sys.executable, "-c", _CHILD, DTYPES[dtype]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the first-call process failed:\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(dtype: str) -> list[dict[str, Any]]:
    """One cold process in an empty cache, then WARM_RUNS warm ones that may not compile."""
    compile_packages()
    with tempfile.TemporaryDirectory() as cache:
        rows = [{"name": "cold", **child(dtype, cache)}]
        for i in range(WARM_RUNS):
            rows.append({"name": f"warm {i + 1}", **child(dtype, cache, refuse_compile=True)})
    return rows


def line(row: dict[str, Any]) -> str:
    """One process for the terminal."""
    compiler = "compiler imported" if row["compiler_imported"] else "no compiler imported"
    return (
        f"{row['name']:>8}  import {row['import_ms']:7.1f} ms  first call {row['first_ms']:7.1f} ms  "
        f"second {row['second_ms']:6.2f} ms  {compiler}"
    )
