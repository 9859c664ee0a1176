"""Facts that the SM90 GEMM derives from its configuration and operand types at trace time."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from kernels_dsl.blocks.epilogue.prefetch import Along
from kernels_dsl.blocks.epilogue.tile_store import EpiloguePlan, epilogue_columns
from kernels_dsl.blocks.hw.layouts import major_mode
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.blocks.mainloop.operand_ring import SMEM_BYTES, Registers, Warpgroups, stages_that_fit
from kernels_dsl.blocks.mainloop.scale_ring import ARRIVALS
from kernels_dsl.blocks.schedule.scheduler import Raster
from kernels_dsl.config.budget import (
    accumulator_registers,
    cluster_sums,
    promoted_columns,
    sm90_beside_stages,
    two_partial_sets,
)
from kernels_dsl.config.cluster_sums import SumShape
from kernels_dsl.config.promotion import GROUP, Promotion, ScaleTiles, scale_tiles
from kernels_dsl.config.wgmma import shared_memory

PROMOTED_EPILOGUE_LIMIT = {1: 208, 2: 208, 3: 128}
"""Registers for accumulators and what the epilogue loads at its start, by warpgroups; more spills."""
EARLY_REGISTERS = {False: 32, True: 16}
"""Registers for operands that are loaded before the main loop, by promotion of sums; more spills."""

DEEP_COLUMNS = 128
"""Columns of which two sets of promoted sums spill where they meet in the ring."""

OVERLAP_BYTES = 96 << 10
"""Of an operand that L2 fetches for each CTA while the kernel before ends: HBM's of some 3 µs."""

EARLY = {False: (Along.ROWS, Along.COLUMNS), True: tuple(Along)}
"""Kinds of those operands. Single numbers lie in the L1 cache after the first time; from registers they would
be used before the last stage is released. Promoted sums release it before they are added up."""


