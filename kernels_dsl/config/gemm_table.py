"""The GEMM configuration of a shape: tables of candidates and a model of how long each would take.

The model counts waves of tiles over the SMs. Its constants, all in `MODELS` and the candidate tables, come
from measurements and are meant to be edited after new ones. It only has to rank candidates; where it ranks
wrongly, the tuner's record (see `tuned`) overrules it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from kernels_dsl.config.budget import two_partial_sets, why_not
from kernels_dsl.config.few_rows import FEW, MOST, tile_for_few_rows
from kernels_dsl.config.gemm import GemmConfig, Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.order import INVARIANT_TILE_N, Order, why_not_in_order
from kernels_dsl.config.problem import Device, GemmProblem
from kernels_dsl.config.stream_k import shares
from lowering.records import changed, frozen

LINE_BYTES = 128  # of L2; the K extent of a tile is as long
L2_BYTES = 60 << 20  # of an H200; what the constants below were fitted with
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


@frozen
class Model:
    """Constants of the time model of one family. Times in seconds, rates a second.

    `sm_flops`: 16-bit FLOPs of one SM at full tilt (tf32 runs at half of it). `chip_flops`: what the power
    limit leaves the chip of 132 SMs. `bandwidth`: global memory. `sm_bandwidth`: L2 or global memory to one
    SM. `launch`: start of a kernel, until its first tile computes. `epilogue`: bytes of D a second that an SM
    converts and stores. `tile_start`: filling the pipeline at a tile that nothing overlaps. `reduce`: the
    second kernel of split-K, before the bytes it moves. `split_lines`: what loads cost where rows of K do not
    start on lines of L2, so that each row of a tile takes two. `beyond_l2`: what they cost where A, B and D
    together are larger than L2. `stream`: what tiles cut along K for an even last wave cost, in sums and in
    loads that others do not share.
    """

    sm_flops: float
    chip_flops: float
    bandwidth: float
    sm_bandwidth: float
    launch: float
    epilogue: float
    tile_start: float
    reduce: float
    split_lines: float = 1.0
    beyond_l2: float = 1.0
    stream: float = 1.1e-5


MODELS = {
    # Fitted to 74 configurations, with splits of K, at 44 shapes on H200s: of what was measured at a shape in
    # one run, the choice is within 4 % of the fastest.
    "sm90": Model(
        sm_flops=7.862e12,
        chip_flops=7.374e14,
        bandwidth=3.847e12,
        sm_bandwidth=8.186e10,
        launch=1e-06,
        epilogue=2.343e10,
        tile_start=0.0,
        reduce=1.237e-06,
        split_lines=1.48,
        beyond_l2=1.233,
    ),
    "sm90 fp8": Model(
        sm_flops=7.967e12,
        chip_flops=7.814e14,
        bandwidth=3.847e12,
        sm_bandwidth=1.074e11,
        launch=2.239e-06,
        epilogue=9.098e10,
        tile_start=3e-07,
        reduce=1.237e-06,
        split_lines=1.48,
        beyond_l2=1.115,
    ),
    "sm90 fp8 promoted": Model(
        sm_flops=6.49e12,
        chip_flops=7.237e14,
        bandwidth=3.847e12,
        sm_bandwidth=1.071e11,
        launch=2.148e-06,
        epilogue=3.716e10,
        tile_start=9.509e-07,
        reduce=2.919e-06,
        split_lines=1.48,
        beyond_l2=1.141,
        stream=1.3e-05,
    ),
    "sm90 fp8 scaled": Model(
        sm_flops=7.307e12,
        chip_flops=5.870e14,
        bandwidth=3.847e12,
        sm_bandwidth=8.699e10,
        launch=1e-06,
        epilogue=5.155e10,
        tile_start=8e-08,
        reduce=1.322e-06,
        split_lines=1.48,
        beyond_l2=1.016,
    ),
    "sm80": Model(
        sm_flops=3.3e12,
        chip_flops=450e12,
        bandwidth=3.5e12,
        sm_bandwidth=45e9,
        launch=1.0e-6,
        epilogue=40e9,
        tile_start=1.2e-6,
        reduce=3.0e-6,
    ),
}


@frozen
class Candidate:
    """A configuration and the fraction of `sm_flops` that its main loop reaches on long K.

    `tf32_efficiency`: the same with fp32 operands, of their half of `sm_flops`; None where it is no other.
    """

    config: GemmConfig
    efficiency: float
    tf32_efficiency: float | None = None

    def efficiency_for(self, ab_bytes: int) -> float:
        """The fraction for operands of `ab_bytes` bytes an element."""
        other = self.tf32_efficiency if ab_bytes == 4 else None
        return self.efficiency if other is None else other


_PINGPONG = Schedule.PINGPONG
SM90_CANDIDATES = (
    Candidate(Sm90GemmConfig(256, 160, cluster_n=2), 0.808),
    Candidate(Sm90GemmConfig(192, 176, cluster_n=2), 0.985),
    Candidate(Sm90GemmConfig(192, 176, cluster_m=2), 0.756),
    Candidate(Sm90GemmConfig(128, 256), 0.899),
    Candidate(Sm90GemmConfig(128, 256, cluster_n=2), 0.922),
    Candidate(Sm90GemmConfig(128, 256, cluster_m=2), 0.879),
    Candidate(Sm90GemmConfig(256, 128, cluster_n=2), 0.870),
    Candidate(Sm90GemmConfig(256, 128, cluster_m=2), 0.896),
    Candidate(Sm90GemmConfig(128, 192, cluster_n=2, schedule=_PINGPONG), 0.953),
    Candidate(Sm90GemmConfig(128, 192, cluster_m=2, schedule=_PINGPONG), 0.862),
    Candidate(Sm90GemmConfig(128, 192, cluster_m=2, cluster_n=2, schedule=_PINGPONG), 0.790),
    Candidate(Sm90GemmConfig(128, 192, cluster_m=4, schedule=_PINGPONG), 0.768),
    Candidate(Sm90GemmConfig(192, 128), 0.942),
    Candidate(Sm90GemmConfig(128, 176, cluster_m=2, schedule=_PINGPONG), 0.821),
    Candidate(Sm90GemmConfig(128, 176, cluster_m=4, schedule=_PINGPONG), 0.803),
    Candidate(Sm90GemmConfig(128, 160, cluster_m=2, schedule=_PINGPONG), 0.886),
    Candidate(Sm90GemmConfig(128, 160, cluster_m=4, schedule=_PINGPONG), 0.823),
    Candidate(Sm90GemmConfig(128, 144, cluster_m=2, schedule=_PINGPONG), 0.892),
    Candidate(Sm90GemmConfig(128, 144, cluster_m=4, schedule=_PINGPONG), 0.830),
    Candidate(Sm90GemmConfig(64, 256), 1.007),
    Candidate(Sm90GemmConfig(64, 256, cluster_m=2, schedule=_PINGPONG), 0.782),
    Candidate(Sm90GemmConfig(128, 128, schedule=_PINGPONG), 0.805),
    Candidate(Sm90GemmConfig(128, 128, cluster_n=2, schedule=_PINGPONG), 0.772),
    Candidate(Sm90GemmConfig(128, 128, cluster_m=2, schedule=_PINGPONG), 0.903),
    Candidate(Sm90GemmConfig(128, 128, cluster_n=4, schedule=_PINGPONG), 0.887),
    Candidate(Sm90GemmConfig(128, 128, cluster_m=4, schedule=_PINGPONG), 0.771),
    Candidate(Sm90GemmConfig(128, 112, cluster_n=2, schedule=_PINGPONG), 0.674),
    Candidate(Sm90GemmConfig(128, 96), 0.628),
    Candidate(Sm90GemmConfig(128, 96, cluster_m=4, schedule=_PINGPONG), 0.769),
    Candidate(Sm90GemmConfig(64, 128, cluster_n=2), 0.458),
    Candidate(Sm90GemmConfig(64, 128, cluster_m=2, schedule=_PINGPONG), 0.464),
    Candidate(Sm90GemmConfig(128, 64, schedule=_PINGPONG), 0.712),
    Candidate(Sm90GemmConfig(128, 64, cluster_m=2, schedule=_PINGPONG), 0.661),
    Candidate(Sm90GemmConfig(64, 64), 0.426),
    Candidate(Sm90GemmConfig(64, 32), 0.542),
    Candidate(Sm90GemmConfig(64, 16), 0.249),
    Candidate(Sm90GemmConfig(256, 160, cluster_m=2, turned=True), 0.759),
    Candidate(Sm90GemmConfig(256, 160, cluster_n=2, turned=True), 0.820),
    Candidate(Sm90GemmConfig(128, 208, cluster_m=2, turned=True), 0.890),
    Candidate(Sm90GemmConfig(128, 192, cluster_m=2, schedule=_PINGPONG, turned=True), 0.898),
    Candidate(Sm90GemmConfig(128, 176, cluster_m=2, schedule=_PINGPONG, turned=True), 0.825),
    Candidate(Sm90GemmConfig(128, 160, cluster_m=2, schedule=_PINGPONG, turned=True), 0.930),
    Candidate(Sm90GemmConfig(128, 144, cluster_m=2, schedule=_PINGPONG, turned=True), 0.848),
)

# Efficiencies measured on one H200, which stands in for the GPUs that this family is for.
SM80_CANDIDATES = (
    Candidate(Sm80GemmConfig(128, 256, 32, 4, 2, 4), 0.99, 0.69),
    Candidate(Sm80GemmConfig(256, 128, 32, 4, 4, 2), 0.91, 0.70),
    Candidate(Sm80GemmConfig(128, 128, 32, 4, 2, 2), 0.98, 0.69),
    Candidate(Sm80GemmConfig(128, 128, 64, 3, 2, 4), 0.85, 0.55),
    Candidate(Sm80GemmConfig(128, 128, 32, 4, 2, 4), 0.70, 0.75),  # the largest tile with narrow loads
    Candidate(Sm80GemmConfig(128, 64, 32, 4, 2, 2), 0.80, 0.59),
    Candidate(Sm80GemmConfig(64, 128, 32, 4, 2, 2), 0.82, 0.57),
    Candidate(Sm80GemmConfig(64, 64, 64, 4, 2, 2), 0.71, 0.49),
    Candidate(Sm80GemmConfig(32, 64, 64, 4, 2, 2), 0.53, 0.39),
    Candidate(Sm80GemmConfig(16, 64, 128, 4, 1, 4), 0.33, 0.21),
)

# Chosen for the fastest configuration at 11 shapes on one H200: within 2 % of it at all but one of them.
SM90_FP8_CANDIDATES = (
    Candidate(Sm90GemmConfig(128, 128, schedule=_PINGPONG), 0.726),
    Candidate(Sm90GemmConfig(128, 128, cluster_m=2, schedule=_PINGPONG), 0.773),
    Candidate(Sm90GemmConfig(128, 160, cluster_m=2, schedule=_PINGPONG), 0.797),
    Candidate(Sm90GemmConfig(128, 176, cluster_m=2, schedule=_PINGPONG), 0.721),
    Candidate(Sm90GemmConfig(128, 192, schedule=_PINGPONG), 0.739),
    Candidate(Sm90GemmConfig(128, 192, cluster_m=2, schedule=_PINGPONG), 0.817),
    Candidate(Sm90GemmConfig(128, 256, cluster_m=2), 0.698),
    Candidate(Sm90GemmConfig(128, 64, cluster_n=2, schedule=_PINGPONG), 0.581),
    Candidate(Sm90GemmConfig(256, 128), 0.694),
    Candidate(Sm90GemmConfig(64, 128, cluster_m=2, schedule=_PINGPONG), 0.573),
    Candidate(Sm90GemmConfig(64, 256), 0.800),
    Candidate(Sm90GemmConfig(64, 256, cluster_m=2, schedule=_PINGPONG), 0.719),
    Candidate(Sm90GemmConfig(64, 64), 0.800),
    Candidate(Sm90GemmConfig(64, 32), 0.500),
    Candidate(Sm90GemmConfig(64, 16), 0.250),
)
# Where sums are promoted, while one warpgroup adds, the others' products run: cooperative tiles alone.
SM90_FP8_PROMOTED_CANDIDATES = (
    Candidate(Sm90GemmConfig(128, 256, cluster_n=2), 0.837),
    Candidate(Sm90GemmConfig(128, 256, cluster_m=2), 0.795),
    Candidate(Sm90GemmConfig(256, 128, cluster_m=2), 0.798),
    Candidate(Sm90GemmConfig(128, 192), 0.794),
    Candidate(Sm90GemmConfig(128, 176, cluster_m=2), 0.905),
    Candidate(Sm90GemmConfig(128, 160, cluster_m=2), 0.920),
    Candidate(Sm90GemmConfig(192, 128), 0.939),
    Candidate(Sm90GemmConfig(192, 128, cluster_n=2), 0.939),
    Candidate(Sm90GemmConfig(128, 128), 0.989),
    Candidate(Sm90GemmConfig(128, 128, cluster_n=2), 0.957),
    Candidate(Sm90GemmConfig(128, 128, cluster_m=2), 0.957),
    Candidate(Sm90GemmConfig(128, 96, cluster_n=2), 0.700),
    Candidate(Sm90GemmConfig(128, 96, cluster_m=2), 0.880),
    Candidate(Sm90GemmConfig(128, 64, cluster_m=2), 0.740),
    Candidate(Sm90GemmConfig(64, 128), 0.617),
    Candidate(Sm90GemmConfig(64, 128, cluster_n=2), 0.625),
    Candidate(Sm90GemmConfig(64, 128, cluster_m=2), 0.680),
    Candidate(Sm90GemmConfig(64, 64), 0.636),
    Candidate(Sm90GemmConfig(64, 32), 0.500),
    Candidate(Sm90GemmConfig(64, 16), 0.250),
)
SM90_FP8_SCALED_CANDIDATES = (
    Candidate(Sm90GemmConfig(128, 256, cluster_n=2), 0.765),
    Candidate(Sm90GemmConfig(128, 256, cluster_m=2), 0.587),
    Candidate(Sm90GemmConfig(256, 128, cluster_m=2), 0.681),
    Candidate(Sm90GemmConfig(192, 128), 1.078),
    Candidate(Sm90GemmConfig(192, 128, cluster_n=2), 0.886),
    Candidate(Sm90GemmConfig(128, 128), 0.732),
    Candidate(Sm90GemmConfig(128, 128, cluster_n=2), 0.738),
    Candidate(Sm90GemmConfig(128, 128, cluster_m=2), 0.801),
    Candidate(Sm90GemmConfig(128, 64, cluster_m=2), 0.615),
    Candidate(Sm90GemmConfig(64, 128), 0.821),
    Candidate(Sm90GemmConfig(64, 128, cluster_n=2), 0.508),
    Candidate(Sm90GemmConfig(64, 128, cluster_m=2), 0.607),
    Candidate(Sm90GemmConfig(64, 64), 0.702),
    Candidate(Sm90GemmConfig(64, 32), 0.500),
    Candidate(Sm90GemmConfig(64, 16), 0.250),
)

TABLES = {
    "sm90": SM90_CANDIDATES,
    "sm90 fp8": SM90_FP8_CANDIDATES,
    "sm90 fp8 promoted": SM90_FP8_PROMOTED_CANDIDATES,
    "sm90 fp8 scaled": SM90_FP8_SCALED_CANDIDATES,
    "sm80": SM80_CANDIDATES,
}


def adapted(config: GemmConfig, problem: GemmProblem) -> GemmConfig:
    """`config` with the fields that follow from the problem's alignment and type, not from its speed."""
    if isinstance(config, Sm90GemmConfig):
        aligned = problem.d_align == 16 or config.split_k > 1  # split-K's workspace has aligned rows
        return config if aligned or not config.epi_tma else changed(config, epi_tma=False)
    # A K tile is so many bytes: float32 operands get half the elements.
    tile_k = config.tile_k * 2 // problem.ab_bytes
    return changed(
        config,
        tile_k=tile_k,
        copy_bytes_a=min(config.copy_bytes_a, problem.a_align),
        copy_bytes_b=min(config.copy_bytes_b, problem.b_align),
    )


