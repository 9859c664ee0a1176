"""Step 8: CTAs that stay, in an order that L2 likes, and that share their loads.

    python tutorials/08_gemm_persistent.py

Adds:      persistent tile scheduler, rasterisation, clusters, multicast.
Reuses:    step 7's roles, main loop and tile; step 6's store.
Measures:  against step 7 and cuBLAS; each of the three additions by itself; what L2 and memory deliver.

WHY
Three things still cost step 7.

1. *Between tiles.* A CTA starts with an empty ring and ends with a store, and the tensor cores idle in both.
   A *persistent* kernel launches as many CTAs as there are SMs; each walks a list of tiles. The producer
   knows the list as well, and fills the ring with the next tile's loads while consumers still store:

       producer   | load tile 0 ...... | load tile 132 ...... | ...
       consumers      | wgmma tile 0 ...... | store 0 | wgmma tile 132 ...... | store 132 | ...

2. *L2.* 132 tiles are worked on at one time, and read their K tiles from memory about together. Row by row,
   where D is 128 tiles wide, that is one row of A and *all* of B for each 132 tiles: 33 000 rows of K, more
   than memory delivers in that time. *Rasterisation* changes the order: groups of `group` rows, column
   by column within the group. 8 rows x 17 columns are the same number of tiles and need 5 300 rows of K:

       group = 1 (row by row)       group = 4
       0  1  2  3  4  5  6  7       0  4  8 12 16 20 24 28       tiles in flight cover a block that is about
       8  9 10 11 12 13 14 15       1  5  9 13 17 21 25 29       square: fewer rows of A + columns of B for
      16 17 18 19 20 21 22 23       2  6 10 14 18 22 26 30       the same number of tiles
      24 25 26 27 28 29 30 31       3  7 11 15 19 23 27 31

3. *L2 to SM.* Two CTAs on neighbouring rows load the same tile of B. In a *cluster* of two, CTAs run at the
   same time on SMs close to each other and can write into each other's shared memory. *Multicast*: each loads
   half of B's tile and TMA delivers it to both. A 128 x 256 tile then costs 128 + 128 rows in place of 384:

       CTA 0:  A rows 0-127     B half 0 --+--> both
       CTA 1:  A rows 128-255   B half 1 --+--> both

   The price is that a stage may be overwritten only once *both* CTAs have read theirs. So consumers arrive at
   the empty barriers of both CTAs: 8 warps x 2 CTAs = 16 arrivals. `multicast_release_count` in
   `kernels_dsl.blocks.hw.pipeline` computes it, and the ring takes it from there.
"""

from dataclasses import dataclass
from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.pipeline import consumer_state, make_tma_ring, producer_state, sync_after_init
from lowering import jit

step6 = common.load("06_gemm_simple")
step7 = common.load("07_gemm_warp_specialized")
CONSUMERS, WARPGROUP, DEFAULT = step7.CONSUMERS, step7.WARPGROUP, step7.Tile()
SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), (4096, 32768, 4096))  # M, N, K that are measured


@dataclass(frozen=True)
class Plan:
    """A tile, CTAs of a cluster (along M), and rows of a raster group in cluster tiles."""

    tile: step7.Tile = DEFAULT
    cluster: int = 2
    group: int = 8

    @property
    def label(self) -> str:
        return f"{self.tile.label}, cluster {self.cluster}, group {self.group}"


# ---- kernel ------------------------------------------------------------------------------------------------


@cute.jit
def tile_at(index: Int32, grid: tuple, group: cutlass.Constexpr) -> tuple:
    """Position `index` of the walk over `grid` = (rows, columns): (row, column).

    The last group has what is left of the rows.
    """
    number = index // (group * grid[1])
    first = number * group
    height = cutlass.min(grid[0] - first, Int32(group))
    within = index - first * grid[1]
    return first + within % height, within // height


