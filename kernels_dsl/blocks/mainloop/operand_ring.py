"""Shared memory of a warp-specialised GEMM, and the main loop that consumes it. The producer alone knows the
source of K tiles: a counter along K (dense), or a list of kept blocks (block-sparse).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, Consumer
from kernels_dsl.blocks.hw.pipeline import make_tma_ring, release, sync_after_init, take
from kernels_dsl.blocks.hw.wgmma import issue_k_tile, issue_steps

SMEM_BYTES = 232448
"""Dynamic shared memory that one CTA may have on SM90 (227 KB)."""
BARRIER_BYTES = 1024
"""Kept for mbarriers, and for aligning the tiles after them to the 1024 bytes of a swizzle atom."""
MOST_EPILOGUE_STAGES = 4


class Registers(NamedTuple):
    """Registers of a thread after setmaxnreg."""

    producer: int
    consumer: int


class Warpgroups:
    """Base of the kernels' specs: a producer warpgroup, consumer warpgroups, and the ring between them."""

    consumers: int
    pingpong: bool
    wg_m: int
    """Rows of a tile that a consumer warpgroup works on."""
    cluster: tuple[int, int]
    stages: int
    stage_bytes: int
    mma_dtypes: tuple[type[cutlass.Numeric], type[cutlass.Numeric]]
    """Of A and B."""
    epilogue: Any
    """Its `EpiloguePlan`."""
    registers: Registers
    copying_arrivals = 0
    """At a stage's full barrier, beside TMA's."""
    assists = False
    """A second producer warp has a role."""
    alone = False
    """No CTA of the cluster writes into another one's stages."""
    parts_of_k = 1
    """Clusters that are launched as one."""

    @property
    def threads(self) -> int:
        """Consumer warpgroups and one producer warpgroup."""
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1]

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


class Layouts(NamedTuple):
    """Staged layouts: A (M, K, slots), B (N, K, slots), D of one warpgroup (64, epi_n, stages)."""

    a: cute.ComposedLayout
    b: cute.ComposedLayout
    d: cute.ComposedLayout


class SharedTiles(NamedTuple):
    """Shared memory: A (M, K, slots), B (N, K, slots), staging of D (64, epi_n, stages, consumers)."""

    a: cute.Tensor
    b: cute.Tensor
    d: cute.Tensor


class ExtraWords(NamedTuple):
    """8-byte words of shared memory after the ring's mbarriers; `set_up` gets their address at the start."""

    words: int
    set_up: Callable[[cute.Pointer], Any]


class Start(NamedTuple):
    """Knowledge of every warp from the start. `extra`: what `ExtraWords.set_up` returned."""

    ring: pipeline.PipelineTmaAsync
    tiles: SharedTiles
    warp: Int32
    extra: Any


@cute.jit
def prefetch_descriptors(atoms: cutlass.Constexpr, warp: Int32):
    """Warp 0 fetches the TMA descriptors of the atoms that are not None."""
    if warp == 0:
        for atom in atoms:
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)


