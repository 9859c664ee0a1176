"""Tiny kernels around WGMMA and TMA: one warpgroup, one tile, one copy.

Shared memory is filled from, or written back to, a 32-bit image in its physical order, so swizzles are
visible.
"""

# Kernel bodies are traced, not run: the DSL's values have no static types.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="call-arg"

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.cpasync.copy import ReductionKind

THREADS = 128
TYPES = {
    "bf16": cutlass.BFloat16, "f16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN, "e5m2":
    cutlass.Float8E5M2, "f32": cutlass.Float32, "tf32": cutlass.TFloat32, "s32": Int32, "u8": cutlass.Uint8,
    "s8": cutlass.Int8,
}  # fmt: skip


def _fill(shared: cute.Tensor, words: int, image: cute.Tensor, thread) -> None:
    for i in range(words // THREADS):
        shared[i * THREADS + thread] = image[i * THREADS + thread]


def _raw(tensor: cute.Tensor) -> tuple:
    """The bytes under a compact shared-memory tensor as Int32 words in address order, and their number."""
    words = cute.cosize(tensor.layout) * tensor.element_type.width // 32
    pointer = cute.make_ptr(Int32, tensor.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(words)), words


@cute.kernel
def _wgmma(
    image_a: cute.Tensor, image_b: cute.Tensor, out: cute.Tensor,
    layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout, tiled: cute.TiledMma,
    kinds: cutlass.Constexpr,
):  # fmt: skip
    a_type, b_type, d_type = (TYPES[k] for k in kinds)
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    sA = smem.allocate_tensor(a_type, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    sB = smem.allocate_tensor(b_type, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    _fill(*_raw(sA), image_a, thread)
    _fill(*_raw(sB), image_b, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    thr = tiled.get_slice(thread)
    tCrA = tiled.make_fragment_A(thr.partition_A(sA))
    tCrB = tiled.make_fragment_B(thr.partition_B(sB))
    tCgD = thr.partition_C(out)
    acc = cute.make_rmem_tensor(tCgD.shape, d_type)
    tiled.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        cute.gemm(tiled, acc, tCrA[None, None, k], tCrB[None, None, k], acc)
        tiled.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    cute.autovec_copy(acc, tCgD)


def wgmma(
    image_a: cute.Tensor, image_b: cute.Tensor, out: cute.Tensor, stream,
    case: cutlass.Constexpr,
):  # fmt: skip
    """D (64, n) = A (64, depth) B (n, depth): a chain of WGMMAs; `case` is a `cases.WgmmaCase`.

    `image_a`, `image_b`: Int32, the operands' shared memory in its physical order; `out`: 64 * n elements of
    D's type, columns fastest.
    """
    n, depth = case.n, case.depth
    majors = [OperandMajorMode.K if name[0] == "K" else OperandMajorMode.MN for name in case.layouts]
    dtypes = [TYPES[k] for k in case.kinds]
    tiles = []
    for rows, dtype, name, major in zip((64, n), dtypes[:2], case.layouts, majors):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind[name], dtype)
        order = (0, 1) if major == OperandMajorMode.K else (1, 0)
        tiles.append(cute.tile_to_shape(atom, (rows, depth), order=order))
    tiled = hopper.make_trivial_tiled_mma(*dtypes[:2], *majors, dtypes[2], (1, 1, 1), (64, n))
    target = cute.make_tensor(out.iterator, cute.make_layout((64, n), stride=(n, 1)))
    _wgmma(image_a, image_b, target, *tiles, tiled, case.kinds).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def _tensor(flat: cute.Tensor, extents: tuple, pitches: tuple) -> cute.Tensor:
    """A view of flat memory with extents and element strides known at compile time, fastest first."""
    return cute.make_tensor(flat.iterator, cute.make_layout(extents, stride=pitches))


@cute.kernel
def _tma(
    atom: cute.CopyAtom, tensor: cute.Tensor, image: cute.Tensor, out: cute.Tensor, case: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    dtype, box = TYPES[case.kind], case.box
    smem = cutlass.memory.SmemAllocator()
    shared = smem.allocate_tensor(Int32, cute.make_layout(case.words), byte_alignment=1024)
    barrier = smem.allocate_array(cutlass.Int64, 1)
    _fill(shared, case.words, image, thread)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    pointer = cute.make_ptr(
        dtype, shared.iterator.toint() + case.offset, cute.AddressSpace.smem, assumed_align=128
    )
    target = cute.make_tensor(pointer, cute.make_layout(box))
    tile = cute.local_tile(cute.domain_offset(case.at, tensor), box, tuple(0 for _ in box))
    rank = len(box)
    tSs, tSg = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, rank), cute.group_modes(tile, 0, rank)
    )
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        if cutlass.const_expr(case.operation == "load"):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, case.box_bytes)
            cute.copy(atom, tSg, tSs, tma_bar_ptr=barrier)
        else:
            cute.copy(atom, tSs, tSg)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
    if cutlass.const_expr(case.operation == "load"):
        cute.arch.mbarrier_wait(barrier, 0)
        for i in cutlass.range_constexpr(case.words // THREADS):
            out[i * THREADS + thread] = shared[i * THREADS + thread]


def tma(memory: cute.Tensor, image: cute.Tensor, out: cute.Tensor, stream, case: cutlass.Constexpr):
    """One TMA copy of a box of a tensor over `memory`; `case` is a `cases.TmaCase`.

    `memory`: Int32 words that hold the tensor; `image`: Int32 (case.words), shared memory before the copy;
    `out`: Int32 (case.words), shared memory after a load; stores do not write it.
    """
    dtype = TYPES[case.kind]
    base = cute.recast_ptr(memory.iterator, dtype=dtype)
    tensor = cute.make_tensor(base, cute.make_layout(case.extents, stride=case.pitches))
    if cutlass.const_expr(case.operation == "load"):
        op = cpasync.CopyBulkTensorTileG2SOp()
    elif cutlass.const_expr(case.operation == "store"):
        op = cpasync.CopyBulkTensorTileS2GOp()
    else:
        op = cpasync.CopyReduceBulkTensorTileS2GOp(ReductionKind[case.operation.upper()])
    layout = cute.make_layout(case.box)
    if cutlass.const_expr(case.swizzle):
        layout = cute.make_composed_layout(cute.make_swizzle(case.swizzle, 4, 3), 0, layout)
    atom, tma_tensor = cpasync.make_tiled_tma_atom(op, tensor, layout, case.box)
    _tma(atom, tma_tensor, image, out, case).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