@cute.kernel
def gemm_kernel(
    tiled_mma: cute.TiledMma,
    loads: tuple,  # (atom of A, coordinates of A (M, K), the same of B (N, K))
    layouts: tuple,  # swizzled (bM, bK, stages) and (bN, bK, stages)
    mD: cute.Tensor,  # (M, N)
    extent: tuple,  # ((rows, columns) of cluster tiles, K tiles)
    plan: cutlass.Constexpr,
):
    """Step 7's kernel; the roles loop over tiles."""
    tile = plan.tile
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    barriers, sA, sB = step7.allocate(layouts, tile)
    ring = make_tma_ring(barriers, tile.stages, tile.stage_bytes, CONSUMERS * 4, (plan.cluster, 1))
    sync_after_init((plan.cluster, 1))  # barriers of *both* CTAs are ready before anyone signals one
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == CONSUMERS:
        cute.arch.setmaxregister_decrease(24)
        if warp == CONSUMERS * 4:
            produce(ring, loads, (sA, sB), extent, plan)
    else:
        cute.arch.setmaxregister_increase(240)
        consume(ring, tiled_mma, (sA, sB), mD, extent, plan, group)


@cute.jit
def produce(ring, loads: tuple, s_tiles: tuple, extent: tuple, plan: cutlass.Constexpr):
    """One warp of each CTA loads its own A, and its share of B for the whole cluster."""
    load_a, tma_a, load_b, tma_b = loads
    grid, k_tiles = extent
    rank, cluster, _ = cute.arch.block_idx()
    clusters = cute.arch.grid_dim()[1]
    tile = plan.tile
    gA = cute.local_tile(tma_a, (tile.m, tile.k), (None, None))  # (bM, bK, restM, restK)
    gB = cute.local_tile(tma_b, (tile.n, tile.k), (None, None))  # (bN, bK, restN, restK)
    tAsA, tAgA = tma.load_partition(load_a, gA, s_tiles[0], cute.make_layout(1), Int32(0))
    # Of B, this CTA loads share number `rank` of `cluster`.
    tBsB, tBgB = tma.load_partition(load_b, gB, s_tiles[1], cute.make_layout(plan.cluster), rank)
    extra = {}
    if cutlass.const_expr(plan.cluster > 1):
        extra["mcast_mask"] = cutlass.Int16((1 << plan.cluster) - 1)  # one bit a CTA: to all of them
    state = producer_state(tile.stages)
    index = cluster
    while index < grid[0] * grid[1]:
        row, column = tile_at(index, grid, plan.group)
        tA, tB = tAgA[None, row * plan.cluster + rank, None], tBgB[None, column, None]
        for k in cutlass.range(k_tiles, unroll=1):
            ring.producer_acquire(state)
            full = ring.producer_get_barrier(state)
            cute.copy(load_a, tA[None, k], tAsA[None, state.index], tma_bar_ptr=full)
            cute.copy(load_b, tB[None, k], tBsB[None, state.index], tma_bar_ptr=full, **extra)
            state.advance()
        index += clusters
    ring.producer_tail(
        state
    )  # the other CTA still signals this one's barriers: do not leave before it is done


