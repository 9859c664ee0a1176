"""Epilogue of one consumer warpgroup: accumulators -> function -> staging in shared memory -> global.

The warpgroup's tile is cut into subtiles of 64 x epi_n. Each goes through one of a ring of staging
buffers, so that the store of one subtile overlaps the arithmetic of the next, and all of the stores
overlap the main loop of whoever computes next. One barrier a subtile is enough: see `store_subtile`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from kernels_dsl.blocks.epilogue.operands import (
    GatherPlan,
    Operands,
    apply_epilogue,
    coord_modes,
    load_operands,
    operand_registers,
)
from kernels_dsl.blocks.epilogue.prefetch import Along, Region, at_piece, early_registers, load_early
from kernels_dsl.blocks.hw.barriers import (
    WARPGROUP_THREADS,
    Consumer,
    NamedBarrier,
    fence_for_async_readers,
    sync_warpgroup,
)
from kernels_dsl.blocks.hw.layouts import staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.blocks.reduce.lines import WarpgroupReduction
from kernels_dsl.blocks.reduce.maximum import Coord, publish_maxima, running_maxima


@dataclass(frozen=True)
class EpiloguePlan:
    """Trace-time facts of an epilogue. `tile` is a warpgroup's (rows, columns)."""

    tile: tuple[int, int]
    epi_n: int
    stages: int
    dtype: type[cutlass.Numeric]
    use_tma: bool
    m_major: bool = False
    """D is contiguous along M, so staging is too. With TMA stores only: others take any strides."""
    spare: int = 0
    """Registers a thread has beside its accumulators for operands that are loaded at the start."""
    before: int = 0
    """Registers that it has for operands that are loaded before the main loop."""
    early: tuple[Along, ...] = (Along.ROWS, Along.COLUMNS)
    """Kinds of those operands."""
    fills_once: bool = False
    """A tile fills each staging buffer at most once: its stores need not wait for each other."""

    @property
    def subtile(self) -> tuple[int, int]:
        """Rows and columns that go through one staging buffer."""
        return WGMMA_M, self.epi_n

    def layout(self) -> cute.ComposedLayout:
        """Staging buffers of a warpgroup in shared memory: (64, epi_n, stages)."""
        major = cute.nvgpu.OperandMajorMode.MN if self.m_major else cute.nvgpu.OperandMajorMode.K
        return staged_smem_layout(self.dtype, self.subtile, self.stages, major)


def epilogue_columns(tile_n: int, dtype: type[cutlass.Numeric]) -> int:
    """Columns of a subtile: 64 bytes of D where that divides the tile (measured best), else less.

    32 columns of 8 bits: 64 of them, with their accumulators copied, take too many registers.
    """
    columns = 512 // max(dtype.width, 16)
    while tile_n % columns:
        columns //= 2
    return columns


def register_to_smem_copy(
    tiled_mma: cute.TiledMma, dtype: type[cutlass.Numeric], epi_n: int, m_major: bool = False
) -> cute.TiledCopy:
    """Copy from a WGMMA accumulator fragment to shared memory, contiguous along N or, `m_major`, along M.

    stmatrix for 16-bit types, which turns its matrices for the latter.
    """
    matrices = 4 if epi_n % 16 == 0 else 2
    stmatrix = warp.StMatrix8x8x16bOp(m_major, matrices)
    if dtype.width == 16:
        atom = cute.make_copy_atom(stmatrix, dtype)
    else:
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype)
    like = cute.make_tiled_copy_C_atom(cute.make_copy_atom(stmatrix, cutlass.Float16), tiled_mma)
    return cute.make_tiled_copy_S(atom, like)


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of one consumer warpgroup: function(acc, *operands) of float32 values makes the output."""

    plan: EpiloguePlan
    function: Callable[..., Any]
    mma: cute.TiledMma  # 64 x epi_n
    staging: cute.Tensor  # (64, epi_n, stages)
    consumer: Consumer

    def prefetch(self, operands: Operands, region: Region) -> Operands:
        """Before a tile's main loop: loads the operands that the plan names.

        Returns the operands as they are where registers do not hold them.
        """
        plan = self.plan
        if not 0 < early_registers(operands, plan.tile, plan.early) <= plan.before:
            return operands
        return load_early(operands, plan.tile, plan.early, region, self.mma, self.consumer.thread)

    def drain(self) -> None:
        """Returns once all stores have read shared memory."""
        drain(self.plan, self.consumer.thread)


class StagingCopy(NamedTuple):
    """Copy of a subtile's registers, of `shape`, to the buffers `target` (R2S, R2S_M, R2S_N, stages)."""

    copy: cute.TiledCopy
    shape: cute.Shape
    target: cute.Tensor


