"""Global to shared memory without TMA: cp.async with zero fill, for any extent and any alignment.

A tile of an operand is (MN, K) elements, K-major (K contiguous) or MN-major. Every thread owns a fixed
set of vectors of it. A vector that ends beyond the tensor is copied in part and the rest of it is filled
with zeros by the instruction itself (`cp-size`, `src-size` of PTX cp.async), so nothing outside the
tensor is ever read, and nothing but zeros stands in for it: NaN beyond K cannot reach a product.

cp.async copies 4, 8 or 16 bytes that are aligned to their size. An operand of 2-byte elements which is
aligned to 2 bytes only goes through registers: `fetch` loads, `put` stores to shared memory later, with
a K tile's worth of matrix instructions between the two to hide the latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, range_constexpr
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

SHARED_BANK_BYTES = 128
"""Bytes that shared memory delivers in one pass: 32 banks of 4."""


@dsl_user_op
def cp_async(
    dst: cute.Pointer, src: cute.Pointer, copy_bytes: int, valid_bytes: Int32, *, loc=None, ip=None
) -> None:
    """Copy `valid_bytes` of `copy_bytes` (4, 8 or 16, and both aligned to it), zero the rest of dst.

    16-byte copies bypass L1, narrower ones cannot: the PTX ISA has .cg for 16 bytes alone.
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


def row_bytes_of(dtype: type[cutlass.Numeric], contiguous: int) -> int:
    """Bytes of a shared-memory row: the tile's contiguous extent, 128 at most, or ValueError."""
    row_bytes = math.gcd(SHARED_BANK_BYTES, contiguous * dtype.width // 8)
    if row_bytes < 32:
        raise ValueError(f"tile extent {contiguous} is {row_bytes}-byte rows; it must be 32 bytes at least")
    return row_bytes


def swizzle_of(dtype: type[cutlass.Numeric], tile: tuple[int, int], k_major: bool) -> tuple[int, int, int]:
    """(bits, base, shift) of the byte-address swizzle that makes fragment loads free of bank conflicts.

    ldmatrix reads 16 bytes from each of eight neighbouring rows: 16-byte chunks are permuted by the
    row's number. The MN-major 32-bit case is read by plain 4-byte loads instead, eight neighbours along
    MN from each of four rows: there, 32-byte chunks are permuted.
    """
    row_bytes = row_bytes_of(dtype, tile[1] if k_major else tile[0])
    chunk_bytes = 32 if dtype.width == 32 and not k_major else 16
    base = int(math.log2(chunk_bytes))
    return int(math.log2(row_bytes // chunk_bytes)), base, int(math.log2(SHARED_BANK_BYTES)) - base


def staged_tile_layout(
    dtype: type[cutlass.Numeric], tile: tuple[int, int], stages: int, k_major: bool
) -> cute.Layout:
    """Layout (MN, K, stages) in elements, before the swizzle: blocks of 8 rows, at most 128 bytes wide."""
    row = row_bytes_of(dtype, tile[1] if k_major else tile[0]) * 8 // dtype.width
    atom = cute.make_layout((8, row), stride=(row, 1)) if k_major else cute.make_layout((row, 8))
    return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2))


def swizzled_pointer(ptr: cute.Pointer, swizzle: tuple[int, int, int]) -> cute.Pointer:
    """The address that a swizzled shared-memory pointer stands for, for instructions that take it raw."""
    bits, base, shift = swizzle
    address = ptr.toint()
    permuted = address ^ ((address >> shift) & (((1 << bits) - 1) << base))
    return cute.make_ptr(ptr.dtype, permuted, ptr.memspace, assumed_align=2**base)


def contiguous_mode(mX: cute.Tensor) -> int | None:
    """The mode of mX (MN, K, L) with the static stride 1: 1, 0, or None where it is neither of the two."""
    return next((mode for mode in (1, 0) if isinstance(mX.stride[mode], int) and mX.stride[mode] == 1), None)


def vector_alignment(mX: cute.Tensor) -> int:
    """Bytes that a load along mX's (MN, K, L) contiguous mode may take; an element where there is none."""
    width = mX.element_type.width // 8
    lead = contiguous_mode(mX)
    if lead is None:
        return width
    strides = [s if isinstance(s, int) else cute.get_divisibility(s) for s in mX.stride]
    return math.gcd(mX.iterator.alignment, *(s * width for mode, s in enumerate(strides) if mode != lead))


@dataclass(frozen=True)
class TileLoadPlan:
    """How the threads of a CTA load one operand's tiles: all of it known at trace time."""

    tile: tuple[int, int]
    """(MN, K) elements."""
    threads: int
    element_bytes: int
    copy_bytes: int
    """Alignment class of the operand: 16, 8, 4 or 2."""
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
        """cp.async needs 4 bytes of alignment."""
        return self.copy_bytes < 4

    @property
    def vector(self) -> int:
        """Elements a thread handles together; a pair where a register is the smallest unit."""
        return max(self.copy_bytes, 4) // self.element_bytes

    @property
    def thread_shape(self) -> tuple[int, int]:
        """Threads along MN and K: neighbours go along the contiguous mode, for coalesced loads."""
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
class TileLoader:
    """One thread's share of one operand: `fetch` starts the copy of a K tile, `put` completes it."""

    plan: TileLoadPlan
    swizzle: tuple[int, int, int]
    tXgX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K, k_tiles)
    tXsX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K, stages)
    tXcX: cute.Tensor  # ((V, 1), CPY_MN, CPY_K): (mn, k) in K tile 0
    tXrX: Any  # (V, CPY_MN, CPY_K): registers between fetch and put; None where cp.async does it all
    extent: tuple[Int32, Int32]
    """(MN, K) of the tensor."""

    @cute.jit
    def fetch(self, k_tile: Int32, stage: Int32, guard_k: cutlass.Constexpr) -> None:
        """Start copying K tile `k_tile` to `stage`. Without `guard_k` the tile must lie within K."""
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
                    dst = swizzled_pointer(self.tXsX[(None, 0), i, j, stage].iterator, self.swizzle)
                    cp_async(dst, src.iterator, plan.copy_bytes, valid)

    @cute.jit
    def put(self, stage: Int32) -> None:
        """Complete what `fetch` started, for the operand that goes through registers."""
        if const_expr(self.plan.through_registers):
            for j in range_constexpr(cute.size(self.tXgX, mode=[2])):
                for i in range_constexpr(cute.size(self.tXgX, mode=[1])):
                    dst = swizzled_pointer(self.tXsX[(None, 0), i, j, stage].iterator, self.swizzle)
                    cute.autovec_copy(
                        self.tXrX[None, i, j], cute.make_tensor(dst, cute.make_layout(self.plan.vector))
                    )

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
        """Load a vector element by element; what lies outside becomes 0."""
        for v in range_constexpr(self.plan.vector):
            mn_v, k_v = (mn, k + v) if const_expr(self.plan.k_major) else (mn + v, k)
            valid = mn_v < self.extent[0]
            if const_expr(guard_k):
                valid = valid & (k_v < self.extent[1])
            dst[v] = src.element_type(0.0)
            if Boolean(valid):
                dst[v] = src[v]