def kind_of(problem: GemmProblem, family: str) -> str:
    """The key of a problem in `TABLES` and `MODELS`."""
    if family != "sm90" or problem.ab_type != "fp8":
        return family
    if problem.promotion is None:
        return "sm90 fp8"
    return "sm90 fp8 scaled" if problem.promotion.scaled else "sm90 fp8 promoted"


def _tries(
    problem: GemmProblem, device: Device, family: str, order: Order
) -> Iterator[tuple[Candidate, GemmConfig, GemmProblem]]:
    """Every configuration worth a try, feasible or not, with each split of K.

    Beside each: the configuration that `why_not` must have nothing against, and the problem as it sees it.
    """
    turned: GemmProblem | None = None
    for candidate in TABLES[kind_of(problem, family)]:
        if why_not_in_order(candidate.config, order) is not None:
            continue
        seen = problem
        if candidate.config.turned:
            seen = turned = turned or oriented(problem, candidate.config)
        if family == "sm90" and _half_empty(candidate.config, seen, order):
            continue
        for split in SPLITS if not (candidate.config.turned or order is not Order.ANY) else (1,):
            if split > 1 and not _split_pays(candidate.config, problem, device, split):
                continue
            config = candidate.config if split == 1 else changed(candidate.config, split_k=split)
            config = adapted(config, problem)
            yield candidate if config is candidate.config else changed(candidate, config=config), config, seen
            if isinstance(config, Sm90GemmConfig) and _cutting_pays(config, problem, device):
                yield changed(candidate, config=changed(config, stream_k=True)), config, seen


