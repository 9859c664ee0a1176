"""Global to shared memory without TMA: cp.async with zero fill, for any extent and any alignment.

A tile of an operand is (MN, K) elements, K-major (K contiguous) or MN-major. Every thread owns a fixed set
of its vectors. A vector that ends beyond the tensor is copied in part, and the instruction itself fills the
rest with zeros (`cp-size` and `src-size` of PTX cp.async). Nothing outside the tensor is read, and a NaN
beyond K cannot reach a product.

cp.async copies 4, 8 or 16 bytes aligned to their size. An operand of 2-byte elements that is aligned to
2 bytes only goes through registers: `fetch` loads, and `put` stores to shared memory a K tile later, so that
matrix instructions hide the latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, range_constexpr
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import inline_ptx

SHARED_BANK_BYTES = 128
"""Bytes that shared memory delivers in one pass: 32 banks of 4."""


@dsl_user_op
def cp_async(
    dst: cute.Pointer, src: cute.Pointer, copy_bytes: int, valid_bytes: Int32, *, loc=None, ip=None
) -> None:
    """Copies `valid_bytes` of `copy_bytes` (4, 8 or 16, to which both pointers are aligned); zeroes the rest.

    16-byte copies bypass L1. Narrower ones cannot: the PTX ISA has .cg for 16 bytes only.
    """
    kinds = nvvm.LoadCacheModifierKind
    nvvm.cp_async_shared_global(
        dst.to_llvm_ptr(loc=loc, ip=ip),
        src.to_llvm_ptr(loc=loc, ip=ip),
        copy_bytes,
        kinds.CG if copy_bytes == 16 else kinds.CA,
        cp_size=Int32(valid_bytes).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def arrive_with_copies(full: cute.Pointer, *, loc=None, ip=None):
    """Keeps `full` from completing until this lane's cp.async are done; counts as no arrival."""
    text = "cp.async.mbarrier.arrive.shared::cta.b64 [$0];"
    inline_ptx(None, (full.toint(),), text, "r", effects=True, loc=loc, ip=ip)


