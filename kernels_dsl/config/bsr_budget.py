"""Reasons why a block-sparse configuration does not fit: shared memory, registers, the block, the operands.

The counterpart of `budget` for the kernels over lists of kept blocks.
"""

from __future__ import annotations

from kernels_dsl.config import budget, wgmma
from kernels_dsl.config.bsr import BsrProblem, Sm90BsrConfig, stores_by_tma
from kernels_dsl.config.bsr_tiles import ROW, STAGE_K
from kernels_dsl.config.bsr_together import problem_together, why_not_together
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig
from kernels_dsl.config.problem import ELEMENT_BYTES, Device, GemmProblem

TILE_ROWS = (64, 128, 192, 256, 384, 512)
"""Of a tile on WGMMA's M: those above 256 are for blocks with few columns."""
MOST_N = 256
"""Of one WGMMA."""
MMA_K_BYTES = 32
"""Bytes of K in a matrix instruction."""
MOST_STAGES = 12
"""Of the ring: its mbarriers and the queue of items share 1 KB."""
MOST_UNIT_K = 256
"""Elements of K in a load: a box of TMA has no more."""
LANES = 32
"""Entries of a list that the lanes of a warp hold: blocks that share a stage divide them."""


def fitted(config: Sm90BsrConfig | Sm80GemmConfig, problem: BsrProblem) -> Sm90BsrConfig | Sm80GemmConfig:
    """`config`, with TMA stores switched off where D's alignment forbids them."""
    if config.epi_tma and not stores_by_tma(problem):
        return config.with_plain_stores()
    return config


def why_not(config: Sm90BsrConfig | Sm80GemmConfig, problem: BsrProblem, device: Device) -> str | None:
    """Says why `config` cannot compute `problem` on `device`; None if it can."""
    if config.family not in device.families():
        return f"the {config.family} kernels do not run on {device.name}"
    if isinstance(config, Sm80GemmConfig):
        return _why_not_sm80(config, problem, device)
    reason = why_not_together(config, problem)
    if reason is not None:
        return reason
    problem = problem_together(problem, config.rows_together)
    return (
        budget.not_positive(config, zero=("stages", "kept_stages"))
        or _why_not_tile(config, problem)
        or _why_not_cluster(config, problem)
        or _why_not_stages(config, problem)
        or _why_not_deep_boxes(config, problem)
        or _why_not_registers(config, problem)
        or _why_not_smem(config, problem, device)
    )


def consumers(config: Sm90BsrConfig) -> int:
    """Consumer warpgroups of a CTA."""
    m, n = config.tile
    if config.schedule is Schedule.PINGPONG or n > MOST_N:
        return 2
    return {64: 1, 128: 2, 192: 3}.get(m, 2)


def _why_not_tile(config: Sm90BsrConfig, problem: BsrProblem) -> str | None:
    m, n = config.tile
    on_m, on_n = ("tile_s", "tile_x") if config.sparse_on_m else ("tile_x", "tile_s")
    pingpong = config.schedule is Schedule.PINGPONG
    if m not in TILE_ROWS:
        return f"{on_m} is {m}, must be one of {TILE_ROWS}: it lies on WGMMA's M"
    shared = m == 64 and not pingpong and problem.dtype != "fp8"
    if n % 16 or not 16 <= n <= (2 * MOST_N if shared else MOST_N):
        return (
            f"{on_n} is {n}, must be a multiple of 16 up to {MOST_N}: it lies on WGMMA's N; or up to "
            f"{2 * MOST_N} with {on_m} 64, cooperative, in 16 bits"
        )
    if n > MOST_N and n % 32:
        return f"{on_n} is {n}, must be a multiple of 32 above {MOST_N}: two warpgroups share it"
    if problem.block_mn % (config.tile_s * config.cluster_s):
        return (
            f"tile_s * cluster_s is {config.tile_s * config.cluster_s}, must divide the block's "
            f"{problem.block_mn}"
        )
    return None


def _why_not_cluster(config: Sm90BsrConfig, problem: BsrProblem) -> str | None:
    size = config.cluster[0] * config.cluster[1]
    if size not in (1, 2, 4, 8):
        return f"a cluster of {config.cluster_s} x {config.cluster_x} CTAs, must be 1, 2, 4 or 8 in all"
    if config.pairs and (config.cluster_x != 2 or config.cluster_s != 1):
        return "pairs is True: cluster_s must be 1 and cluster_x 2 then"
    if config.pairs and (config.tile_s != problem.block_mn or problem.dtype == "fp8"):
        return f"pairs is True: tile_s must be the block's {problem.block_mn} then, of 16-bit elements"
    return None