def candidates(
    problem: GemmProblem, device: Device, family: str, order: Order = Order.ANY
) -> Iterator[Candidate]:
    """Every feasible configuration of a family for this problem, with each split of K worth a try.

    order: those alone that `why_not_in_order` has nothing against.
    """
    for candidate, config, _ in _tries(problem, device, family, order):
        if why_not(config, problem, device) is None:
            yield candidate


def _first_ranked(
    problem: GemmProblem, device: Device, family: str, order: Order
) -> tuple[Candidate | None, float]:
    """The candidate of the least estimate, and its seconds; None and infinity where none is feasible.

    Whether one is feasible takes longer to say than its estimate: only those are asked that would be first.
    """
    best, least = None, math.inf
    for candidate, config, seen in _tries(problem, device, family, order):
        seconds = _seconds(candidate, seen, device)
        if (best is None or seconds < least) and why_not(config, problem, device) is None:
            best, least = candidate, seconds
    return best, least


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def oriented(problem: GemmProblem, config: GemmConfig) -> GemmProblem:
    """`problem` as a kernel with `config` sees it: with M and N exchanged where that is turned."""
    if not config.turned:
        return problem
    return changed(
        problem, m=problem.n, n=problem.m, a_k_major=problem.b_k_major, b_k_major=problem.a_k_major,
        a_align=problem.b_align, b_align=problem.a_align,
        promotion=None if problem.promotion is None else problem.promotion.swapped(),
    )  # fmt: skip


