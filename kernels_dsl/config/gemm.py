"""Configurations of the dense GEMM kernels: plain frozen data, free of any compiler import.

A configuration is part of a kernel's cache key, so every field is something that the compiled code
depends on. What shape gets which configuration is decided in `gemm_table`; whether one fits a
device is decided in `budget`.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from kernels_dsl.config.family import FAMILIES
from kernels_dsl.config.promotion import Promotion
from lowering.records import frozen

NUMBER = "number"
"""`EntryLayout.operand_modes` of one float32 number in global memory, whose address the operand is."""
MAXIMUM = "max"
"""The same of the one number that the largest magnitude of the result is written to."""
WRITTEN = "written "
"""Before the modes of a tensor of D's kind that the epilogue writes."""
PARTIALS = "partials"
"""`EntryLayout.operand_modes` of the float32 (L, parts, lines) that partial reductions are written to."""
SPLIT_REDUCTION_TILE = 16
"""Rows and columns of D of which the second kernel of split-K makes a part of a reduction."""
SM80_STAGING_PADDING = 8
"""Floats after each row that the SM80 epilogue stages: against bank conflicts."""


class Schedule(enum.Enum):
    """Ways in which the consumer warpgroups of the SM90 kernel share the output tiles."""

    COOPERATIVE = "cooperative"
    """All consumer warpgroups work on one tile, split along M."""
    PINGPONG = "pingpong"
    """Each consumer warpgroup owns a tile; one computes while the other stores."""


@frozen
class Sm90GemmConfig:
    """One instance of the TMA + WGMMA kernel.

    `tile_*` are elements of a CTA's tile; `tile_k` 0 stands for 128 bytes of K, the width of the
    widest swizzle. `stages` 0 takes as many pipeline stages as shared memory holds.
    `epi_tma` False stores D with predicated global stores, which any alignment allows.
    `turned` computes Dᵀ = Bᵀ Aᵀ: tile_m and cluster_m then go along the columns of D. M may only be
    64 rows times 1 to 4 in a tile, N any multiple of 8, so this may cut a D better.
    `raster_group` is the number of tiles (along the other mode) that are visited together so that
    their operands stay in L2; `raster_along_m` says that M is the mode that varies within a group.
    `stream_k`: tiles that would leave SMs idle in the last wave are cut along K into equal shares for all.
    `l2_prefetch`: while the kernel before this one still runs, each CTA has the L2 cache fetch as much of the
    larger operand as its ring holds. A cache that is coherent may: what that kernel writes is there too.
    `cluster_k` CTAs share a tile's K, and one of them adds their sums, in order, and stores the tile. With a
    cluster along M or N, as many of these are one cluster.
    `overlap`: a CTA takes half of an SM, and the next kernel starts in the other half when this one's last
    loads are on their way: with `l2_prefetch` there too, HBM is read without a pause between them.
    `late`: the next kernel starts at that moment, not as soon as SMs are free: its CTAs then spread evenly
    where this one leaves SMs without work.
    `evict_first`: lines of A, or with `turned` of B, which no other CTA reads, leave L2 before others: what
    is fetched early is still there when it is loaded. `evict_first_b`: lines of the other operand.
    `last_m`, `last_n`: rows of A and of B that are loaded for a tile that has no more; 0: all of the tile, of
    which TMA fills those beyond the tensor, at a quarter of the speed at which it loads others.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 0
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: Schedule = Schedule.COOPERATIVE
    stages: int = 0
    epi_tma: bool = True
    raster_group: int = 8
    raster_along_m: bool = True
    split_k: int = 1
    turned: bool = False
    stream_k: bool = False
    l2_prefetch: bool = False
    cluster_k: int = 1
    overlap: bool = False
    late: bool = False
    evict_first: bool = False
    evict_first_b: bool = False
    last_m: int = 0
    last_n: int = 0

    family = "sm90"
    traits = FAMILIES[family]

    @property
    def label(self) -> str:
        """ "128x256 cluster 2x1 pingpong split 4", for names of kernels."""
        clusters = self.cluster_m * self.cluster_n > 1
        words = [f"{self.tile_m}x{self.tile_n}"]
        words += [f"{self.tile_k} of K"] * (self.tile_k > 0)
        words += [f"{self.stages} stages"] * (self.stages > 0)
        words += [f"cluster {self.cluster_m}x{self.cluster_n}"] * clusters
        words += [f"{self.cluster_k} along K"] * (self.cluster_k > 1)
        words += ["pingpong"] * (self.schedule is Schedule.PINGPONG)
        words += ["turned"] * self.turned
        words += ["along-n"] * (not self.raster_along_m)
        words += ["plain-store"] * (not self.epi_tma)
        words += ["stream-k"] * self.stream_k
        words += ["l2-prefetch"] * self.l2_prefetch
        words += ["overlap"] * self.overlap
        words += ["late"] * self.late
        words += ["evict-first"] * self.evict_first
        words += ["evict-first-b"] * self.evict_first_b
        words += [f"last {self.last_m}x{self.last_n}"] * (self.last_m + self.last_n > 0)
        words += [f"split {self.split_k}"] * (self.split_k > 1)
        return " ".join(words)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that an SM has room for."""
        return 2 if self.overlap else 1

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    def tile_k_for(self, element_bytes: int) -> int:
        """Elements of K in a tile for operands of `element_bytes` bytes each."""
        return self.tile_k or 128 // element_bytes

    def with_plain_stores(self) -> Sm90GemmConfig:
        """The same without TMA stores, which unaligned results cannot have."""
        return replace(self, epi_tma=False)

    def in_orders(self, raster_group: int) -> list[Sm90GemmConfig]:
        """The same with tiles visited in each of the orders that groups of this size have."""
        return [replace(self, raster_group=raster_group, raster_along_m=along_m) for along_m in (True, False)]


