"""Ranks of a gloo group: processes that one parent forks, after it has compiled what they run.

`run_ranks("module:function", …)` runs `function(rank)` in each, the functions one after the other in ranks of
their own. `prepare_function()` of the module, where there is one, runs in the parent first.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GROUP_TIMEOUT_S = 60


class Rank(NamedTuple):
    """A rank of a group, in its own process."""

    rank: int
    size: int


def run_ranks(*functions: str, size: int = 2, timeout: float = 240, arch: str = "sm_80") -> None:
    """Runs each "module:function" in ranks of its own. AssertionError with what they printed where one fails.

    timeout: of each, in seconds. arch: of the emulated GPU.
    """
    command = [sys.executable, "-m", "tests.distributed.ranks", str(size), str(timeout), *functions]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KERNELS_DSL_EMULATE": arch}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def _in_rank(function: str, rank: Rank, store: str) -> None:
    import torch.distributed as dist

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, rank.size), rank=rank.rank, world_size=rank.size, timeout=timeout
    )
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(rank)
    dist.destroy_process_group()


def _fork(function: str, rank: Rank, store: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _in_rank(function, rank, store)
        code = 0
    except BaseException:
        print(f"rank {rank.rank}:", file=sys.stderr)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _join(children: list[int], deadline: float) -> int:
    """0 where all ended well. Past the deadline those that still run are killed."""
    failed, waiting = 0, list(children)
    while waiting:
        for child in list(waiting):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                waiting.remove(child)
                failed |= status != 0
        if time.monotonic() > deadline and waiting:
            print(f"{len(waiting)} ranks did not end", file=sys.stderr)
            for child in waiting:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return 1
        time.sleep(0.01)
    return failed


def _run(function: str, size: int, timeout: float) -> int:
    """1 where a rank of the function fails."""
    place, _, name = function.partition(":")
    getattr(importlib.import_module(place), f"prepare_{name}", lambda: None)()
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(function, Rank(n, size), os.path.join(folder, "store")) for n in range(size)]
        failed = _join(children, deadline)
    if failed:
        print(f"{function} failed", file=sys.stderr)
    return failed


def main() -> int:
    """Runs the functions of the command line."""
    import torch

    torch.set_num_threads(1)
    size, timeout, *functions = sys.argv[1:]
    return int(sum(_run(function, int(size), float(timeout)) for function in functions) > 0)


if __name__ == "__main__":
    sys.exit(main())
