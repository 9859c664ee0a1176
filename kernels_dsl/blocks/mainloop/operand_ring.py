"""Shared memory of a warp-specialised GEMM, and the main loop that consumes it. Where its K tiles come from
is the producer's business: a counter along K (dense), or a list of kept blocks (block-sparse).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, NamedBarrier, give_turn
from kernels_dsl.blocks.hw.pipeline import make_tma_ring, sync_after_init
from kernels_dsl.blocks.hw.wgmma import issue_k_tile, issue_steps

SMEM_BYTES = 232448
"""Dynamic shared memory that one CTA may have on SM90 (227 KB)."""
BARRIER_BYTES = 1024
"""Kept for mbarriers, and for aligning the tiles behind them to the 1024 bytes of a swizzle atom."""
MOST_EPILOGUE_STAGES = 4


class Warpgroups:
    """What follows from a spec's `consumers` and `pingpong`."""

    consumers: int
    pingpong: bool
    copying_arrivals = 0
    """At a stage's full barrier, beside TMA's."""

    @property
    def threads(self) -> int:
        """Consumer warpgroups and one producer warpgroup."""
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def wgs_per_tile(self) -> int:
        """Consumer warpgroups that work on one tile together."""
        return 1 if self.pingpong else self.consumers


def stages_that_fit(
    config: object,
    wanted: int,
    stage_bytes: int,
    subtile_bytes: int,
    most: int = 64,
    scale_bytes: tuple[int, int] = (0, 0),
    taken: int = 0,
) -> tuple[int, int]:
    """(stages of the ring, staging buffers of the epilogue) that shared memory holds.

    The ring has `wanted` stages, or for 0 as many as fit beside two staging buffers of `subtile_bytes`, up to
    `most`, and `taken` bytes for other things. ValueError, which names `config`, where fewer than two of
    either fit. `scale_bytes`: what a stage takes beside the mbarriers, and what all take together.
    """

    def room(stages: int) -> int:
        needed = stages * (16 + scale_bytes[0]) + scale_bytes[1]
        beside = max(1, -(-needed // BARRIER_BYTES)) * BARRIER_BYTES
        return SMEM_BYTES - taken - beside

    stages = wanted or min(most, (SMEM_BYTES - taken - BARRIER_BYTES - 2 * subtile_bytes) // stage_bytes)
    if not wanted:
        while stages > 0 and stages * stage_bytes + 2 * subtile_bytes > room(stages):
            stages -= 1
    staging = min(MOST_EPILOGUE_STAGES, (room(stages) - stages * stage_bytes) // subtile_bytes)
    if stages < 2 or staging < 2:
        raise ValueError(
            f"{config} leaves room for {stages} stages and {staging} staging buffers, must be 2 of each"
        )
    return stages, staging


@cute.jit
def prefetch_descriptors(atoms: tuple, warp: Int32):
    """Warp 0 fetches the TMA descriptors of the atoms that are not None."""
    if warp == 0:
        for atom in atoms:
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)


def start(
    spec,
    atoms: tuple,
    dtypes: tuple,
    layouts: tuple,
    cluster: tuple[int, int],
    extra: tuple | None = None,
    alone: bool = False,
) -> tuple:
    """What every warp does first. Returns the ring, the tensors of `allocate`, and the warp's number.

    `extra`: (8-byte words of shared memory, function of a pointer to them that is called before the cluster
    syncs); what it returns comes last then. `alone`: no CTA of the cluster writes into another one's
    stages.
    `spec` has stages, stage_bytes, consumers and wgs_per_tile. With programmatic dependent launch all of this
    runs beside the tail of the kernel before this one, and the next one may do so too, on SMs whose CTAs are
    gone. Global memory is touched only behind it.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    prefetch_descriptors(atoms, warp)
    words, set_up = extra or (0, None)
    barriers, tensors = allocate(spec.stages, spec.consumers, dtypes, layouts, words)
    warps, arrivals = spec.wgs_per_tile * 4, spec.copying_arrivals
    ring = make_tma_ring(barriers, spec.stages, spec.stage_bytes, warps, cluster, arrivals, alone)
    more = () if set_up is None else (set_up(barriers + 2 * spec.stages),)
    sync_after_init(cluster)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    return ring, tensors, warp, *more


def allocate(stages: int, consumers: int, dtypes: tuple, layouts: tuple, words: int) -> tuple:
    """mbarriers of the ring, and the tensors A (M, K, slots), B (N, K, slots) and the staging of D.

    `words`: 8-byte words to keep free behind the mbarriers. `layouts`: of A, B and one warpgroup's staging;
    each consumer warpgroup has its own: (64, epi_n, stages, consumers).
    """

    @cute.struct
    class SharedStorage:
        barriers: cute.struct.MemRange[cutlass.Int64, stages * 2 + words]
        a: cute.struct.Align[cute.struct.MemRange[dtypes[0], cute.cosize(layouts[0])], 1024]
        b: cute.struct.Align[cute.struct.MemRange[dtypes[1], cute.cosize(layouts[1])], 1024]
        d: cute.struct.Align[cute.struct.MemRange[dtypes[2], cute.cosize(layouts[2]) * consumers], 1024]

    storage = cutlass.utils.SmemAllocator().allocate(SharedStorage)
    a_layout, b_layout, d_layout = layouts
    staging = cute.append(d_layout.outer, cute.make_layout(consumers, stride=cute.cosize(d_layout)))
    return storage.barriers.data_ptr(), (
        storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner),
        storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner),
        storage.d.get_tensor(staging, swizzle=d_layout.inner),
    )


def held_address(tensor: cute.Tensor, swizzle: cute.Swizzle | None = None) -> cute.Tensor:
    """The same tensor in shared memory, whose pointer has `swizzle`; for tensors at a constant address.

    Of that the compiler would work out a descriptor anew in front of each stage's first matrix instruction,
    which waits for it. What comes from a shuffle it keeps.
    """
    pointer = tensor.iterator
    address = cute.arch.make_warp_uniform(pointer.toint())
    kept = cute.make_ptr(
        pointer.dtype, address, pointer.memspace, assumed_align=pointer.alignment, swizzle_=swizzle
    )
    return cute.make_tensor(kept, tensor.layout)


def warpgroup_share(spec, tiled_mma: cute.TiledMma, tiles: tuple, thread: Int32, group: Int32) -> tuple:
    """(first row, fragments for `main_loop`) of consumer warpgroup `group`.

    Its share is the whole tile in ping-pong, else `spec.wg_m` rows. `tiles`: A (tile M, K, slots) and B
    (tile N, K, slots) in shared memory.
    """
    sA, sB = tiles
    row = Int32(0)
    if not spec.pingpong:
        row = group * spec.wg_m
        sA = cute.local_tile(sA, (spec.wg_m, cute.size(sA, mode=[1])), (group, 0, None))  # (wgM, bK, slots)
    thr_mma = tiled_mma.get_slice(thread)
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, slots)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, slots)
    columns = cute.size(sB, mode=[0])
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((spec.wg_m, columns)), cutlass.Float32)
    return row, (acc, tCrA, tCrB)


@cute.jit
def main_loop(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    fragments: tuple,  # acc (MMA, MMA_M, MMA_N), A and B descriptors (MMA, MMA_MN, MMA_K, slots)
    groups: Int32,
    pieces: cutlass.Constexpr,
    units: cutlass.Constexpr,
    next_turn: cutlass.Constexpr,
) -> pipeline.PipelineState:
    """acc = sum of A @ B over `groups` >= 1 times `len(pieces)` stages.

    `pieces`: for each stage of a group the instructions along K in each of its `units` slots. One group of
    WGMMAs stays in flight behind the newest. The first stage is peeled: it overwrites the accumulators, so
    nobody has to clear them. `next_turn`: None, or what to call once the last WGMMA is issued.
    """
    acc, tCrA, tCrB = fragments
    release = state.clone()
    for piece in cutlass.range_constexpr(len(pieces)):
        ring.consumer_wait(state)
        issue_k_tile(tiled_mma, acc, tCrA, tCrB, state.index, piece > 0, steps=pieces[piece], units=units)
        state.advance()
        if cutlass.const_expr(piece > 0):
            warpgroup.wait_group(1)
            ring.consumer_release(release)
            release.advance()
    for _ in cutlass.range(1, groups, unroll=1):
        for piece in cutlass.range_constexpr(len(pieces)):
            ring.consumer_wait(state)
            issue_k_tile(tiled_mma, acc, tCrA, tCrB, state.index, True, steps=pieces[piece], units=units)
            state.advance()
            warpgroup.wait_group(1)
            ring.consumer_release(release)
            release.advance()
    if cutlass.const_expr(next_turn is not None):
        next_turn()
    warpgroup.wait_group(0)
    ring.consumer_release(release)
    return state


@cute.jit
def two_ring_loop(
    rings: tuple,  # of A and of B
    states: tuple,  # of both
    tiled_mma: cute.TiledMma,
    fragments: tuple,  # acc (MMA, MMA_M, MMA_N), A and B descriptors (MMA, MMA_MN, MMA_K, slots)
    groups: Int32,
    pieces: cutlass.Constexpr,
) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
    """acc = sum of A @ B over `groups` >= 1 times `len(pieces)` stages of B; a stage of A serves several.

    `pieces`: instructions along K in each stage of B. Every stage is released as soon as it has been
    multiplied: while this warpgroup waits for its WGMMAs, another one's run.
    """
    state_a, state_b = multiply_group(rings, states, tiled_mma, fragments, pieces, True)
    for _ in cutlass.range(1, groups, unroll=1):
        state_a, state_b = multiply_group(rings, (state_a, state_b), tiled_mma, fragments, pieces, False)
    return state_a, state_b


def multiply_group(
    rings: tuple, states: tuple, tiled_mma, fragments: tuple, pieces: tuple, first: bool
) -> tuple:
    """The stages of one group of `two_ring_loop`; the `first` one overwrites the accumulators."""
    (ring_a, ring_b), (state_a, state_b) = rings, states
    acc, tCrA, tCrB = fragments
    steps_a, steps_b = (cute.size(x, mode=[2]) for x in (tCrA, tCrB))
    per_stage = steps_a // steps_b
    for piece, steps in enumerate(pieces):
        place = piece % per_stage
        if place == 0:
            ring_a.consumer_wait(state_a)
        ring_b.consumer_wait(state_b)
        a = [tCrA[None, None, place * steps_b + k, state_a.index] for k in range(steps)]
        b = [tCrB[None, None, k, state_b.index] for k in range(steps)]
        issue_steps(tiled_mma, acc, a, b, not (first and piece == 0))
        warpgroup.wait_group(0)
        ring_b.consumer_release(state_b)
        state_b.advance()
        if place == per_stage - 1 or piece == len(pieces) - 1:
            ring_a.consumer_release(state_a)
            state_a.advance()
    return state_a, state_b


def pass_turn(group: Int32):
    """`next_turn` of a ping-pong schedule for warpgroup `group` of two."""
    return lambda: give_turn(NamedBarrier.MMA_ORDER, 1 - group)
