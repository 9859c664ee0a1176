"""The compiled kernels behind `gemm`, by family, named only: the compiler is imported when it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import lowering
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops.launch import launcher_of
from kernels_dsl.ops.target import Target

_FOLDER = "kernels_dsl.kernels.gemm"
FUNCTIONS = {
    "sm90": lowering.jit(f"{_FOLDER}.entry_sm90:gemm_sm90_entry", name="gemm_sm90"),
    "sm80": lowering.jit(f"{_FOLDER}.entry_sm80:gemm_sm80_entry", name="gemm_sm80"),
    "splitk_reduce": lowering.jit(f"{_FOLDER}.entry_splitk:splitk_reduce_entry", name="splitk_reduce"),
    "gate_gradient": lowering.jit(f"{_FOLDER}.gate_gradient:gate_gradient", name="gate_gradient"),
    "reduce_parts": lowering.jit(f"{_FOLDER}.entry_parts:reduce_parts_entry", name="reduce_parts"),
}


@lru_cache(maxsize=256)
def _resident_clusters(kernel: lowering.CompiledKernel, cluster: tuple[int, int, int], device: int) -> int:
    from lowering.loaded import LoadedCubin

    (facts,) = kernel.launches
    with LoadedCubin(kernel.cubin(), device) as cubin:
        threads = math.prod(extent or 1 for extent in facts.block)
        return cubin.resident_clusters(facts.entry, cluster, threads, facts.dynamic_smem or 0)


def resident_ctas(kernel: lowering.CompiledKernel | None, config: GemmConfig, target: Target) -> int:
    """CTAs of a persistent kernel that run at one time: one an SM, fewer where clusters do not fill the GPU.

    A cluster lives in one part of the chip (a GPC). Those of an H200 have 16 or 18 SMs, so clusters of two
    fill it and clusters of four do not; one that does not fit would start when all others have ended.
    """
    count = target.device.sm_count
    if kernel is None or config.cluster_ctas <= 2:
        return count
    cluster = (config.cluster_m, config.cluster_n, config.cluster_k)
    return min(count, _resident_clusters(kernel, cluster, target.index) * math.prod(cluster))


def launcher(
    name: str, target: Target, args: tuple[Any, ...], constexprs: dict[str, Any]
) -> tuple[Callable[..., Any], lowering.CompiledKernel | None]:
    """The callable that launches kernel `name` on runtime arguments like `args`, compiled if need be.

    `name` is a key of `FUNCTIONS`. On a GPU this is the bare launch, without the key look-up of the lowering
    layer: the caller keeps it for calls of the same signature. Under the emulator it is the emulated call.
    The second value is the compiled kernel, None under the emulator.
    """
    return launcher_of(FUNCTIONS[name], target, args, constexprs)