def _half_empty(config: GemmConfig, problem: GemmProblem, order: Order) -> bool:
    """True where half of a tile or more lies beyond D, and a smaller tile would not."""
    least_n = INVARIANT_TILE_N if order is Order.ROW_SUMS else 16
    return (config.tile_m > 64 and config.tile_m >= 2 * problem.m) or (
        config.tile_n > least_n and config.tile_n >= 2 * problem.n
    )


def _split_pays(config: GemmConfig, problem: GemmProblem, device: Device, split: int) -> bool:
    """Splitting K makes sense where tiles leave SMs idle and each split keeps a few K tiles."""
    tiles = problem.l * _ceil_div(problem.m, config.tile_m) * _ceil_div(problem.n, config.tile_n)
    return tiles * split <= 2 * device.sm_count and problem.k >= 256 * split


def _cutting_pays(config: Sm90GemmConfig, problem: GemmProblem, device: Device) -> bool:
    """True where tiles may be cut along K for an even last wave: measurements say that it helps.

    Where sums are promoted, of tiles with two sets of them, whose clusters share loads: clusters that are at
    different offsets of K find less in L2.
    """
    if problem.promotion is None or problem.grouped or config.split_k > 1:
        return False
    if config.cluster_m * config.cluster_n == 1:
        return False
    found = shares(config, problem, device.sm_count)
    return found.tiles > found.clusters // 4 and two_partial_sets(config, problem.promotion)