@cute.jit
def consume(ring, tiled_mma, s_tiles: tuple, mD, extent: tuple, plan: cutlass.Constexpr, group: Int32):
    """One warpgroup: bM / 2 rows of every tile of the walk. The ring's state goes on from tile to tile."""
    grid, k_tiles = extent
    tile = plan.tile
    rank, cluster, _ = cute.arch.block_idx()
    clusters = cute.arch.grid_dim()[1]
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    fragments = step7.fragments(tiled_mma, s_tiles, tile, group, thread)
    state = consumer_state(tile.stages)
    index = cluster
    while index < grid[0] * grid[1]:
        row, column = tile_at(index, grid, plan.group)
        state, release = step7.issue_all(ring, state, tiled_mma, fragments, k_tiles)
        step7.finish(ring, release)
        m = (row * plan.cluster + rank) * tile.m + group * (tile.m // CONSUMERS)
        step6.store_accumulators(fragments[0], mD, (m, column * tile.n), thread)
        index += clusters


# ---- host --------------------------------------------------------------------------------------------------


@jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, max_ctas: Int32, stream, plan: cutlass.Constexpr):
    """D (M, N) = A (M, K) @ B (N, K).T in bfloat16, by at most `max_ctas` CTAs."""
    tiled_mma, loads, layouts = step7.set_up(mA, mB, plan.tile, plan.cluster)
    extent, clusters = schedule(mA, mD, max_ctas, plan)
    gemm_kernel(tiled_mma, loads, layouts, mD, extent, plan).launch(
        grid=(plan.cluster, clusters, 1),
        block=((CONSUMERS + 1) * WARPGROUP, 1, 1),
        cluster=(plan.cluster, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


def schedule(mA: cute.Tensor, mD: cute.Tensor, max_ctas: Int32, plan: Plan) -> tuple:
    """((rows, columns of cluster tiles), K tiles), and how many clusters there are to walk over them."""
    tile = plan.tile
    grid = (cute.ceil_div(mD.shape[0], tile.m * plan.cluster), cute.ceil_div(mD.shape[1], tile.n))
    clusters = cutlass.max(cutlass.min(max_ctas // plan.cluster, grid[0] * grid[1]), Int32(1))
    return (grid, cute.ceil_div(mA.shape[1], tile.k)), clusters


# ---- check, measure ----------------------------------------------------------------------------------------


def call(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, plan: Plan, max_ctas: int | None = None) -> None:
    """`gemm` with one CTA for each SM."""
    gemm(a, b, d, max_ctas or common.sm_count(), plan=plan)


def check(lab: common.Lab) -> None:
    """More tiles than CTAs, so that each CTA walks; a group that does not divide; ragged sizes."""
    small = step7.Tile(128, 64, 64, 2)
    for shape in lab.pick(((2048, 2048, 512), (1000, 2056, 520)), ((128, 192, 128), (264, 136, 72))):
        for plan in lab.pick(
            (Plan(), Plan(cluster=1, group=3), Plan(group=1)), (Plan(small), Plan(small, 1, 2))
        ):
            m, n, k = shape
            a, b = lab.integers(m, k, dtype=torch.bfloat16), lab.integers(n, k, dtype=torch.bfloat16)
            d = lab.poison(m, n, dtype=torch.bfloat16)
            lab.launch(gemm, a, b, d, lab.pick(common.sm_count(), 2), plan=plan)
            lab.equal(f"{m}×{n}×{k}, {plan.label}", d, a.double() @ b.double().T)


PLANS = {
    "step 7": None,
    "step 8, persistent, row by row": Plan(cluster=1, group=1),
    "step 8, and groups of 8 rows": Plan(cluster=1, group=8),
    "step 8, and clusters of 2": Plan(cluster=2, group=8),
    "step 8, clusters of 2, row by row": Plan(cluster=2, group=1),
}


def variants(m: int, n: int, k: int) -> dict:
    """Calls on an (m, k) and an (n, k) matrix: step 7, one addition after the other, and cuBLAS."""
    a, b, d = step6.problem(m, n, k)
    plain = partial(step7.gemm, a, b, d, tile=step7.Tile())
    calls = {name: plain if plan is None else partial(call, a, b, d, plan) for name, plan in PLANS.items()}
    return {**calls, "cuBLAS": partial(torch.mm, a, b.T, out=d)}


def measure(bench: common.Bench) -> None:
    """Time. What L2 and memory deliver meanwhile is counted by `tutorials/traffic.py`."""
    for m, n, k in SHAPES:
        calls = variants(m, n, k)
        bench.compare(f"{m}×{n}×{k} bfloat16", calls, flops=2.0 * m * n * k, baseline="cuBLAS")


# ---- takeaways ---------------------------------------------------------------------------------------------
# * Producer and consumers walk the same list; the ring's state simply goes on.
# * The order of tiles decides what L2 holds, clusters how often it is asked; `python tutorials/traffic.py`
#   counts both. At 4096 x 32768 x 4096 groups of 8 rows read a fifth as much from memory, and gain 19 %. At
#   8192³ they read half as much, but memory keeps up in any order there, and nothing is gained.
# * Clusters take a third of the reads off L2.
# * Shared stages need arrivals from everybody who reads them, in every CTA.
# * exercise: python tutorials/exercises/08.py

if __name__ == "__main__":
    common.main(check, measure)
