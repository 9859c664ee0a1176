"""Facts that the SM90 block-sparse GEMM derives from its configuration and operand types at trace time."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw.layouts import major_mode
from kernels_dsl.blocks.mainloop.operand_ring import Registers, Warpgroups, stages_that_fit
from kernels_dsl.config.bsr import NanRule, Sm90BsrConfig
from kernels_dsl.config.bsr_tiles import ROW, STAGE_K

MOST_N = 256
"""Of one WGMMA."""
MMA_K_BYTES = 32
"""Bytes of K in a WGMMA."""
LEAST_BOX_K = 16
"""Rows of the dense matrix in a box of TMA, at least, where it is contiguous along the other mode."""
PAIR = 2
"""CTAs of a cluster that takes two lists."""
LATE_GROUP = 32 << 10
"""Bytes of a group from which on the next work item is taken late."""


@dataclass(frozen=True)
class BsrSpec(Warpgroups):
    """Static facts of one instance; extents in elements. `wg_m` x `wg_n` of a tile belong to a warpgroup.

    A group of a list is one block, cut into `pieces` stages, or `units` blocks that share a stage; `pieces`
    has the instructions along K of each. `sub_clusters`: cluster tiles that a block takes along D.
    `pairs`: the CTAs of a cluster may have two lists, and load kept blocks for themselves.
    `promoted`: each block's sum is scaled and added to a second set of accumulators. `nans`: see `NanRule`.
    `halves`: what a pair shares of the dense matrix is cut between columns, as boxes along K were too short.
    """

    tile_m: int
    tile_n: int
    unit_k: int
    units: int
    pieces: tuple[int, ...]
    wg_m: int
    wg_n: int
    consumers: int
    pingpong: bool
    cluster: tuple[int, int]
    sparse_on_m: bool
    sub_clusters: int
    stages: int
    mma_dtypes: tuple[type[cutlass.Numeric], type[cutlass.Numeric]]  # of A and B; one, but for 8-bit floats
    promoted: bool
    epilogue: EpiloguePlan
    kept_k: int
    kept_stages: int
    split: bool
    pairs: bool
    nans: NanRule
    halves: bool

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def block_tiles(self) -> int:
        """CTAs' tiles that a block takes along D."""
        return self.sub_clusters * (1 if self.pairs else self.cluster[0 if self.sparse_on_m else 1])

    @property
    def two_rings(self) -> bool:
        """True where kept blocks, `kept_k` of K a stage, have a ring of their own."""
        return self.kept_stages > 0

    @property
    def assists(self) -> bool:  # type: ignore[override]
        """A second producer warp fills it."""
        return self.two_rings

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """CTAs load the dense matrix each for itself."""
        return self.two_rings and not self.pairs

    @property
    def kept_parts(self) -> int:
        """Stages of a kept block in a ring of their own."""
        return -(-len(self.pieces) * self.unit_k // self.kept_k)

    @property
    def kept_bytes(self) -> int:
        """Bytes of a stage of kept blocks in a ring of their own."""
        return self.tile_m * self.kept_k * self.mma_dtypes[0].width // 8

    @property
    def shares_n(self) -> int:
        """Warpgroups that share a tile along N; each has a load of B of its own."""
        return self.tile_n // self.wg_n

    @property
    def part_n(self) -> int:
        """Columns of a warpgroup's tile that a CTA of a pair loads for both; all where it loads half of K."""
        return self.wg_n // PAIR if self.halves else self.wg_n

    @property
    def may_idle(self) -> bool:
        """A cluster may have no item at all: only the GPU knows how many there are."""
        return self.split or self.nans is NanRule.REDO

    @property
    def stage_bytes(self) -> int:  # type: ignore[override]
        """Bytes of one stage in shared memory, of A and B or of B, which are what TMA announces."""
        rows = self.tile_n if self.two_rings else self.tile_m + self.tile_n
        return rows * self.unit_k * self.units * self.mma_dtypes[0].width // 8

    @property
    def asks_late(self) -> bool:
        """True where an item is taken towards the end of the list before, not at its start.

        Uneven lists even out better. But where groups are small asking takes longer than the ring covers, and
        a producer of large blocks, or one that follows scales too, has no registers left for it.
        """
        if self.promoted or (self.sparse_on_m and not self.two_rings):
            return False
        group = (self.tile_m + self.tile_n) * self.unit_k * self.units * len(self.pieces)
        return group * self.mma_dtypes[0].width // 8 >= LATE_GROUP

    @property
    def registers(self) -> Registers:  # type: ignore[override]
        """64 K registers serve the CTA."""
        return Registers(32, 160) if self.consumers == 3 else Registers(40, 232)


def make_spec(
    config: Sm90BsrConfig, mS: cute.Tensor, mX: cute.Tensor, mD: cute.Tensor, promoted: bool, nans: NanRule
) -> BsrSpec:
    """Completes a configuration for kept blocks mS (block, K, blocks, L). ValueError: what does not fit."""
    dtypes = (mS.element_type, mX.element_type)
    if dtypes[0] is not dtypes[1] and not dtypes[0].width == dtypes[1].width == 8:
        raise ValueError(f"both factors must have one dtype, or both 8 bits; they have {dtypes}")
    element_bytes = dtypes[0].width // 8
    block, block_k = cute.size(mS, mode=[0]), cute.size(mS, mode=[1])
    tile_m, tile_n = config.tile
    if block % (config.tile_s * config.cluster_s):
        raise ValueError(
            f"tile_s * cluster_s is {config.tile_s * config.cluster_s}, must divide the block's {block}"
        )
    count = -(-block_k // config.unit_k)
    if count > 1 and config.units > 1:
        raise ValueError(f"units is {config.units}, must be 1 where a block takes {count} loads")
    if config.kept_stages and (config.units > 1 or tile_n <= MOST_N or config.cluster_s > 1):
        raise ValueError(f"kept_stages is {config.kept_stages}, must be 0 but for tiles above 64 x {MOST_N}")
    if config.pairs and (config.cluster_x != 2 or block != config.tile_s or config.split):
        raise ValueError(f"pairs is True, must be False but for whole lists and blocks in twos: {config}")
    step = MMA_K_BYTES // element_bytes
    pieces = tuple(-(-min(config.unit_k, block_k - i * config.unit_k) // step) for i in range(count))
    pingpong = config.schedule.name == "PINGPONG"
    shares_n = 1 if tile_n <= MOST_N else 2
    if shares_n > 1 and (pingpong or promoted or tile_m != 64 or tile_n > 2 * MOST_N):
        raise ValueError(f"tile is {tile_m} x {tile_n}, must be cooperative and have 64 rows for such an N")
    consumers = 2 if pingpong or shares_n > 1 else {64: 1, 128: 2, 192: 3}.get(tile_m, 2)
    wg_m = tile_m if pingpong else tile_m * shares_n // consumers
    wg_n = tile_n // shares_n
    epi_n = epilogue_columns(wg_n, mD.element_type)
    rows = tile_n if config.kept_stages else tile_m + tile_n
    stage_bytes = rows * config.unit_k * config.units * element_bytes
    subtile_bytes = consumers * 64 * epi_n * mD.element_type.width // 8
    kept_bytes = config.kept_stages * tile_m * STAGE_K * element_bytes
    stages, epi_stages = stages_that_fit(
        config, config.stages, stage_bytes, subtile_bytes, most=12, taken=kept_bytes
    )
    along_x = config.sparse_on_m and major_mode(mX) == cute.nvgpu.OperandMajorMode.MN
    halves = config.pairs and along_x and config.unit_k < PAIR * LEAST_BOX_K and wg_n % (PAIR * ROW) == 0
    m_major = config.epi_tma and major_mode(mD) == cute.nvgpu.OperandMajorMode.MN
    plan = EpiloguePlan((wg_m, wg_n), epi_n, epi_stages, mD.element_type, config.epi_tma, m_major)
    return BsrSpec(
        tile_m, tile_n, config.unit_k, config.units, pieces, wg_m=wg_m, wg_n=wg_n, consumers=consumers,
        pingpong=pingpong, cluster=config.cluster, sparse_on_m=config.sparse_on_m,
        sub_clusters=block // (config.tile_s * config.cluster_s), stages=stages,
        mma_dtypes=dtypes if config.sparse_on_m else dtypes[::-1], promoted=promoted, epilogue=plan,
        kept_k=STAGE_K if config.kept_stages else config.unit_k, kept_stages=config.kept_stages,
        split=config.split, pairs=config.pairs, nans=nans, halves=halves,
    )  # fmt: skip