def estimate(candidate: Candidate, problem: GemmProblem, device: Device) -> float:
    """Seconds that the model gives `candidate` on `problem`."""
    return _seconds(candidate, oriented(problem, candidate.config), device)


def _seconds(candidate: Candidate, problem: GemmProblem, device: Device) -> float:
    """The same, of a problem as the candidate sees it."""
    config = candidate.config
    model = MODELS[kind_of(problem, config.family)]
    chip = device.sm_count / 132  # rates of the whole chip were measured on 132 SMs
    cluster_m, cluster_n = getattr(config, "cluster_m", 1), getattr(config, "cluster_n", 1)
    tiles_m: float = _ceil_div(_ceil_div(problem.m, config.tile_m), cluster_m) * cluster_m
    if problem.grouped:  # of any size: half of the last cluster tile of a group is empty on average
        tiles_m = max(1.0, problem.m / (config.tile_m * cluster_m) + 0.5) * cluster_m
    tiles_n = _ceil_div(_ceil_div(problem.n, config.tile_n), cluster_n) * cluster_n
    tiles = math.ceil(tiles_m * tiles_n * problem.l) * config.split_k
    cluster = cluster_m * cluster_n
    # Clusters of four do not fill the GPCs of an H200: see `gemm_kernels.resident_ctas`.
    slots = (
        device.sm_count // cluster * cluster
        if cluster <= 2
        else device.sm_count * 10 // 11 // cluster * cluster
    )
    if slots == 0:
        return math.inf  # not one cluster fits on a GPU of so few SMs
    waves = _ceil_div(tiles, slots)

    k = _ceil_div(problem.k, config.split_k)
    rate = model.sm_flops * candidate.efficiency_for(problem.ab_bytes) * 2 / problem.ab_bytes
    loaded = (config.tile_m / cluster_n + config.tile_n / cluster_m) * k * problem.ab_bytes
    if problem.k * problem.ab_bytes % LINE_BYTES:
        loaded *= model.split_lines
    traffic = problem.traffic
    if traffic > L2_BYTES:
        loaded *= model.beyond_l2
    mainloop = max(2 * config.tile_m * config.tile_n * k / rate, loaded / model.sm_bandwidth)
    stored = 4 if config.split_k > 1 else problem.d_bytes + problem.operand_bytes
    finish = config.tile_m * config.tile_n * stored / model.epilogue
    if getattr(config, "schedule", None) is Schedule.PINGPONG:
        # The other warpgroup computes meanwhile; only the last tile's epilogue shows.
        compute = waves * max(mainloop, finish) + finish + model.tile_start
    elif getattr(config, "stream_k", False):
        compute = tiles / slots * (mainloop + finish + model.tile_start) + model.stream
    else:
        compute = waves * (mainloop + finish + model.tile_start)
    padded_flops = 2 * config.tile_m * config.tile_n * k * tiles
    power = padded_flops / (model.chip_flops * chip * 2 / problem.ab_bytes)
    partials = 4 * problem.m * problem.n * problem.l * config.split_k if config.split_k > 1 else 0
    memory = (traffic + partials) / model.bandwidth
    # Whichever limit is nearest rules, and one that is almost as near still costs something.
    limits = (compute, power, memory)
    worst = max(limits)
    seconds = model.launch + worst * sum((limit / worst) ** 8 for limit in limits) ** 0.125
    if config.split_k > 1:
        seconds += model.reduce + partials / model.bandwidth
    return seconds


