"""Configurations that `gemm_small --sweep` measures, and their kernels, compiled beside the measurement."""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from benchmarks.gemm_small_calls import Problem, operands, our_call
from kernels_dsl.aot.recorded import Kernel, kernel_of, recorded
from kernels_dsl.config.gemm import GemmConfig, Schedule, Sm90GemmConfig
from kernels_dsl.ops.gemm.decide import THIN_M

ARCH = "sm_90a"
_kernels: list[Kernel] = []  # worker processes are forks, which have it


def _ways(config: Sm90GemmConfig, splits: tuple[int, ...]) -> Iterator[Sm90GemmConfig]:
    """A tile whole, cut into even shares, shared by clusters, and split along K; with the larger operand
    fetched early, and beside the kernel before."""
    early = replace(config, l2_prefetch=True)
    yield early
    yield replace(early, overlap=True)
    yield replace(early, stream_k=True)
    yield replace(early, cluster_k=2)
    yield replace(early, cluster_k=2, overlap=True)
    yield from (replace(early, split_k=split) for split in splits)


def _columns(m: int) -> int:
    """The least N of a tile that has all rows of x: a multiple of 16."""
    return -(-m // 16) * 16


def configurations(problem: Problem) -> Iterator[Sm90GemmConfig]:
    """Those worth a try: weights along the tile's M, of 64 or 128 rows, and all rows of x along its N.

    The table has none of them for more than 32 rows, where tiles of x are 64 rows or more.
    """
    m = problem.m
    turned, columns = m > THIN_M, _columns(m)
    promoted = problem.kind not in ("bf16", "tensor-fast")
    small = Sm90GemmConfig(64, columns, turned=turned)
    if columns <= 128:
        yield from _ways(small, (2, 4) if columns <= 64 else (2,))
    yield from _ways(replace(small, tile_m=128), (2, 4) if columns > 64 else ())
    if m <= THIN_M:
        yield small  # what L2's early start is worth
        yield replace(small, stream_k=True)
        return
    halves = replace(small, tile_n=_columns(-(-m // 2)), cluster_n=2, l2_prefetch=True)
    if m > 64:
        yield from (replace(halves, tile_m=rows) for rows in (64, 128, 192))
    yield replace(small, tile_m=128, cluster_k=4, l2_prefetch=True)
    yield replace(small, tile_m=128, cluster_m=2, l2_prefetch=True)
    yield replace(small, tile_m=64 if columns <= 128 else 128, cluster_m=2, stream_k=True, l2_prefetch=True)
    if columns > 64:
        yield replace(small, tile_m=192, l2_prefetch=True)
        yield replace(small, tile_m=192, l2_prefetch=True, stream_k=True)
    if 64 < m <= 128:
        yield Sm90GemmConfig(128, 64, cluster_n=2, l2_prefetch=True)
        yield Sm90GemmConfig(128, 64, l2_prefetch=True)
        yield Sm90GemmConfig(64, 128, cluster_m=2, l2_prefetch=True)
        if not promoted:
            yield Sm90GemmConfig(128, 128, schedule=Schedule.COOPERATIVE, l2_prefetch=True)


def fitting(problem: Problem, configs: Iterable[Sm90GemmConfig]) -> list[Sm90GemmConfig]:
    """Those that can compute the problem, found without a GPU; first the table's with an early start."""
    table = recorded(ARCH, _on_cpu(problem, None))[0].constants["config"]
    found: list[Sm90GemmConfig] = []
    for config in (replace(table, l2_prefetch=True), *configs):
        if config in found:
            continue
        try:
            recorded(ARCH, _on_cpu(problem, config))
        except ValueError:
            continue
        found.append(config)
    return found


def _on_cpu(problem: Problem, config: GemmConfig | None) -> Callable[[], object]:
    import torch

    sets = operands(problem, None)
    out = torch.empty(problem.m, problem.n, dtype=torch.bfloat16)
    call = our_call(problem, sets, out, config)
    return lambda: call(0)


def _compile(index: int) -> str | None:
    logging.getLogger("lowering").setLevel(logging.ERROR)
    kernel = _kernels[index]
    try:
        kernel.function.compile(*kernel.args, arch=ARCH, **kernel.constants)
    except Exception as problem:
        return f"{kernel.name}: {type(problem).__name__}: {problem}"
    return None


class Compiling:
    """The kernels of many calls, compiled into the cache by a process a core while others are measured.

    To be made before anything touches the GPU: the processes are forks.
    """

    def __init__(self, calls: Iterable[tuple[Problem, GemmConfig | None]]) -> None:
        found: dict[str, Kernel] = {}
        self._needed: dict[Problem, set[str]] = {}
        for problem, config in calls:
            for launch in recorded(ARCH, _on_cpu(problem, config)):
                key = launch.function.key(*launch.args, arch=ARCH, **launch.constants)
                found.setdefault(key, kernel_of(f"{launch.function.name} {problem.name} {config}", launch))
                self._needed.setdefault(problem, set()).add(key)
        _kernels[:] = found.values()
        workers = max(1, min(len(_kernels), len(os.sched_getaffinity(0))))
        self._pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
        self._futures = {key: self._pool.submit(_compile, i) for i, key in enumerate(found)}
        self.words = f"{len(found)} kernels, compiled by {workers} processes"

    def wait(self, problem: Problem) -> list[str]:
        """Returns when the kernels of a problem are there; what failed, in words."""
        failed = []
        for key in self._needed[problem]:
            try:
                text = self._futures[key].result()
            except concurrent.futures.process.BrokenProcessPool as reason:
                text = str(reason)
            if text is not None:
                failed.append(text)
        return failed

    def stop(self) -> None:
        """Gives up what is not compiled yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)