@cute.jit
def store_tile(
    epilogue: cutlass.Constexpr,  # Epilogue
    acc: cute.Tensor,  # (MMA, MMA_M, MMA_N) float32
    operands: cutlass.Constexpr,  # as they are, or as `Epilogue.prefetch` returned them
    region: Region,
    write: cutlass.Constexpr,  # write(stage, (m, n, batch)): shared -> global
    fetch: cutlass.Constexpr = None,  # fetch(subtile, sums) brings those of a subtile in place of `acc`
    reduction: cutlass.Constexpr = None,  # `WarpgroupReduction` of the tile, not with `fetch`
):
    """Runs the epilogue of one tile, subtile by subtile; with `fetch` in a loop, whose code is short."""
    plan, consumer = epilogue.plan, epilogue.consumer
    copy_r2s = register_to_smem_copy(epilogue.mma, plan.dtype, plan.epi_n, plan.m_major)
    thr_copy = copy_r2s.get_slice(consumer.thread)
    tRS_sD = thr_copy.partition_D(epilogue.staging)  # (R2S, R2S_M, R2S_N, stages)
    thr_mma = epilogue.mma.get_slice(consumer.thread)
    c_sub = cute.make_identity_tensor((*plan.subtile, 1))
    shape = thr_mma.partition_shape_C(plan.subtile)  # (MMA, 1, 1)
    r_acc = cute.make_rmem_tensor(shape, cutlass.Float32)
    size = cute.size(r_acc)
    operands = running_maxima(operands)
    pieces = cute.size(acc) // size
    coordinates = partial(subtile_coordinates, plan, thr_mma, c_sub, region.origin)
    # All at once where registers allow, so that one load's way from L2 is waited for, not one a subtile.
    early = fetch is None and operand_registers(operands, coordinates(0)[1]) * pieces <= plan.spare
    loaded = (
        [load_operands(operands, coordinates(sub)[1], region.extent) for sub in range(pieces)]
        if early
        else []
    )
    drain(plan, consumer.thread)
    sync_warpgroup(NamedBarrier.EPILOGUE, consumer.warpgroup)
    staging = StagingCopy(copy_r2s, thr_copy.partition_S(epilogue.staging).shape[:3], tRS_sD)
    finish = partial(_finish_subtile, epilogue, r_acc, staging, write)
    if cutlass.const_expr(fetch is None):
        for sub in cutlass.range_constexpr(pieces):
            for i in cutlass.range_constexpr(size):
                r_acc[i] = acc[sub * size + i]
            first, tCcD = coordinates(sub)
            if cutlass.const_expr(early):
                values = loaded[sub]
            else:
                values = load_operands(operands, tCcD, region.extent)
            values = at_piece(values, corner(plan, sub), tCcD)
            if cutlass.const_expr(reduction is None):
                finish(values, sub, first)
            else:
                finish(values, sub, first, partial(_reduce_subtile, reduction, plan, tCcD, sub))
    else:
        for sub in cutlass.range(pieces, unroll=1):
            fetch(sub, r_acc)
            first, tCcD = coordinates(sub)
            finish(load_operands(operands, tCcD, region.extent), sub, first)
    publish_maxima(operands)
    if cutlass.const_expr(reduction is not None):
        reduction.finish()


def _reduce_subtile(
    reduction: WarpgroupReduction, plan: EpiloguePlan, tCcD: cute.Tensor, sub: int, value: cute.TensorSSA
) -> None:
    """Hands the values of subtile `sub` to the reduction."""
    modes = tuple(mode for mode in coord_modes(tCcD) if mode.size > 1)
    reduction.see(value, GatherPlan(modes, 1).offsets, tCcD[0], corner(plan, sub))


def _finish_subtile(
    epilogue: Epilogue,
    r_acc: cute.Tensor,
    staging: StagingCopy,
    write: Callable[[Int32, Coord], None],
    values: Operands,
    sub: Int32,
    first: Coord,
    see: Callable[[cute.TensorSSA], None] | None = None,
) -> None:
    """From accumulators of subtile `sub`, a number or an Int32, to the store; `values` of the operands.

    `see` gets the float32 result.
    """
    plan = epilogue.plan
    tRS_rD = cute.make_rmem_tensor(staging.shape, plan.dtype)
    r_d = cute.make_tensor(tRS_rD.iterator, r_acc.layout)  # the same registers as the MMA sees them
    result = apply_epilogue(epilogue.function, r_acc.load(), values)
    if see is not None:
        see(result)
    r_d.store(result.to(plan.dtype))
    stage = sub % plan.stages
    cute.copy(staging.copy, tRS_rD, staging.target[None, None, None, stage])
    store_subtile(plan, write, stage, first, epilogue.consumer)


