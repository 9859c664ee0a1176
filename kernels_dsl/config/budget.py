"""Checks that a GEMM configuration fits: shared memory, registers and the hardware's instructions.

The compiler notices none of this: it builds a kernel that asks for 400 KB of shared memory, and
one that spills. `why_not` says it before anything is compiled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kernels_dsl.config.gemm import GemmConfig, Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.problem import Device, GemmProblem
from kernels_dsl.config.promotion import GROUP, RECENT, Promotion, scale_tiles
from kernels_dsl.config.wgmma import (
    SM90_RESERVED_SMEM,
    WARPGROUP_THREADS,
    WGMMA_ROWS,
    shared_memory,
    why_not_wgmma_columns,
)

if TYPE_CHECKING:
    from kernels_dsl.config.cluster_sums import SumShape

MIN_STAGES = 2
MIN_EPILOGUE_STAGES = 2
# Accumulator registers a thread may hold beside addresses, descriptors and the epilogue's values, by
# consumer warpgroups of a CTA (SM90, which share out the register file), and for the SM80 family, whose
# threads hold fragments of A and B as well. More than this spills.
SM90_ACCUMULATOR_LIMIT = {1: 192, 2: 192, 3: 128}
# The same where another kernel's CTA has half of the SM.
SM90_OVERLAP_LIMIT = {1: 80, 2: 48}
# The same where CTAs of a cluster send each other sums, and where those are promoted or the epilogue reads
# whole tensors too.
SM90_SHARED_K_LIMIT = {False: {1: 120, 2: 120, 3: 72}, True: {1: 120, 2: 120, 3: 60}}
# The same where the epilogue reads several whole tensors, whose values and addresses need registers too.
SM90_MANY_OPERANDS_LIMIT = 160
# The same where a thread has the gated pairs of its accumulators as well; swiglu without operands takes less.
SM90_GATED_LIMIT = 144
SM80_ACCUMULATOR_LIMIT = 128
# With loads narrower than 16 bytes a thread has more of them, and each has an address.
SM80_NARROW_ACCUMULATOR_LIMIT = 64
SM80_LOADS_LIMIT = 32
SM80_WIDENED_LIMIT = 64
SM80_MIN_STAGES = 3


def sm90_consumers(config: Sm90GemmConfig) -> int:
    """Consumer warpgroups of a CTA: two in ping-pong, else one for each 64 rows, but two for 256 rows."""
    if config.schedule is Schedule.PINGPONG:
        return 2
    return {64: 1, 128: 2, 192: 3, 256: 2}.get(config.tile_m, 2)


def sm90_accumulator_limit(config: Sm90GemmConfig) -> int:
    """float32 sums that a thread may hold; 0 where half of an SM has too few registers."""
    limits = SM90_ACCUMULATOR_LIMIT if not config.overlap else SM90_OVERLAP_LIMIT
    return limits.get(sm90_consumers(config), 0)


def accumulator_registers(config: GemmConfig) -> int:
    """float32 accumulators that each thread holds."""
    elements = config.tile_m * config.tile_n
    if isinstance(config, Sm80GemmConfig):
        return -(-elements // config.threads)
    sharing = 1 if config.schedule is Schedule.PINGPONG else sm90_consumers(config)
    return elements // (sharing * WARPGROUP_THREADS)


def promoted_columns(config: Sm90GemmConfig, promotion: Promotion) -> int:
    """Columns of a chunk that is summed before it is added to the float32 accumulators: as many as registers
    hold beside those, and with scales of 128 columns no more than have one. 0 where none fits."""
    room = sm90_accumulator_limit(config) - accumulator_registers(config)
    if promotion.rows_b == 1:
        room -= config.tile_n // 2  # a thread has a quarter of the columns, and their scales twice
    widths = {*range(16, config.tile_n, 16), config.tile_n}
    fitting = (
        columns
        for columns in widths
        if columns <= 2 * room
        and config.tile_n % columns == 0
        and not (promotion.rows_b > 1 and GROUP % columns)
    )
    return max(fitting, default=0)


def two_partial_sets(config: Sm90GemmConfig, promotion: Promotion | None) -> bool:
    """True where a warpgroup's tile is one chunk, and registers hold two sets of its partial sums."""
    accumulators = accumulator_registers(config)
    if promotion is None or accumulators * 128 != 64 * config.tile_n:
        return False
    return promoted_columns(config, promotion) == config.tile_n and (
        3 * accumulators + (config.tile_n // 2 if promotion.rows_b == 1 else 0)
        <= sm90_accumulator_limit(config)
    )


def stage_bytes(config: GemmConfig, ab_bytes: int) -> int:
    """Shared memory of one stage of A and B."""
    tile_k = config.tile_k_for(ab_bytes)
    return (config.tile_m + config.tile_n) * tile_k * ab_bytes


def scale_bytes(config: Sm90GemmConfig, promotion: Promotion | None) -> tuple[int, int]:
    """Shared memory of the scales of 128 of K: of each stage, and of all together.

    `promotion` in the kernel's orientation.
    """
    if promotion is None or not promotion.scaled:
        return 0, 0
    steps = WGMMA_ROWS, promoted_columns(config, promotion) or config.tile_n
    tiles = scale_tiles(promotion, (config.tile_m, config.tile_n), steps)
    return 4 * tiles.floats, 4 * tiles.few * RECENT


def cluster_sums(config: Sm90GemmConfig) -> SumShape:
    """Sums that CTAs which share a tile's K send each other."""
    from kernels_dsl.config.cluster_sums import SumShape  # few products have such

    return SumShape(accumulator_registers(config), config.cluster_k, sm90_consumers(config))


def sm90_beside_stages(config: Sm90GemmConfig, promotion: Promotion | None) -> tuple[int, int]:
    """Shared memory beside tiles and mbarriers: of each stage, and of all together. `promotion` as above.

    Scales, and a flag of each warpgroup where sums of pieces of tiles are added up, or mbarriers and small
    sums that come from other CTAs of the cluster.
    """
    staged, together = scale_bytes(config, promotion)
    if config.stream_k:
        together += 8 * sm90_consumers(config)
    if config.cluster_k > 1:
        together += 8 * cluster_sums(config).words
    return staged, together


def sm90_reserved_bytes(config: Sm90GemmConfig, problem: GemmProblem, stages: int) -> int:
    """Shared memory before the tiles: mbarriers, and the scales of `stages` stages."""
    promotion = problem.promotion
    if promotion is not None and config.turned:
        promotion = promotion.swapped()
    staged, beside = sm90_beside_stages(config, promotion)
    needed = stages * (16 + staged) + beside
    return max(1, -(-needed // SM90_RESERVED_SMEM)) * SM90_RESERVED_SMEM


def sm90_staging_bytes(config: Sm90GemmConfig, d_bytes: int) -> int:
    """Shared memory of one staging buffer of D for each consumer: 64 rows of at most 64 bytes, 32 columns."""
    return sm90_consumers(config) * 64 * staging_columns(config.tile_n, d_bytes) * d_bytes


def staging_columns(tile_n: int, d_bytes: int) -> int:
    """Columns of a staging buffer, a divisor of those of the tile."""
    return math.gcd(tile_n, 64 // max(d_bytes, 2))


def stages(config: GemmConfig, problem: GemmProblem, capacity: int) -> int:
    """Stages of the load pipeline: those asked for, or, for 0, as many as `capacity` bytes hold."""
    if config.stages:
        return config.stages
    assert isinstance(config, Sm90GemmConfig)  # an Sm80GemmConfig always says how many
    staging = MIN_EPILOGUE_STAGES * sm90_staging_bytes(config, stored_bytes(config, problem))
    one = stage_bytes(config, problem.ab_bytes)
    most = max(0, capacity - SM90_RESERVED_SMEM - staging) // one
    while most > 0 and most * one + staging + sm90_reserved_bytes(config, problem, most) > capacity:
        most -= 1
    return most


def stored_bytes(config: GemmConfig, problem: GemmProblem) -> int:
    """Bytes of an element that the kernel stores: D's, or those of a float32 partial sum."""
    return problem.d_bytes if config.split_k == 1 else 4


def smem_bytes(config: GemmConfig, problem: GemmProblem, capacity: int) -> int:
    """Shared memory that a CTA needs at least, in bytes."""
    if isinstance(config, Sm80GemmConfig):
        return config.smem_bytes(problem.ab_bytes)
    count = stages(config, problem, capacity)
    loads = count * stage_bytes(config, problem.ab_bytes)
    staging = MIN_EPILOGUE_STAGES * sm90_staging_bytes(config, stored_bytes(config, problem))
    return sm90_reserved_bytes(config, problem, count) + loads + staging


def why_not(config: GemmConfig, problem: GemmProblem, device: Device) -> str | None:
    """Says why `config` cannot compute `problem` on `device`; None if it can."""
    if config.family not in device.families():
        have = f"{device.capability[0]}.{device.capability[1]}"
        need = config.traits.needs
        return f"the {config.family} kernels need compute capability {need}, {device.name} has {have}"
    reason = not_positive(config, zero=("tile_k", "stages", "last_m", "last_n"))
    if reason is not None:
        return reason
    specific = _why_not_sm90 if isinstance(config, Sm90GemmConfig) else _why_not_sm80
    if problem.ab_type == "fp8" and not device.has_fp8:
        major, minor = device.capability
        return f"fp8 operands need compute capability 8.9, {device.name} has {major}.{minor}"
    reason = specific(config, problem)  # type: ignore[arg-type]
    if reason is None and isinstance(config, Sm80GemmConfig):
        reason = _why_not_fp8(config, problem, device)
    if reason is None and problem.grouped:
        reason = _why_not_grouped(config)
    if problem.gated and config.turned:
        reason = "turned tiles have neighbouring columns in different threads, which cannot be gate and up"
    if reason:
        return reason
    k_tiles = max(1, -(-problem.k // config.tile_k_for(problem.ab_bytes)))
    if not 1 <= config.split_k <= k_tiles:
        return f"split_k is {config.split_k}, must be from 1 to the {k_tiles} tiles of K = {problem.k}"
    capacity = shared_memory(device.smem_bytes, config.ctas_per_sm)
    needed = smem_bytes(config, problem, capacity)
    if stages(config, problem, capacity) < MIN_STAGES or needed > capacity:
        one = stage_bytes(config, problem.ab_bytes)
        return (
            f"a stage takes {one} bytes of shared memory and the kernel {needed}; "
            f"{device.name} has {capacity} and at least {MIN_STAGES} stages must fit"
        )
    if isinstance(config, Sm90GemmConfig) and config.cluster_k > 1 and (sums := cluster_sums(config)).in_ring:
        ring = stages(config, problem, capacity) * stage_bytes(config, problem.ab_bytes)
        if sums.bytes > ring:
            return f"{sums.bytes} bytes of sums of {config.cluster_k} CTAs do not fit in a ring of {ring}"
    return None


def not_positive(config: Any, zero: tuple[str, ...]) -> str | None:
    """The field of a configuration that is a number below 1; those of `zero` may be 0."""
    for name, value in vars(config).items():
        least = int(name not in zero)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            return f"{name} is {value}, must be {least} or more"
    return None


def _why_not_grouped(config: GemmConfig) -> str | None:
    """Groups of rows are along the kernel's M, and their partial sums would have nowhere to go."""
    if config.split_k > 1:
        return f"split_k is {config.split_k}, must be 1 with groups of rows"
    if config.turned:
        return "turned tiles have their rows along N, which cannot be in groups"
    return None


def _why_not_stream_k(config: Sm90GemmConfig, problem: GemmProblem) -> str | None:
    """Pieces of tiles along K are added up by warpgroups that share tiles, of 64 rows each."""
    if config.schedule is Schedule.PINGPONG or config.tile_m == 256:
        return (
            f"stream_k with tile_m {config.tile_m}, {config.schedule.value}: must be cooperative, 192 at most"
        )
    if config.split_k > 1 or problem.grouped:
        return "stream_k cuts tiles along K itself: no split_k and no groups of rows beside it"
    return None


def _why_not_last(config: Sm90GemmConfig, problem: GemmProblem) -> str | None:
    """Lines of an operand's rows follow each other in shared memory where a tile has one line of K, and a CTA
    loads them alone."""
    rows = config.last_m, config.last_n
    if any(count % 8 or count >= tile for count, tile in zip(rows, (config.tile_m, config.tile_n))) or all(
        rows
    ):
        return f"last_m and last_n are {rows}: one must be 0, the other a multiple of 8 below the tile"
    if config.cluster_n > 1 if config.last_m else config.cluster_m > 1:
        return f"last_m and last_n are {rows}, must be 0 where CTAs load the operand for each other"
    if problem.grouped or config.tile_k or not (problem.a_k_major and problem.b_k_major):
        return (
            f"last_m and last_n are {rows}, must be 0 with groups, with tile_k, or where K is not contiguous"
        )
    return None


def _why_not_cluster_k(config: Sm90GemmConfig, problem: GemmProblem) -> str | None:
    """Each CTA of a cluster has K tiles of its own, and one of them all sums."""
    if config.schedule is Schedule.PINGPONG:
        return f"cluster_k is {config.cluster_k}, must be 1 in turns"
    if config.cluster_ctas > 8:
        return f"a cluster has {config.cluster_ctas} CTAs, must have at most 8"
    if config.split_k > 1 or config.stream_k or problem.grouped:
        return f"cluster_k is {config.cluster_k}, must be 1 with split_k, stream_k or groups of rows"
    registers = accumulator_registers(config)
    few = problem.operand_bytes > 0 or problem.promotion is not None
    limit = SM90_SHARED_K_LIMIT[few][sm90_consumers(config)]
    if registers > limit:
        return f"{registers} accumulator registers a thread, at most {limit} leave no spills with cluster_k"
    if config.cluster_k not in (2, 3, 4, 8):
        return f"cluster_k is {config.cluster_k}, must be 1, 2, 3, 4 or 8"
    if -(-problem.k // config.tile_k_for(problem.ab_bytes)) < config.cluster_k:
        return f"cluster_k is {config.cluster_k}, more than K has tiles"
    return None


def _sm90_accumulator_limit(config: Sm90GemmConfig, problem: GemmProblem) -> int:
    limit = sm90_accumulator_limit(config)
    if config.split_k > 1:
        return limit  # the epilogue is the second kernel's
    if problem.gated:
        return min(limit, SM90_GATED_LIMIT)
    return min(limit, SM90_MANY_OPERANDS_LIMIT) if problem.operand_bytes > 2 else limit


def _why_not_sm90(config: Sm90GemmConfig, problem: GemmProblem) -> str | None:
    rows = (64, 128) if config.schedule is Schedule.PINGPONG else (64, 128, 192, 256)
    if config.tile_m not in rows:
        return f"tile_m is {config.tile_m}, must be one of {rows} in a {config.schedule.value} schedule"
    step = 8 if problem.d_bytes > 1 else 16
    if config.tile_n % step or not 16 <= config.tile_n <= 256:
        return f"tile_n is {config.tile_n}, must be a multiple of {step} from 16 to 256 (the N of WGMMA)"
    if problem.ab_type == "fp32" and config.tile_n % 32 and config.tile_n != 16:
        return (
            f"tile_n is {config.tile_n}, must be 16 or a multiple of 32 with tf32: at others the compiler "
            "(CuTe DSL 4.8.1) ends the process"
        )
    if config.overlap and (config.tile_m > 128 or config.schedule is Schedule.PINGPONG):
        return "overlap is True, must be False in turns, or with tile_m over 128"
    registers = accumulator_registers(config)
    limit = _sm90_accumulator_limit(config, problem)
    if registers > limit:
        return f"{registers} accumulator registers a thread, at most {limit} leave no spills"
    tile_k = config.tile_k_for(problem.ab_bytes)
    if tile_k * problem.ab_bytes % 32:
        return f"tile_k is {tile_k}, must cover whole WGMMA steps of 32 bytes"
    promotion = problem.promotion
    if promotion is not None and tile_k != GROUP:
        return f"tile_k is {tile_k}, must be {GROUP} where partial sums are promoted"
    if promotion is not None and config.schedule is Schedule.PINGPONG:
        return "schedule is pingpong, must be cooperative where partial sums are promoted"
    columns = config.tile_n
    if promotion is not None:
        columns = promoted_columns(config, promotion.swapped() if config.turned else promotion)
    if not columns:
        return f"{registers} accumulator registers a thread leave too few for partial sums"
    if (reason := why_not_wgmma_columns(columns, sm90_consumers(config), config.ctas_per_sm)) is not None:
        return reason
    if config.stream_k and (reason := _why_not_stream_k(config, problem)) is not None:
        return reason
    if config.cluster_k > 1 and (reason := _why_not_cluster_k(config, problem)) is not None:
        return reason
    if (config.last_m or config.last_n) and (reason := _why_not_last(config, problem)) is not None:
        return reason
    if config.l2_prefetch and problem.grouped:
        return "l2_prefetch is True, must be False where rows are in groups, whose ends come late"
    if config.cluster_m * config.cluster_n not in (1, 2, 4, 8):
        return f"a cluster of {config.cluster_m} x {config.cluster_n} CTAs, must be 1, 2, 4 or 8 in all"
    if problem.ab_type in ("fp32", "fp8") and not (problem.a_k_major and problem.b_k_major):
        kind = "tf32" if problem.ab_type == "fp32" else "fp8"
        return f"{kind} WGMMA reads A and B with K contiguous only"
    if min(problem.a_align, problem.b_align) < 16:
        return "TMA loads need A's and B's rows at addresses that are multiples of 16 bytes"
    if config.epi_tma and config.split_k == 1 and problem.d_align < 16:
        return "TMA stores need D's rows at addresses that are multiples of 16 bytes (epi_tma=False does not)"
    return None


def _why_not_sm80(config: Sm80GemmConfig, problem: GemmProblem) -> str | None:
    if problem.ab_type == "fp8":
        if not (problem.a_k_major and problem.b_k_major):
            return "mma.sync of fp8 reads A and B with K contiguous only"
        if min(config.copy_bytes_a, config.copy_bytes_b) < 4:
            return "fp8 operands go by cp.async alone, which needs rows at multiples of 4 bytes"
    for name in ("copy_bytes_a", "copy_bytes_b"):
        widths = tuple(width for width in (16, 8, 4, 2) if width >= problem.ab_bytes)
        width = getattr(config, name)
        if width not in widths:
            return f"{name} is {width}, must be one of {widths} with {problem.ab_type} operands"
    if config.tile_m % (16 * config.warps_m):
        return f"tile_m is {config.tile_m}, must be a multiple of 16 rows for each of {config.warps_m} warps"
    if config.tile_n % (16 * config.warps_n):
        return (
            f"tile_n is {config.tile_n}, must be a multiple of 16 columns for each of {config.warps_n} warps"
        )
    if config.tile_k * problem.ab_bytes % 64:
        return f"tile_k is {config.tile_k}, must cover whole pairs of mma.sync steps of 32 bytes"
    if config.stages < SM80_MIN_STAGES:
        return f"stages is {config.stages}, must be {SM80_MIN_STAGES} or more"
    registers = accumulator_registers(config)
    if problem.promotion is not None:
        registers *= 2
        if GROUP % config.tile_k:
            return f"tile_k is {config.tile_k}, must divide {GROUP} where partial sums are promoted"
    narrow = min(config.copy_bytes_a, config.copy_bytes_b) < 16
    limit = SM80_NARROW_ACCUMULATOR_LIMIT if narrow else SM80_ACCUMULATOR_LIMIT
    if registers > limit:
        return f"{registers} accumulator registers a thread, at most {limit} leave no spills"
    reason = _why_not_sm80_loads(config, problem)
    if reason:
        return reason
    if config.threads > 1024:
        return f"{config.threads} threads, a CTA has at most 1024"
    for name, width, align in (
        ("copy_bytes_a", config.copy_bytes_a, problem.a_align),
        ("copy_bytes_b", config.copy_bytes_b, problem.b_align),
    ):
        if width > align:
            return f"{name} is {width}, the operand's rows are aligned to {align} bytes only"
    return None


def _why_not_fp8(config: Sm80GemmConfig, problem: GemmProblem, device: Device) -> str | None:
    """Fragments of fp8 that are widened to fp16 take twice the registers; scales take some as well."""
    if problem.ab_type != "fp8":
        return None
    registers = accumulator_registers(config)
    if device.widens_fp8:
        limit = SM80_WIDENED_LIMIT if config.tile_k <= 64 else SM80_WIDENED_LIMIT // 2
        if registers > limit:
            return (
                f"{registers} accumulator registers a thread, at most {limit} leave no spills where mma.sync "
                f"of fp8 is done in fp16, as on {device.name}"
            )
    # ptxas needs a few more registers for other GPUs than sm_89.
    finest = problem.promotion is not None and problem.promotion.rows_a == problem.promotion.rows_b == 1
    limit = SM80_WIDENED_LIMIT // 2
    if finest and device.capability != (8, 9) and registers > limit:
        return (
            f"{registers} accumulator registers a thread, at most {limit} leave no spills beside scales of "
            f"rows and columns on {device.name}"
        )
    return None


def _why_not_sm80_loads(config: Sm80GemmConfig, problem: GemmProblem) -> str | None:
    """The reason why threads cannot share out a K tile's loads, to memory and from it; None if they can."""
    loads = 0
    for name, rows, k_major, width, warps in (
        ("A", config.tile_m, problem.a_k_major, config.copy_bytes_a, config.warps_m),
        ("B", config.tile_n, problem.b_k_major, config.copy_bytes_b, config.warps_n),
    ):
        piece = math.gcd(128, rows * problem.ab_bytes) // problem.ab_bytes
        step = 16 * warps
        if not k_major and step % piece and piece % step:
            return (
                f"{warps} warps read {step} elements of {name} at a time, which lies in pieces of {piece} "
                "where K is not contiguous: one must be a multiple of the other"
            )
        vector = max(width, 4) // problem.ab_bytes
        lead, other = (config.tile_k, rows) if k_major else (rows, config.tile_k)
        across = config.threads // math.gcd(lead // vector, config.threads)
        vectors = rows * config.tile_k // vector
        if lead * problem.ab_bytes % 32 or vectors % config.threads or other % across:
            return (
                f"the tile of {name} is {rows} x {config.tile_k}, which {config.threads} threads cannot "
                f"share out in loads of {vector} elements"
            )
        loads += rows * config.tile_k // (vector * config.threads)
    if loads > SM80_LOADS_LIMIT:
        return f"{loads} loads a thread for each K tile, at most {SM80_LOADS_LIMIT} leave no spills"
    return None