def row_bytes_of(dtype: type[cutlass.Numeric], contiguous: int) -> int:
    """Bytes of a shared-memory row: the tile's contiguous extent, at most 128. ValueError below 32."""
    row_bytes = math.gcd(SHARED_BANK_BYTES, contiguous * dtype.width // 8)
    if row_bytes < 32:
        raise ValueError(f"tile extent {contiguous} is {row_bytes}-byte rows; it must be 32 bytes at least")
    return row_bytes


class Swizzle(NamedTuple):
    """Permutation of byte addresses: `bits` bits from `base` on are xored with those `shift` places above."""

    bits: int
    base: int
    shift: int


def swizzle_of(dtype: type[cutlass.Numeric], tile: tuple[int, int], k_major: bool) -> Swizzle:
    """The swizzle that makes fragment loads free of bank conflicts.

    ldmatrix reads 16 bytes from each of eight neighbouring rows, so 16-byte chunks are permuted by row
    number. MN-major 32-bit elements are read by plain 4-byte loads, eight neighbours along MN from each of
    four rows, so 32-byte chunks are permuted.
    """
    row_bytes = row_bytes_of(dtype, tile[1] if k_major else tile[0])
    chunk_bytes = 32 if dtype.width == 32 and not k_major else 16
    base = int(math.log2(chunk_bytes))
    return Swizzle(int(math.log2(row_bytes // chunk_bytes)), base, int(math.log2(SHARED_BANK_BYTES)) - base)


def staged_tile_layout(
    dtype: type[cutlass.Numeric], tile: tuple[int, int], stages: int, k_major: bool
) -> cute.Layout:
    """Layout (MN, K, stages) in elements, before the swizzle: blocks of 8 rows of at most 128 bytes."""
    row = row_bytes_of(dtype, tile[1] if k_major else tile[0]) * 8 // dtype.width
    atom = cute.make_layout((8, row), stride=(row, 1)) if k_major else cute.make_layout((row, 8))
    return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2))


def swizzled_pointer(ptr: cute.Pointer, swizzle: Swizzle) -> cute.Pointer:
    """The raw address of a swizzled shared-memory pointer, for instructions that need it."""
    address = ptr.toint()
    permuted = address ^ ((address >> swizzle.shift) & (((1 << swizzle.bits) - 1) << swizzle.base))
    return cute.make_ptr(ptr.dtype, permuted, ptr.memspace, assumed_align=2**swizzle.base)


def contiguous_mode(mX: cute.Tensor) -> int | None:
    """The mode of mX (MN, K, L) with static stride 1: 1 or 0, or None if neither has it."""
    return next((mode for mode in (1, 0) if isinstance(mX.stride[mode], int) and mX.stride[mode] == 1), None)


def vector_alignment(mX: cute.Tensor) -> int:
    """Bytes of a load along the contiguous mode of mX (MN, K, L); an element's, if there is no such mode."""
    width = mX.element_type.width // 8
    lead = contiguous_mode(mX)
    if lead is None:
        return width
    strides = [s if isinstance(s, int) else cute.get_divisibility(s) for s in mX.stride]
    return math.gcd(mX.iterator.alignment, *(s * width for mode, s in enumerate(strides) if mode != lead))


@dataclass(frozen=True)
class TileLoadPlan:
    """Partition of one operand's tiles among the threads of a CTA, known at trace time."""

    tile: tuple[int, int]
    """(MN, K) elements."""
    threads: int
    element_bytes: int
    copy_bytes: int
    """The operand's alignment: 16, 8, 4 or 2."""
    k_major: bool

    def __post_init__(self) -> None:
        if self.copy_bytes not in (2, 4, 8, 16) or self.copy_bytes < self.element_bytes:
            raise ValueError(
                f"copy_bytes is {self.copy_bytes}; it must be 2, 4, 8 or 16 and at least {self.element_bytes}"
            )
        vectors = self.tile[0] * self.tile[1] // self.vector
        if vectors % self.threads:
            raise ValueError(
                f"tile {self.tile} has {vectors} vectors of {self.vector} elements; it must be a multiple "
                f"of the {self.threads} threads that load it"
            )
        self.thread_shape  # noqa: B018  raises where the threads do not tile the operand

    @property
    def through_registers(self) -> bool:
        """True below the 4 bytes of alignment that cp.async needs."""
        return self.copy_bytes < 4

    @property
    def vector(self) -> int:
        """Elements that a thread handles together: at least one register's worth."""
        return max(self.copy_bytes, 4) // self.element_bytes

    @property
    def thread_shape(self) -> tuple[int, int]:
        """Threads along MN and K; neighbours lie along the contiguous mode, for coalesced loads."""
        lead = 1 if self.k_major else 0
        along = math.gcd(self.tile[lead] // self.vector, self.threads)
        across = self.threads // along
        if self.threads % along or self.tile[1 - lead] % across:
            raise ValueError(
                f"{self.threads} threads with {self.vector}-element vectors do not tile {self.tile}"
            )
        return (across, along) if self.k_major else (along, across)

    def tiled_copy(self, dtype: type[cutlass.Numeric]) -> cute.TiledCopy:
        """The partition of a tile among threads, as a TiledCopy."""
        order = (1, 0) if self.k_major else (0, 1)
        threads = cute.make_ordered_layout(self.thread_shape, order=order)
        values = cute.make_layout((1, self.vector) if self.k_major else (self.vector, 1))
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=self.vector * dtype.width
        )
        return cute.make_tiled_copy_tv(atom, threads, values)


@dataclass(frozen=True)
class Loader:
    """One thread's share of the copies of one operand. Subclasses know where in global memory a tile lies."""

    plan: TileLoadPlan
    swizzle: Swizzle
    tXsX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K, stages)
    tXcX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K): (mn, k), k counted from the tile's first

    def fetch(self, k_tile: Int32, stage: Int32, guard_k: bool) -> None:
        """Starts copying K tile `k_tile` to `stage`. Without `guard_k` the tile must lie within K."""
        raise NotImplementedError

    def put(self, stage: Int32) -> None:
        """Completes what `fetch` started; cp.async leaves nothing to do."""

    def slot(self, i: int, j: int, stage: Int32) -> cute.Pointer:
        """The address in shared memory of this thread's vector (i, j) of a tile."""
        return swizzled_pointer(self.tXsX[(None, 0), i, j, stage].iterator, self.swizzle)