def corner(plan: EpiloguePlan, sub: int) -> tuple[int, int]:
    """Rows and columns of the tile before subtile number `sub`."""
    columns = plan.tile[1] // plan.epi_n
    return (sub // columns) * WGMMA_M, (sub % columns) * plan.epi_n


def subtile_coordinates(
    plan: EpiloguePlan, thr_mma: cute.ThrMma, c_sub: cute.Tensor, origin: Coord, sub: int
) -> tuple[Coord, cute.Tensor]:
    """(m, n, batch) of subtile number `sub`, and the coordinates (MMA, 1, 1) of a thread's elements in it."""
    (row, column), (m, n, batch) = corner(plan, sub), origin
    # Divisibility lets the gathering of operands use vector loads.
    m, n = cute.assume(m + row, divby=WGMMA_M), cute.assume(n + column, divby=plan.epi_n)
    first = (m, n, batch)
    return first, thr_mma.partition_C(cute.domain_offset(first, c_sub)[None, None, 0])


@cute.jit
def drain(plan: cutlass.Constexpr, thread: Int32):
    """Returns once the storing warp's TMA stores have read shared memory. Long done after a main loop."""
    if cutlass.const_expr(plan.use_tma):
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def store_subtile(
    plan: cutlass.Constexpr, write: cutlass.Constexpr, stage: int, first: Coord, consumer: Consumer
):
    """Hands a filled staging buffer to the store.

    The barrier says that the buffer is full. It also says that the buffer after it is free: the
    storing warp arrives only once all but the newest `stages - 2` stores before this one have been
    read (TMA), or all threads arrive after they have read the last one (plain stores).
    """
    if cutlass.const_expr(plan.use_tma):
        fence_for_async_readers()
    sync_warpgroup(NamedBarrier.EPILOGUE, consumer.warpgroup)
    if cutlass.const_expr(isinstance(write, ClippedWriter)):
        by_tma, by_threads = write.whole, write.part
        if first[0] + WGMMA_M <= write.rows:
            if cute.arch.make_warp_uniform(consumer.thread // 32) == 0:
                by_tma(stage, first)
        else:
            by_threads(stage, first)
    elif cutlass.const_expr(not plan.use_tma):
        write(stage, first)
    if cutlass.const_expr(plan.use_tma):
        if cute.arch.make_warp_uniform(consumer.thread // 32) == 0:
            if cutlass.const_expr(not isinstance(write, ClippedWriter)):
                write(stage, first)
            # A group of no stores where the rows were clipped: groups count staging buffers.
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(not plan.fills_once):
                cute.arch.cp_async_bulk_wait_group(plan.stages - 2, read=True)


class ClippedWriter:
    """Stores of a D that ends, for this tile, after `rows` rows: TMA would go on to its real end."""

    def __init__(self, whole: Callable, part: Callable, rows: Int32) -> None:
        self.whole = whole  # by TMA, of subtiles that end before
        self.part = part  # by predicated stores
        self.rows = rows


def tma_writer(
    atom: cute.CopyAtom,
    mD: cute.Tensor,
    sD: cute.Tensor,
    subtile: tuple[int, int],
    image: tuple[Int32, ...] | None = None,
) -> Callable:
    """`write(stage, (m, n, batch))` by one TMA store; clipped at D's edges by the hardware.

    `image`: the coordinates within D's third mode, in place of `batch`, which takes a division for each of
    them.
    """

    def write(stage: int, first: Coord) -> None:
        m, n, batch = first
        place = batch if image is None else image
        gD = cute.local_tile(cute.domain_offset((m, n, 0), mD), subtile, (0, 0, place))
        tDsD, tDgD = cute.nvgpu.cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(atom, tDsD[None, stage], tDgD)

    return write


def plain_writer(mD: cute.Tensor, sD: cute.Tensor, extent: Coord, thread: Int32) -> Callable:
    """`write(stage, (m, n, batch))` by predicated stores, one element a thread: any strides of D will do.

    Neighbouring threads take neighbours along D's contiguous mode, rows where that is mode 0.
    """
    rows, columns = cute.size(sD, mode=[0]), cute.size(sD, mode=[1])
    by_rows = cute.is_static(mD.stride[0]) and mD.stride[0] == 1
    fast = rows if by_rows else columns

    @cute.jit
    def write(stage: int, first: Coord):
        m, n, batch = first
        # Not unrolled: the accumulators of a tile leave few registers for addresses and predicates.
        for i in cutlass.range(rows * columns // WARPGROUP_THREADS, unroll=1):
            element = thread + i * WARPGROUP_THREADS
            r, c = element // fast, element % fast
            if cutlass.const_expr(by_rows):
                r, c = c, r
            if m + r < extent[0] and n + c < extent[1]:
                mD[m + r, n + c, batch] = sD[r, c, stage]

    return write
