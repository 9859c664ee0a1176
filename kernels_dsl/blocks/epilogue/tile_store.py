"""Epilogue of one consumer warpgroup: accumulators -> function -> staging in shared memory -> global.

The warpgroup's tile is cut into subtiles of 64 x epi_n. Each goes through one of a ring of staging
buffers, so that the store of one subtile overlaps the arithmetic of the next, and all of the stores
overlap the main loop of whoever computes next. One barrier a subtile is enough: see `store_subtile`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from kernels_dsl.blocks.epilogue.operands import apply_epilogue, load_operands, operand_registers
from kernels_dsl.blocks.epilogue.prefetch import Along, at_piece, early_registers, load_early
from kernels_dsl.blocks.hw.barriers import WARPGROUP_THREADS, NamedBarrier, sync_warpgroup
from kernels_dsl.blocks.hw.wgmma import WGMMA_M
from kernels_dsl.blocks.reduce.maximum import publish_maxima, running_maxima


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
    """Which those are."""

    @property
    def subtile(self) -> tuple[int, int]:
        """Rows and columns that go through one staging buffer."""
        return WGMMA_M, self.epi_n


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


@cute.jit
def store_tile(
    plan: cutlass.Constexpr,
    acc: cute.Tensor,  # (MMA, MMA_M, MMA_N) float32
    epilogue: cutlass.Constexpr,
    operands: cutlass.Constexpr,  # a tuple, or what `operands_before` made of it
    origin: tuple,  # (m, n, batch) of the warpgroup's tile in D
    extent: tuple,  # (M, N, L)
    sD: cute.Tensor,  # (64, epi_n, stages)
    tiled_mma_epi: cute.TiledMma,  # 64 x epi_n
    write: cutlass.Constexpr,  # write(stage, m, n): shared -> global
    thread: Int32,  # within the warpgroup
    warpgroup: Int32,
    fetch: cutlass.Constexpr = None,  # fetch(subtile, sums) brings those of a subtile in place of `acc`
):
    """Runs the epilogue of one tile, subtile by subtile; with `fetch` in a loop, whose code is short."""
    copy_r2s = register_to_smem_copy(tiled_mma_epi, plan.dtype, plan.epi_n, plan.m_major)
    thr_copy = copy_r2s.get_slice(thread)
    tRS_sD = thr_copy.partition_D(sD)  # (R2S, R2S_M, R2S_N, stages)
    thr_mma = tiled_mma_epi.get_slice(thread)
    c_sub = cute.make_identity_tensor((*plan.subtile, 1))
    shape = thr_mma.partition_shape_C(plan.subtile)  # (MMA, 1, 1)
    r_acc = cute.make_rmem_tensor(shape, cutlass.Float32)
    size = cute.size(r_acc)
    operands = running_maxima(operands)
    pieces = cute.size(acc) // size
    place = partial(subtile_place, plan, thr_mma, c_sub, origin)
    # All at once where registers allow, so that one load's way from L2 is waited for, not one a subtile.
    early = fetch is None and operand_registers(operands, place(0)[1]) * pieces <= plan.spare
    loaded = [load_operands(operands, place(sub)[1], extent) for sub in range(pieces)] if early else []
    drain(plan, thread)
    sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
    registers = thr_copy.partition_S(sD).shape[:3]
    finish = partial(_finish_subtile, plan, epilogue, r_acc, (copy_r2s, registers, tRS_sD), write)
    if cutlass.const_expr(fetch is None):
        for sub in cutlass.range_constexpr(pieces):
            for i in cutlass.range_constexpr(size):
                r_acc[i] = acc[sub * size + i]
            at, t_coord = place(sub)
            values = loaded[sub] if cutlass.const_expr(early) else load_operands(operands, t_coord, extent)
            values = at_piece(values, corner(plan, sub), t_coord)
            finish(values, sub, at, who=(thread, warpgroup))
    else:
        for sub in cutlass.range(pieces, unroll=1):
            fetch(sub, r_acc)
            at, t_coord = place(sub)
            finish(load_operands(operands, t_coord, extent), sub, at, who=(thread, warpgroup))
    publish_maxima(operands)


def _finish_subtile(plan, epilogue, r_acc, copy, write, values, sub, at, who) -> None:
    """From accumulators of subtile `sub`, a number or an Int32, to the store; `values` of the operands."""
    copy_r2s, registers, tRS_sD = copy
    tRS_rD = cute.make_rmem_tensor(registers, plan.dtype)
    r_d = cute.make_tensor(tRS_rD.iterator, r_acc.layout)  # the same registers as the MMA sees them
    r_d.store(apply_epilogue(epilogue, r_acc.load(), values).to(plan.dtype))
    stage = sub % plan.stages
    cute.copy(copy_r2s, tRS_rD, tRS_sD[None, None, None, stage])
    store_subtile(plan, write, stage, at, *who)


def operands_before(
    plan: EpiloguePlan,
    operands: tuple,
    origin: tuple,
    extent: tuple,
    tiled_mma_epi: cute.TiledMma,
    thread: Int32,
) -> tuple:
    """For a tile's epilogue, called before its main loop: those that `plan` names are loaded.

    The operands as they are, where registers do not hold them. Arguments as those of `store_tile`.
    """
    if not 0 < early_registers(operands, plan.tile, plan.early) <= plan.before:
        return operands
    return load_early(operands, plan.tile, plan.early, origin, extent, tiled_mma_epi, thread)


def corner(plan: EpiloguePlan, sub: int) -> tuple[int, int]:
    """Rows and columns of the tile before subtile number `sub`."""
    columns = plan.tile[1] // plan.epi_n
    return (sub // columns) * WGMMA_M, (sub % columns) * plan.epi_n


def subtile_place(
    plan: EpiloguePlan, thr_mma: cute.ThrMma, c_sub: cute.Tensor, origin: tuple, sub: int
) -> tuple[tuple, cute.Tensor]:
    """((m, n, batch) of subtile number `sub`, the coordinates (MMA, 1, 1) of a thread's elements in it)."""
    row, column = corner(plan, sub)
    # Divisibility lets the gathering of operands use vector loads.
    m = cute.assume(origin[0] + row, divby=WGMMA_M)
    n = cute.assume(origin[1] + column, divby=plan.epi_n)
    at = (m, n, origin[2])
    return at, thr_mma.partition_C(cute.domain_offset(at, c_sub)[None, None, 0])


@cute.jit
def drain(plan: cutlass.Constexpr, thread: Int32):
    """Returns once the storing warp's TMA stores have read shared memory. Long done after a main loop."""
    if cutlass.const_expr(plan.use_tma):
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def store_subtile(
    plan: cutlass.Constexpr, write: cutlass.Constexpr, stage: int, at: tuple, thread: Int32, warpgroup: Int32
):
    """Hands a filled staging buffer to the store.

    The barrier says that the buffer is full. It also says that the buffer after it is free: the
    storing warp arrives only once all but the newest `stages - 2` stores before this one have been
    read (TMA), or all threads arrive after they have read the last one (plain stores).
    """
    if cutlass.const_expr(isinstance(write, ClippedWriter)):
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
        by_tma, by_threads = write.whole, write.part
        if at[0] + WGMMA_M <= write.rows:
            if cute.arch.make_warp_uniform(thread // 32) == 0:
                by_tma(stage, at)
        else:
            by_threads(stage, at)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            # A group of no stores where the rows were clipped: groups count staging buffers.
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(plan.stages - 2, read=True)
    elif cutlass.const_expr(plan.use_tma):
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            write(stage, at)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(plan.stages - 2, read=True)
    else:
        sync_warpgroup(NamedBarrier.EPILOGUE, warpgroup)
        write(stage, at)


class ClippedWriter:
    """Stores of a D that ends, for this tile, after `rows` rows: TMA would go on to its real end."""

    def __init__(self, whole: Callable, part: Callable, rows: Int32) -> None:
        self.whole = whole  # by TMA, of subtiles that end before
        self.part = part  # by predicated stores
        self.rows = rows


def tma_writer(atom: cute.CopyAtom, mD: cute.Tensor, sD: cute.Tensor, subtile: tuple[int, int]) -> Callable:
    """`write(stage, (m, n, batch))` by one TMA store; clipped at D's edges by the hardware."""

    def write(stage: int, at: tuple) -> None:
        corner = cute.domain_offset((at[0], at[1], 0), mD)
        gD = cute.local_tile(corner, subtile, (0, 0, at[2]))
        tDsD, tDgD = cute.nvgpu.cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(atom, tDsD[None, stage], tDgD)

    return write


def plain_writer(mD: cute.Tensor, sD: cute.Tensor, extent: tuple, thread: Int32) -> Callable:
    """`write(stage, (m, n, batch))` by predicated stores, one element a thread: any strides of D will do.

    Neighbouring threads take neighbours along D's contiguous mode, rows where that is mode 0.
    """
    rows, columns = cute.size(sD, mode=[0]), cute.size(sD, mode=[1])
    by_rows = cute.is_static(mD.stride[0]) and mD.stride[0] == 1
    fast = rows if by_rows else columns

    @cute.jit
    def write(stage: int, at: tuple):
        # Not unrolled: the accumulators of a tile leave few registers for addresses and predicates.
        for i in cutlass.range(rows * columns // WARPGROUP_THREADS, unroll=1):
            element = thread + i * WARPGROUP_THREADS
            r, c = element // fast, element % fast
            if cutlass.const_expr(by_rows):
                r, c = c, r
            if at[0] + r < extent[0] and at[1] + c < extent[1]:
                mD[at[0] + r, at[1] + c, at[2]] = sD[r, c, stage]

    return write