@frozen
class Sm80GemmConfig:
    """One instance of the cp.async + mma.sync kernel, which also runs on every later GPU.

    `warps_m` x `warps_n` warps share a tile. `copy_bytes_a` and `copy_bytes_b` are the width of a
    load from global memory along the operand's contiguous mode: 16, 8 or 4 bytes use cp.async;
    an operand that is aligned to 2 bytes only takes plain predicated loads.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warps_m: int
    warps_n: int
    raster_group: int = 8
    split_k: int = 1
    copy_bytes_a: int = 16
    copy_bytes_b: int = 16

    family = "sm80"
    traits = FAMILIES[family]
    # Of what the other family has a choice.
    cluster_m = cluster_n = cluster_k = cluster_ctas = ctas_per_sm = 1
    turned = stream_k = epi_tma = pairs = False

    @property
    def label(self) -> str:
        """ "64x64 k32 stages 4 warps 2x2 copy 8+8 split 4", for names of kernels."""
        narrow = min(self.copy_bytes_a, self.copy_bytes_b) < 16
        words = [f"{self.tile_m}x{self.tile_n} k{self.tile_k} stages {self.stages}"]
        words += [f"warps {self.warps_m}x{self.warps_n}"]
        words += [f"copy {self.copy_bytes_a}+{self.copy_bytes_b}"] * narrow
        words += [f"split {self.split_k}"] * (self.split_k > 1)
        return " ".join(words)

    def tile_k_for(self, element_bytes: int) -> int:
        """Elements of K in a tile."""
        return self.tile_k

    def with_plain_stores(self) -> Sm80GemmConfig:
        """The same without TMA stores, which unaligned results cannot have."""
        return self

    def in_orders(self, raster_group: int) -> list[Sm80GemmConfig]:
        """The same with tiles visited in groups of this size."""
        return [replace(self, raster_group=raster_group)]

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    def pipeline_bytes(self, element_bytes: int) -> int:
        """Shared memory of all stages of A and B, whose elements have `element_bytes` bytes."""
        return (self.tile_m + self.tile_n) * self.tile_k * self.stages * element_bytes

    def staging_slabs(self, element_bytes: int) -> int:
        """Slabs (16 rows of each of warps_m warps) of the tile that the epilogue stages at a time.

        As many as fit in the pipeline's memory and an eighth more, which is what the padding of the rows
        takes where the tile would just fit; one at least, and a divisor of the tile's.
        """
        slabs = self.tile_m // (16 * self.warps_m)
        budget = self.pipeline_bytes(element_bytes) * 9 // 8
        fitting = (c for c in range(1, slabs + 1) if slabs % c == 0 and self._staging_bytes(c) <= budget)
        return max(fitting, default=1)

    def _staging_bytes(self, slabs: int) -> int:
        """Slabs of float32 rows with 8 floats of padding each."""
        return slabs * 16 * self.warps_m * (self.tile_n + SM80_STAGING_PADDING) * 4

    def smem_bytes(self, element_bytes: int) -> int:
        """Shared memory of a CTA: the epilogue reuses the pipeline's."""
        staging = self._staging_bytes(self.staging_slabs(element_bytes))
        return max(self.pipeline_bytes(element_bytes), staging)


@frozen
class EntryLayout:
    """The relation of a call's tensors to the kernel's (M, N, K, L): part of the kernel's key.

    `operand_modes` has for each epilogue operand the modes it has, in its own order, such as "n" for
    a bias of shape (N,), "mn", "lmn", "m1" for a scale a row of shape (M, 1), and "" for a scalar.
    `swap` computes D^T = B^T A^T. `promotion`: how partial sums of fp8 products are added, in the call's
    orientation; where it has scales, those of a and b come before the epilogue's operands. `grouped`: rows
    of a and d are in groups, each with a matrix of b; where each ends (`blocks.groups`) comes before all
    others. `gated`: d has half of the columns, one for two neighbours of the product.
    """

    operand_modes: tuple[str, ...] = ()
    swap: bool = False
    promotion: Promotion | None = None
    grouped: bool = False
    gated: bool = False


GemmConfig = Sm90GemmConfig | Sm80GemmConfig