@dataclass(frozen=True)
class TileLoader(Loader):
    """Loads the tiles of a dense operand, one after the other along K."""

    tXgX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K, k_tiles)
    tXrX: cute.Tensor | None  # (V, CPY_MN, CPY_K): registers between fetch and put; None with cp.async
    extent: tuple[Int32, Int32]
    """(MN, K) of the tensor."""

    @cute.jit
    def fetch(self, k_tile: Int32, stage: Int32, guard_k: cutlass.Constexpr) -> None:
        """Starts copying K tile `k_tile` to `stage`. Without `guard_k` the tile must lie within K."""
        plan = const_expr(self.plan)
        k_offset = k_tile * plan.tile[1]
        for j in range_constexpr(cute.size(self.tXgX, mode=[2])):
            for i in range_constexpr(cute.size(self.tXgX, mode=[1])):
                mn, k_local = self.tXcX[(0, 0), i, j]
                src = self.tXgX[(None, 0), i, j, k_tile]
                if const_expr(plan.through_registers):
                    self._fetch_elements(src, self.tXrX[None, i, j], mn, k_local + k_offset, guard_k)
                else:
                    valid = self._valid_bytes(mn, k_local + k_offset, guard_k)
                    cp_async(self.slot(i, j, stage), src.iterator, plan.copy_bytes, valid)

    @cute.jit
    def put(self, stage: Int32) -> None:
        """Stores what `fetch` loaded of an operand that goes through registers."""
        if const_expr(self.plan.through_registers):
            for j in range_constexpr(cute.size(self.tXgX, mode=[2])):
                for i in range_constexpr(cute.size(self.tXgX, mode=[1])):
                    vector = cute.make_tensor(self.slot(i, j, stage), cute.make_layout(self.plan.vector))
                    cute.autovec_copy(self.tXrX[None, i, j], vector)

    @cute.jit
    def _valid_bytes(self, mn: Int32, k: Int32, guard_k: cutlass.Constexpr) -> Int32:
        """Bytes of the vector at (mn, k) that lie within the tensor."""
        plan = const_expr(self.plan)
        lead = 1 if const_expr(plan.k_major) else 0
        coord, guarded = (mn, k), (True, guard_k)
        valid = Int32(plan.copy_bytes)
        if const_expr(guarded[lead]):
            inside = (self.extent[lead] - coord[lead]) * plan.element_bytes
            valid = cutlass.min(cutlass.max(inside, Int32(0)), valid)
        if const_expr(guarded[1 - lead]):
            valid = valid if coord[1 - lead] < self.extent[1 - lead] else Int32(0)
        return valid

    @cute.jit
    def _fetch_elements(
        self, src: cute.Tensor, dst: cute.Tensor, mn: Int32, k: Int32, guard_k: cutlass.Constexpr
    ) -> None:
        """Loads a vector element by element, 0 outside the tensor."""
        for v in range_constexpr(self.plan.vector):
            mn_v, k_v = (mn, k + v) if const_expr(self.plan.k_major) else (mn + v, k)
            valid = mn_v < self.extent[0]
            if const_expr(guard_k):
                valid = valid & (k_v < self.extent[1])
            dst[v] = src.element_type(0.0)
            if Boolean(valid):
                dst[v] = src[v]


def tile_loader(
    mX: cute.Tensor, sX: cute.Tensor, plan: TileLoadPlan, tile_mn: Int32, batch: Int32, tidx: Int32
) -> TileLoader:
    """The loader of row tile `tile_mn` of batch `batch` of an operand mX (MN, K, L).

    sX (MN, K, stages) in swizzled shared memory.
    """
    extent = (mX.shape[0], mX.shape[1])
    gX = cute.local_tile(mX[None, None, batch], plan.tile, (tile_mn, None))  # (bMN, bK, k_tiles)
    cX = cute.local_tile(cute.make_identity_tensor(extent), plan.tile, (tile_mn, 0))  # (bMN, bK)
    thr_copy = plan.tiled_copy(gX.element_type).get_slice(tidx)
    tXgX = thr_copy.partition_S(gX)
    tXrX = None
    if plan.through_registers:
        shape = (plan.vector, cute.size(tXgX, mode=[1]), cute.size(tXgX, mode=[2]))
        tXrX = cute.make_rmem_tensor(shape, gX.element_type)
    swizzle = swizzle_of(gX.element_type, plan.tile, plan.k_major)
    tXsX, tXcX = thr_copy.partition_D(sX), thr_copy.partition_S(cX)
    return TileLoader(plan, swizzle, tXsX, tXcX, tXgX, tXrX, extent)