@lru_cache(maxsize=4096)
def choose(problem: GemmProblem, device: Device, family: str, order: Order = Order.ANY) -> GemmConfig:
    """The configuration of `family` that the model ranks first, or the one for few rows.

    ValueError where none fits.
    """
    few = None if order is not Order.ANY or family != "sm90" else _for_few_rows(problem, device)
    if few is not None:
        return _rasterised(few, problem)
    best, _ = _first_ranked(problem, device, family, order)
    if best is None:
        raise ValueError(f"no {family} configuration fits {problem} on {device.name}")
    return _rasterised(best.config, problem)


def ranked(
    problem: GemmProblem, device: Device, family: str, order: Order = Order.ANY
) -> Iterator[GemmConfig]:
    """All configurations as the model ranks them, each with tiles in either order."""
    found = list(candidates(problem, device, family, order))
    for candidate in sorted(found, key=lambda candidate: estimate(candidate, problem, device)):
        config = _rasterised(candidate.config, problem)
        yield config
        if isinstance(config, Sm90GemmConfig):
            yield changed(config, raster_along_m=not config.raster_along_m)


def _for_few_rows(problem: GemmProblem, device: Device) -> Sm90GemmConfig | None:
    """The tile for few rows of A times a large B; None for other problems, and where it does not fit."""
    if problem.promotion is not None and problem.promotion.scaled:
        from kernels_dsl.config.few_rows_scaled import scaled_tile_for_few_rows  # few products have such

        config = scaled_tile_for_few_rows(problem, device)
    else:
        config = tile_for_few_rows(problem, device)
        if config is None and FEW < problem.m <= MOST:
            from kernels_dsl.config.many_rows import tile_for_many_rows  # nor such

            config = tile_for_many_rows(problem, device)
    if config is None:
        return None
    adjusted = adapted(config, problem)
    assert isinstance(adjusted, Sm90GemmConfig)
    return adjusted if why_not(adjusted, problem, device) is None else None


