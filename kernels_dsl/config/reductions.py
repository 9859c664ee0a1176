"""Parts of a line whose partial reductions the GEMM kernels write: plain arithmetic on the host."""

from __future__ import annotations

from kernels_dsl.config.gemm import SPLIT_REDUCTION_TILE, GemmConfig, Sm80GemmConfig
from kernels_dsl.config.problem import GemmProblem
from lowering.records import frozen


@frozen
class CallReduction:
    """A reduction of a result: a name of `REDUCTIONS`, and the mode that goes, -1 or -2."""

    name: str
    dim: int


CHUNK = 256
"""Parts that one CTA of the second kernel combines."""
_WARP_ROWS = 16
"""Rows of a WGMMA accumulator that a warp has."""


def parts(config: GemmConfig, problem: GemmProblem, over: str) -> int:
    """Parts of a line of `problem`, as the kernel sees it, that is reduced over its mode `over`."""
    extent = problem.n if over == "n" else problem.m
    return -(-extent // _extent(config, problem, over))


def _extent(config: GemmConfig, problem: GemmProblem, over: str) -> int:
    """Elements of a part."""
    if config.split_k > 1:
        return SPLIT_REDUCTION_TILE
    if over == "n":
        return config.tile_n
    if isinstance(config, Sm80GemmConfig):
        return 16 * config.warps_m * config.staging_slabs(problem.ab_bytes)
    return _WARP_ROWS