def start(
    spec: Warpgroups,
    atoms: list[cute.CopyAtom | None],
    layouts: Layouts,
    extra: ExtraWords | None = None,
    wait: bool = True,
    launch: bool = True,
) -> Start:
    """Sets up shared memory, mbarriers and the cluster; the first thing that every warp does.

    With programmatic dependent launch all of this runs beside the tail of the kernel before this one, and the
    next one may do so too, on SMs whose CTAs are gone. Global memory is touched only after it. Without `wait`
    the kernel itself waits for the one before; without `launch` it says itself when the next may start.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    prefetch_descriptors(atoms, warp)
    barriers, tiles = allocate(spec, layouts, 0 if extra is None else extra.words)
    ring = make_tma_ring(
        barriers, spec.stages, spec.stage_bytes, spec.wgs_per_tile * 4, spec.cluster,
        spec.copying_arrivals, spec.alone, spec.parts_of_k,
    )  # fmt: skip
    more = None if extra is None else extra.set_up(barriers + 2 * spec.stages)
    sync_after_init((spec.cluster_ctas, 1))
    if launch:
        cute.arch.griddepcontrol_launch_dependents()
    if wait:
        cute.arch.griddepcontrol_wait()
    return Start(ring, tiles, warp, more)


def allocate(spec: Warpgroups, layouts: Layouts, words: int) -> tuple[cute.Pointer, SharedTiles]:
    """The ring's mbarriers, with `words` 8-byte words after them, and the tiles."""
    dtype_a, dtype_b = spec.mma_dtypes

    @cute.struct
    class SharedStorage:
        barriers: cute.struct.MemRange[cutlass.Int64, spec.stages * 2 + words]
        a: cute.struct.Align[cute.struct.MemRange[dtype_a, cute.cosize(layouts.a)], 1024]
        b: cute.struct.Align[cute.struct.MemRange[dtype_b, cute.cosize(layouts.b)], 1024]
        d: cute.struct.Align[
            cute.struct.MemRange[spec.epilogue.dtype, cute.cosize(layouts.d) * spec.consumers], 1024
        ]

    storage = cutlass.utils.SmemAllocator().allocate(SharedStorage)
    warpgroups = cute.make_layout(spec.consumers, stride=cute.cosize(layouts.d))
    return storage.barriers.data_ptr(), SharedTiles(
        storage.a.get_tensor(layouts.a.outer, swizzle=layouts.a.inner),
        storage.b.get_tensor(layouts.b.outer, swizzle=layouts.b.inner),
        storage.d.get_tensor(cute.append(layouts.d.outer, warpgroups), swizzle=layouts.d.inner),
    )


def held_address(tensor: cute.Tensor, swizzle: cute.Swizzle | None = None) -> cute.Tensor:
    """The same tensor in shared memory, whose pointer has `swizzle`; for tensors at a constant address.

    From such an address the compiler would work out a descriptor again before each stage's first matrix
    instruction, which waits for it. It keeps what comes from a shuffle.
    """
    pointer = tensor.iterator
    address = cute.arch.make_warp_uniform(pointer.toint())
    kept = cute.make_ptr(
        pointer.dtype, address, pointer.memspace, assumed_align=pointer.alignment, swizzle_=swizzle
    )
    return cute.make_tensor(kept, tensor.layout)


class Fragments(NamedTuple):
    """Of a warpgroup: sums (MMA, MMA_M, MMA_N), and descriptors of A and B (MMA, MMA_MN, MMA_K, slots)."""

    acc: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor


class Share(NamedTuple):
    """A consumer warpgroup's part of the CTA's tile: its first row and column, its fragments."""

    row: Int32
    column: Int32
    fragments: Fragments


def warpgroup_share(
    spec: Warpgroups, tiled_mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor, consumer: Consumer
) -> Share:
    """The whole tile in ping-pong, else `spec.wg_m` rows. sA (tile M, K, slots), sB (tile N, K, slots)."""
    row = Int32(0)
    if not spec.pingpong:
        row = consumer.warpgroup * spec.wg_m
        part = (consumer.warpgroup, 0, None)
        sA = cute.local_tile(sA, (spec.wg_m, cute.size(sA, mode=[1])), part)  # (wgM, bK, slots)
    return Share(row, Int32(0), make_fragments(spec, tiled_mma, sA, sB, consumer))


def make_fragments(
    spec: Warpgroups, tiled_mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor, consumer: Consumer
) -> Fragments:
    """Fragments of a warpgroup's rows sA (wg_m, K, slots) and columns sB (N, K, slots)."""
    thr_mma = tiled_mma.get_slice(consumer.thread)
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, slots)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, slots)
    columns = cute.size(sB, mode=[0])
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((spec.wg_m, columns)), cutlass.Float32)
    return Fragments(acc, tCrA, tCrB)