def _why_not_stages(config: Sm90BsrConfig, problem: BsrProblem) -> str | None:
    step = MMA_K_BYTES // ELEMENT_BYTES[problem.dtype]
    if config.unit_k % step or config.unit_k > MOST_UNIT_K:
        return f"unit_k is {config.unit_k}, must be a multiple of {step} up to {MOST_UNIT_K}"
    if LANES % config.units:
        return f"units is {config.units}, must divide {LANES}"
    loads = -(-problem.block_k // config.unit_k)
    if loads > 1 and config.units > 1:
        return f"units is {config.units}, must be 1 where a block takes {loads} loads"
    if config.stages and not budget.MIN_STAGES <= config.stages <= MOST_STAGES:
        return f"stages is {config.stages}, must be 0, or from {budget.MIN_STAGES} to {MOST_STAGES}"
    if not config.kept_stages:
        return None
    if not budget.MIN_STAGES <= config.kept_stages <= MOST_STAGES:
        return f"kept_stages is {config.kept_stages}, must be 0, or from {budget.MIN_STAGES} to {MOST_STAGES}"
    if not config.sparse_on_m or config.tile[1] <= MOST_N or config.units > 1 or config.cluster_s > 1:
        return (
            f"kept_stages is {config.kept_stages}, must be 0 but with sparse_on_m, a tile_x above {MOST_N}, "
            "units 1 and cluster_s 1"
        )
    if STAGE_K % config.unit_k:
        return f"unit_k is {config.unit_k}, must divide {STAGE_K} where kept blocks have a ring of their own"
    return None


def _why_not_deep_boxes(config: Sm90BsrConfig, problem: BsrProblem) -> str | None:
    columns = config.tile_x // (2 if config.sparse_on_m and config.tile_x > MOST_N else 1)
    if not config.deep_boxes or not (problem.dense_k_major or problem.other % ROW or columns % ROW):
        return None
    return (
        f"deep_boxes is True, must be False where the dense matrix is contiguous along K, or {problem.other} "
        f"columns of it or {columns} of a tile are not in whole rows of {ROW}"
    )


def accumulator_registers(config: Sm90BsrConfig, problem: BsrProblem) -> int:
    """float32 accumulators that each thread holds, partial sets of fp8 blocks among them."""
    m, n = config.tile
    sharing = 1 if config.schedule is Schedule.PINGPONG else consumers(config)
    each = m * n // (sharing * wgmma.WARPGROUP_THREADS)
    return each * (1 + config.units) if problem.dtype == "fp8" else each


def _why_not_registers(config: Sm90BsrConfig, problem: BsrProblem) -> str | None:
    registers = accumulator_registers(config, problem)
    limit = budget.SM90_ACCUMULATOR_LIMIT[consumers(config)]
    if registers > limit:
        return f"{registers} accumulator registers a thread, at most {limit} leave no spills"
    columns = config.tile[1] // (1 if config.tile[1] <= MOST_N else 2)
    return wgmma.why_not_wgmma_columns(columns, consumers(config))


def _why_not_smem(config: Sm90BsrConfig, problem: BsrProblem, device: Device) -> str | None:
    m, n = config.tile
    size, d_bytes = ELEMENT_BYTES[problem.dtype], ELEMENT_BYTES[problem.d_dtype]
    rows = n if config.kept_stages else m + n
    stage = rows * config.unit_k * config.units * size
    kept = config.kept_stages * m * STAGE_K * size
    wide = n // (1 if n <= MOST_N else 2)
    staging = 2 * consumers(config) * 64 * budget.staging_columns(wide, d_bytes) * d_bytes
    needed = wgmma.SM90_RESERVED_SMEM + (config.stages or budget.MIN_STAGES) * stage + kept + staging
    if needed > device.smem_bytes:
        return (
            f"a stage takes {stage} bytes of shared memory and the kernel {needed} at least; {device.name} "
            f"has {device.smem_bytes}"
        )
    return None


def _why_not_sm80(config: Sm80GemmConfig, problem: BsrProblem, device: Device) -> str | None:
    """As of a dense product with rows aligned to 16 bytes, but for what lists do not have."""
    for name, only in (("split_k", 1), ("raster_group", 8), ("copy_bytes_a", 16), ("copy_bytes_b", 16)):
        value = getattr(config, name)
        if value != only:
            return f"{name} is {value}, must be {only}, the default: it has no effect with lists of blocks"
    majors = (problem.sparse_k_major, problem.dense_k_major)
    a_k_major, b_k_major = majors[::-1] if problem.dense_left else majors
    dense = GemmProblem(
        problem.m, problem.n, max(problem.k, config.tile_k), problem.l, problem.dtype, problem.d_dtype,
        a_k_major=a_k_major, b_k_major=b_k_major, operand_bytes=problem.operand_bytes,
    )  # fmt: skip
    reason = budget.why_not(config, dense, device)
    if reason is None and problem.dtype == "fp8":
        registers = 2 * budget.accumulator_registers(config)
        if registers > budget.SM80_ACCUMULATOR_LIMIT:
            return (
                f"{registers} accumulator registers a thread, at most {budget.SM80_ACCUMULATOR_LIMIT} leave "
                "no spills"
            )
    return reason
