"""Whether a GEMM configuration fits: shared memory, registers and what the hardware's instructions allow.

The compiler notices none of this: it builds a kernel that asks for 400 KB of shared memory, and
one that spills. `why_not` says it before anything is compiled.
"""

from __future__ import annotations

from kernels_dsl.config.gemm import GemmConfig, Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.problem import Device, GemmProblem

REGISTERS_PER_THREAD = 255
CONSUMER_WARPGROUP_THREADS = 128
MBARRIER_BYTES = 8
SMEM_ALIGNMENT_SLACK = 1024
MIN_STAGES = 2
# Accumulator registers a thread may hold beside addresses, descriptors and the epilogue's values.
# 192 of 240 (SM90, after reallocation) and 128 of 255 (SM80, which also holds A and B fragments)
# are the largest that compile without spills.
SM90_ACCUMULATOR_LIMIT = 192
SM80_ACCUMULATOR_LIMIT = 128


def sm90_consumers(config: Sm90GemmConfig) -> int:
    """Consumer warpgroups of a CTA: two, except for a cooperative tile of 64 rows."""
    if config.schedule is Schedule.PINGPONG:
        return 2
    return 2 if config.tile_m % 128 == 0 else 1


def accumulator_registers(config: GemmConfig) -> int:
    """float32 accumulators that each thread holds."""
    elements = config.tile_m * config.tile_n
    if isinstance(config, Sm80GemmConfig):
        return -(-elements // config.threads)
    sharing = 1 if config.schedule is Schedule.PINGPONG else sm90_consumers(config)
    return elements // (sharing * CONSUMER_WARPGROUP_THREADS)


def stage_bytes(config: GemmConfig, ab_bytes: int) -> int:
    """Shared memory of one stage of A and B."""
    tile_k = config.tile_k_for(ab_bytes) if isinstance(config, Sm90GemmConfig) else config.tile_k
    return (config.tile_m + config.tile_n) * tile_k * ab_bytes


def sm90_epilogue_bytes(config: Sm90GemmConfig, d_bytes: int) -> int:
    """Shared memory through which D goes to TMA stores: 64 rows by 64 columns for each consumer, twice."""
    if not config.epi_tma:
        return 0
    columns = min(64, config.tile_n)
    return 2 * sm90_consumers(config) * 64 * columns * d_bytes


def stages(config: GemmConfig, problem: GemmProblem, smem_bytes: int) -> int:
    """Stages of the load pipeline: those asked for, or, for 0, as many as `smem_bytes` hold."""
    if config.stages:
        return config.stages
    assert isinstance(config, Sm90GemmConfig)
    free = smem_bytes - SMEM_ALIGNMENT_SLACK - sm90_epilogue_bytes(config, problem.d_bytes)
    return max(0, free // (stage_bytes(config, problem.ab_bytes) + 2 * MBARRIER_BYTES))


def smem_bytes(config: GemmConfig, problem: GemmProblem, capacity: int) -> int:
    """Shared memory that a CTA asks for, in bytes."""
    loads = stages(config, problem, capacity) * stage_bytes(config, problem.ab_bytes)
    if isinstance(config, Sm80GemmConfig):
        return loads
    barriers = stages(config, problem, capacity) * 2 * MBARRIER_BYTES
    return loads + barriers + sm90_epilogue_bytes(config, problem.d_bytes) + SMEM_ALIGNMENT_SLACK


def why_not(config: GemmConfig, problem: GemmProblem, device: Device) -> str | None:
    """Why `config` cannot compute `problem` on `device`; None if it can."""
    if config.family not in device.families():
        have = f"{device.capability[0]}.{device.capability[1]}"
        need = "9.0 (TMA and WGMMA)" if config.family == "sm90" else "8.0 or later"
        return f"the {config.family} kernels need compute capability {need}, {device.name} has {have}"
    specific = _why_not_sm90 if isinstance(config, Sm90GemmConfig) else _why_not_sm80
    reason = specific(config, problem)  # type: ignore[arg-type]
    if reason:
        return reason
    if not 1 <= config.split_k <= max(1, problem.k):
        return f"split_k is {config.split_k}, must be from 1 to K = {problem.k}"
    needed = smem_bytes(config, problem, device.smem_bytes)
    if stages(config, problem, device.smem_bytes) < MIN_STAGES or needed > device.smem_bytes:
        one = stage_bytes(config, problem.ab_bytes)
        return (
            f"a stage takes {one} bytes of shared memory and the kernel {needed}; "
            f"{device.name} has {device.smem_bytes} and at least {MIN_STAGES} stages must fit"
        )
    return None


def _why_not_sm90(config: Sm90GemmConfig, problem: GemmProblem) -> str | None:
    if config.tile_m not in (64, 128, 256):
        return f"tile_m is {config.tile_m}, must be 64, 128 or 256"
    if config.tile_n % 8 or not 8 <= config.tile_n <= 256:
        return f"tile_n is {config.tile_n}, must be a multiple of 8 from 8 to 256 (the N of WGMMA)"
    registers = accumulator_registers(config)
    if registers > SM90_ACCUMULATOR_LIMIT:
        return f"{registers} accumulator registers a thread, at most {SM90_ACCUMULATOR_LIMIT} leave no spills"
    tile_k = config.tile_k_for(problem.ab_bytes)
    if tile_k * problem.ab_bytes % 32:
        return f"tile_k is {tile_k}, must cover whole WGMMA steps of 32 bytes"
    cluster = config.cluster_m * config.cluster_n
    if cluster not in (1, 2, 4, 8):
        return f"a cluster of {config.cluster_m} x {config.cluster_n} CTAs, must be 1, 2, 4 or 8 in all"
    if problem.ab_type == "fp32" and not (problem.a_k_major and problem.b_k_major):
        return "tf32 WGMMA reads A and B with K contiguous only"
    if min(problem.a_align, problem.b_align) < 16:
        return "TMA loads need A's and B's rows at addresses that are multiples of 16 bytes"
    if config.epi_tma and config.split_k == 1 and problem.d_align < 16:
        return "TMA stores need D's rows at addresses that are multiples of 16 bytes (epi_tma=False does not)"
    return None


def _why_not_sm80(config: Sm80GemmConfig, problem: GemmProblem) -> str | None:
    if config.tile_m % (16 * config.warps_m):
        return f"tile_m is {config.tile_m}, must be a multiple of 16 rows for each of {config.warps_m} warps"
    if config.tile_n % (16 * config.warps_n):
        return (
            f"tile_n is {config.tile_n}, must be a multiple of 16 columns for each of {config.warps_n} warps"
        )
    if config.tile_k * problem.ab_bytes % 32:
        return f"tile_k is {config.tile_k}, must cover whole mma.sync steps of 32 bytes"
    registers = accumulator_registers(config)
    if registers > SM80_ACCUMULATOR_LIMIT:
        return f"{registers} accumulator registers a thread, at most {SM80_ACCUMULATOR_LIMIT} leave no spills"
    if config.threads > 1024:
        return f"{config.threads} threads, a CTA has at most 1024"
    for name, width, align in (
        ("copy_bytes_a", config.copy_bytes_a, problem.a_align),
        ("copy_bytes_b", config.copy_bytes_b, problem.b_align),
    ):
        if width not in (16, 8, 4, 2):
            return f"{name} is {width}, must be 16, 8, 4 or 2"
        if width > align:
            return f"{name} is {width}, the operand's rows are aligned to {align} bytes only"
    return None