@cute.jit
def main_loop(
    ring: pipeline.PipelineTmaAsync,
    state: pipeline.PipelineState,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    groups: Int32,
    pieces: cutlass.Constexpr = (None,),
    units: cutlass.Constexpr = 1,
    pass_turn: cutlass.Constexpr = None,
) -> pipeline.PipelineState:
    """acc = sum of A @ B over `groups` >= 1 times `len(pieces)` stages.

    `pieces`: for each stage of a group the instructions along K in each of its `units` slots; None: all. The
    WGMMAs of one stage stay in flight while those of the next are issued. The first stage is peeled: it
    overwrites the accumulators, so nobody has to clear them. `pass_turn`: None, or a function to call after
    the last WGMMA.
    """
    multiply = partial(issue_k_tile, tiled_mma, *fragments, units=units)
    oldest = state.clone()  # of the stages in use
    for piece in cutlass.range_constexpr(len(pieces)):
        state = take(ring, state, partial(multiply, accumulate=piece > 0, steps=pieces[piece]))
        if cutlass.const_expr(piece > 0):
            warpgroup.wait_group(1)
            oldest = release(ring, oldest)
    for _ in cutlass.range(1, groups, unroll=1):
        for piece in cutlass.range_constexpr(len(pieces)):
            state = take(ring, state, partial(multiply, accumulate=True, steps=pieces[piece]))
            warpgroup.wait_group(1)
            oldest = release(ring, oldest)
    if cutlass.const_expr(pass_turn is not None):
        pass_turn()
    warpgroup.wait_group(0)
    ring.consumer_release(oldest)
    return state


class TwoRings(NamedTuple):
    """A ring of A's stages, each of which serves several of B's, and a ring of these."""

    a: pipeline.PipelineTmaAsync
    b: pipeline.PipelineTmaAsync


class TwoStates(NamedTuple):
    """Positions in `TwoRings`."""

    a: pipeline.PipelineState
    b: pipeline.PipelineState


@cute.jit
def two_ring_loop(
    rings: cutlass.Constexpr,  # TwoRings
    states: TwoStates,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    groups: Int32,
    pieces: cutlass.Constexpr,
) -> TwoStates:
    """acc = sum of A @ B over `groups` >= 1 times `len(pieces)` stages of B.

    `pieces`: instructions along K in each stage of B. Every stage is released as soon as it has been
    multiplied: while this warpgroup waits for its WGMMAs, another one's run.
    """
    states = multiply_group(rings, states, tiled_mma, fragments, pieces, True)
    for _ in cutlass.range(1, groups, unroll=1):
        states = multiply_group(rings, states, tiled_mma, fragments, pieces, False)
    return states


def multiply_group(
    rings: TwoRings,
    states: TwoStates,
    tiled_mma: cute.TiledMma,
    fragments: Fragments,
    pieces: tuple[int, ...],
    first: bool,
) -> TwoStates:
    """The stages of one group of `two_ring_loop`; the `first` one overwrites the accumulators."""
    acc, tCrA, tCrB = fragments
    state_a, state_b = states
    steps_a, steps_b = (cute.size(x, mode=[2]) for x in (tCrA, tCrB))
    per_stage = steps_a // steps_b
    for piece, steps in enumerate(pieces):
        part = piece % per_stage  # of A's stage
        if part == 0:
            rings.a.consumer_wait(state_a)
        rings.b.consumer_wait(state_b)
        a = [tCrA[None, None, part * steps_b + k, state_a.index] for k in range(steps)]
        b = [tCrB[None, None, k, state_b.index] for k in range(steps)]
        issue_steps(tiled_mma, acc, a, b, not (first and piece == 0))
        warpgroup.wait_group(0)
        state_b = release(rings.b, state_b)
        if part == per_stage - 1 or piece == len(pieces) - 1:
            state_a = release(rings.a, state_a)
    return TwoStates(state_a, state_b)