@dataclass(frozen=True)
class GemmSpec(Warpgroups):
    """Static facts of one instance; extents in elements. `wg_m` rows of a tile belong to a warpgroup."""

    tile_m: int
    tile_n: int
    tile_k: int
    wg_m: int
    consumers: int
    pingpong: bool
    cluster: tuple[int, int]
    stages: int
    split_k: int
    raster_group: int
    raster_along_m: bool
    mma_dtypes: tuple[type[cutlass.Numeric], type[cutlass.Numeric]]  # of A and B; one, but for 8-bit floats
    mma_n: int  # columns of an instruction: tile_n, or a divisor where partial sums are promoted
    promotion: Promotion | None
    two_partial_sets: bool  # of promoted sums, see `blocks.mainloop.promoted_ring`
    ahead: bool  # then: a tile's first stage is multiplied beside the epilogue of the one before
    epilogue: EpiloguePlan
    stream_k: bool  # some tiles are cut along K, see `blocks.schedule.scheduler.CutTiles`
    l2_prefetch: bool  # of the larger operand, before the kernel that runs is over
    cluster_k: int  # CTAs that share a tile's K
    shared_sums: SumShape | None  # of theirs, see `blocks.reduce.cluster_sums`
    overlap: bool  # a CTA has half of the SM
    late: bool  # the next kernel starts behind the last loads
    evict_first: bool  # A's lines leave L2 first
    evict_first_b: bool  # B's do
    last: tuple[int, int]  # rows of A and of B that are loaded for a tile with no more; 0: all

    @property
    def cluster_rows(self) -> int:
        """Rows of a cluster's tiles."""
        return self.tile_m * self.cluster[0]

    @property
    def stage_bytes(self) -> int:  # type: ignore[override]
        """Bytes of one stage of A and B in shared memory, which are what TMA announces."""
        return (self.tile_m + self.tile_n) * self.tile_k * self.mma_dtypes[0].width // 8

    @property
    def last_stage_bytes(self) -> int:
        """The same of a tile of which `last` rows are loaded."""
        rows = [last or tile for last, tile in zip(self.last, (self.tile_m, self.tile_n))]
        return sum(rows) * self.tile_k * self.mma_dtypes[0].width // 8

    @property
    def scales(self) -> ScaleTiles | None:
        """Layout of the scales of 128 of K in a stage."""
        if self.promotion is None or not self.promotion.scaled:
            return None
        return scale_tiles(self.promotion, (self.tile_m, self.tile_n), (WGMMA_M, self.mma_n))

    @property
    def assists(self) -> bool:  # type: ignore[override]
        """A warp copies those scales."""
        return self.scales is not None

    @property
    def copying_arrivals(self) -> int:  # type: ignore[override]
        """Of the warp that copies those scales, at a stage."""
        return 0 if self.scales is None else ARRIVALS

    def prefetched_stages(self, rows: int) -> int:
        """K tiles of an operand, of `rows` rows a tile, that L2 fetches early: those that the ring holds.

        Half of a ring may be too little to read for while the kernel before ends.
        """
        tile = rows * self.tile_k * self.mma_dtypes[0].width // 8
        return max(self.stages, OVERLAP_BYTES // tile) if self.overlap else self.stages

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """CTAs that share a tile's K load each for itself."""
        return self.cluster_k > 1 and self.cluster == (1, 1)

    @property
    def parts_of_k(self) -> int:  # type: ignore[override]
        """Clusters of CTAs that share a tile's K."""
        return self.cluster_k

    @property
    def loading_ctas(self) -> int:
        """CTAs that have the same K tiles, and load them for each other."""
        return super().cluster_ctas

    @property
    def cluster_ctas(self) -> int:
        return self.loading_ctas * self.cluster_k

    @property
    def raster(self) -> Raster:
        """Order of a plane's tiles."""
        return Raster(self.raster_group, self.raster_along_m)

    @property
    def registers(self) -> Registers:  # type: ignore[override]
        """64 K registers serve the CTA.

        Two sets of sums fit in 224. With 240, ptxas gives up uniform registers in all of some kernels, and
        matrix instructions wait for their descriptors' way there.
        """
        if self.overlap:
            return {1: Registers(24, 232), 2: Registers(24, 104)}[self.consumers]
        if self.promotion is not None and self.consumers < 3:
            return Registers(56, 224)
        return {1: Registers(40, 232), 2: Registers(24, 240), 3: Registers(32, 160)}[self.consumers]


def make_spec(
    config,
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    promotion: Promotion | None = None,
    gated: bool = False,
) -> GemmSpec:
    """Completes an `Sm90GemmConfig` for operands of these types. ValueError names what does not fit."""
    dtypes = mA.element_type, mB.element_type
    if dtypes[0] is not dtypes[1] and not (dtypes[0].width == dtypes[1].width == 8):
        raise ValueError(
            f"A and B must have one dtype, or both 8 bits; they have {dtypes[0]} and {dtypes[1]}"
        )
    mma_dtypes = tuple(cutlass.TFloat32 if dtype is cutlass.Float32 else dtype for dtype in dtypes)
    element_bytes = mma_dtypes[0].width // 8
    pingpong = config.schedule.name == "PINGPONG"
    if pingpong and promotion is not None:
        raise ValueError("schedule is pingpong, must be cooperative where partial sums are promoted")
    consumers = 2 if pingpong else {64: 1, 128: 2, 192: 3, 256: 2}[config.tile_m]
    wg_m = config.tile_m if pingpong else config.tile_m // consumers
    # Two subtiles of a product make one of a gated D.
    epi_n = epilogue_columns(config.tile_n // 2 if gated else config.tile_n, mD.element_type)
    tile_k = config.tile_k_for(element_bytes)
    if promotion is not None and tile_k != GROUP:
        raise ValueError(f"tile_k is {tile_k}; it must be {GROUP} where partial sums are promoted")
    stage_bytes = (config.tile_m + config.tile_n) * tile_k * element_bytes
    subtile_bytes = consumers * 64 * epi_n * mD.element_type.width // 8
    stages, epi_stages = stages_that_fit(
        config, config.stages, stage_bytes, subtile_bytes, scale_bytes=sm90_beside_stages(config, promotion),
        taken=SMEM_BYTES - shared_memory(SMEM_BYTES, config.ctas_per_sm),
    )  # fmt: skip
    m_major = config.epi_tma and major_mode(mD) == cute.nvgpu.OperandMajorMode.MN
    sums = cluster_sums(config) if config.cluster_k > 1 else None
    ring_sums = sums is not None and sums.in_ring
    deep = two_partial_sets(config, promotion) and not (ring_sums and config.tile_n >= DEEP_COLUMNS)
    # 8-bit results take more registers; the next tile's stages come behind sums in the ring.
    ahead = deep and mD.element_type.width > 8 and not ring_sums
    # The epilogue has the registers of partial sums to spare.
    few = promotion is None or config.overlap or ring_sums
    limit = 0 if few else PROMOTED_EPILOGUE_LIMIT[consumers]
    plan = EpiloguePlan(
        (wg_m, config.tile_n), epi_n, epi_stages, mD.element_type, config.epi_tma, m_major,
        spare=max(0, limit - accumulator_registers(config) * (2 if ahead else 1)),
        before=0 if config.cluster_k > 1 and consumers == 3 else EARLY_REGISTERS[promotion is not None],
        early=EARLY[promotion is not None],
    )  # fmt: skip
    return GemmSpec(
        config.tile_m, config.tile_n, tile_k, wg_m=wg_m, consumers=consumers, pingpong=pingpong,
        cluster=(config.cluster_m, config.cluster_n), stages=stages, split_k=config.split_k,
        raster_group=config.raster_group, raster_along_m=config.raster_along_m, mma_dtypes=mma_dtypes,
        mma_n=config.tile_n if promotion is None else promoted_columns(config, promotion),
        promotion=promotion, two_partial_sets=deep, ahead=ahead, epilogue=plan, stream_k=config.stream_k,
        l2_prefetch=config.l2_prefetch, cluster_k=config.cluster_k, shared_sums=sums,
        overlap=config.overlap, late=config.late or config.overlap,
        evict_first=config.evict_first, evict_first_b=config.evict_first_b,
        last=(config.last_m, config.last_n),
    )  # fmt: skip