def _rasterised(config: GemmConfig, problem: GemmProblem) -> GemmConfig:
    """Walk the tiles in groups along the longer side, so that the shorter side's operand stays in L2."""
    if not isinstance(config, Sm90GemmConfig):
        return config
    problem = oriented(problem, config)
    tiles_m = _ceil_div(problem.m, config.tile_m * config.cluster_m)
    tiles_n = _ceil_div(problem.n, config.tile_n * config.cluster_n)
    return changed(config, raster_along_m=tiles_m >= tiles_n)


@frozen
class CopyModel:
    """Cost of copying an operand that TMA cannot read: `start` seconds (host and GPU) and `bandwidth` bytes a
    second.

    `narrow_efficiency` is the speed of the SM80 family with loads of 2, 4 and 8 bytes in place of 16.
    """

    start: float = 6.0e-6
    bandwidth: float = 2.5e12
    narrow_efficiency: tuple[tuple[int, float], ...] = ((2, 0.35), (4, 0.6), (8, 0.85), (16, 1.0))


COPY_MODEL = CopyModel()


def copying_pays(
    problem: GemmProblem, copied: GemmProblem, copied_bytes: int, copies: int, device: Device
) -> bool:
    """True where operands are copied for the SM90 family rather than run the SM80 family on them as they are.

    `problem` is as the caller gave it, `copied` after the copies, which write `copied_bytes` in all.
    """
    copy = copies * COPY_MODEL.start + 2 * copied_bytes / COPY_MODEL.bandwidth
    with_copy = copy + best_estimate(copied, device, "sm90")
    narrow = dict(COPY_MODEL.narrow_efficiency)[min(problem.a_align, problem.b_align)]
    launch = MODELS["sm80"].launch
    return with_copy <= launch + (best_estimate(problem, device, "sm80") - launch) / narrow


@lru_cache(maxsize=4096)
def best_estimate(problem: GemmProblem, device: Device, family: str) -> float:
    """Seconds of the best configuration of `family`; infinity where none fits."""
    return _first_ranked(problem, device, family, Order.ANY)[1]