def make_tile_loader(
    plan: TileLoadPlan, gX: cute.Tensor, sX: cute.Tensor, cX: cute.Tensor, extent: tuple, tidx: Int32
) -> TileLoader:
    """Partition an operand among threads.

    gX (MN, K, k_tiles) in global memory, sX (MN, K, stages) in swizzled shared memory, cX (MN, K) the
    coordinates of K tile 0, `extent` (MN, K) of the whole tensor.
    """
    thr_copy = plan.tiled_copy(gX.element_type).get_slice(tidx)
    tXgX = thr_copy.partition_S(gX)
    tXrX = None
    if plan.through_registers:
        shape = (plan.vector, cute.size(tXgX, mode=[1]), cute.size(tXgX, mode=[2]))
        tXrX = cute.make_rmem_tensor(shape, gX.element_type)
    return TileLoader(
        plan,
        swizzle_of(gX.element_type, plan.tile, plan.k_major),
        tXgX,
        thr_copy.partition_D(sX),
        thr_copy.partition_S(cX),
        tXrX,
        extent,
    )


def tile_loader(
    mX: cute.Tensor, sX: cute.Tensor, plan: TileLoadPlan, tile_mn: Int32, batch: Int32, tidx: Int32
) -> TileLoader:
    """The loader of row tile `tile_mn` of batch `batch` of an operand mX (MN, K, L)."""
    extent = (mX.shape[0], mX.shape[1])
    gX = cute.local_tile(mX[None, None, batch], plan.tile, (tile_mn, None))  # (bMN, bK, k_tiles)
    cX = cute.local_tile(cute.make_identity_tensor(extent), plan.tile, (tile_mn, 0))  # (bMN, bK)
    return make_tile_loader(plan, gX, sX, cX, extent, tidx)
