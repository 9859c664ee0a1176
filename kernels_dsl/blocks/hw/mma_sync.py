"""Warp-level matrix instructions (mma.sync) and the loads of their fragments from shared memory.

bf16 and fp16 use m16n8k16; float32 is rounded to tf32 and uses m16n8k8; e4m3 and e5m2, in any mixture, use
m16n8k32 (sm_89 and later). All accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float16, Float32, Int32, TFloat32
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.atom import make_atom
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import warp

MMA_M, MMA_N = 16, 16
"""Rows and columns of the output that a step of one warp covers: two n8 instructions side by side, because
one ldmatrix of four 8x8 matrices has the B fragments of both."""


def mma_k(dtype: type[cutlass.Numeric]) -> int:
    """Elements of K that one instruction takes: 32 bytes."""
    return 256 // dtype.width


def fragment_dtype(dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """The operands' type in shared memory and fragments: tf32 for float32."""
    return TFloat32 if dtype is Float32 else dtype


def is_fp8(dtype: type[cutlass.Numeric]) -> bool:
    """True for e4m3 and e5m2."""
    return dtype in (Float8E4M3FN, Float8E5M2)


@dataclass(frozen=True)
class MixedFp8Op(warp.mma.WarpMmaOp):
    """mma.sync.m16n8k32 of e4m3 and e5m2, accumulating in float32.

    The DSL's MmaFP8Op takes one dtype for both operands; the atom beneath it takes two.
    """

    a_dtype: type[cutlass.Numeric]
    b_dtype: type[cutlass.Numeric]

    def _make_trait(self, *, loc=None, ip=None, **kwargs) -> warp.mma.MmaFP8Trait:
        shape = _pack_shape((16, 8, 32), loc=loc, ip=ip).type.attribute
        types = (self.a_dtype.mlir_type, self.b_dtype.mlir_type, Float32.mlir_type)
        atom = cute_nvgpu.MmaAtomSM89Type.get(shape, *types)
        return warp.mma.MmaFP8Trait(make_atom(atom, loc=loc, ip=ip))

    def _verify_fragment_A(self, input, *, loc=None, ip=None) -> None:
        """Accepts every fragment that the atom's layout makes."""

    def _verify_fragment_B(self, input, *, loc=None, ip=None) -> None:
        """Accepts every fragment that the atom's layout makes."""


def _mma_op(dtype: type[cutlass.Numeric], b_dtype: type[cutlass.Numeric]) -> warp.mma.WarpMmaOp:
    if is_fp8(dtype) and is_fp8(b_dtype):
        return MixedFp8Op(dtype, b_dtype)
    if b_dtype is not dtype or dtype not in (BFloat16, Float16, Float32):
        raise ValueError(
            f"A is {dtype} and B is {b_dtype}; both must be BFloat16, Float16 or Float32, or each one of "
            "Float8E4M3FN and Float8E5M2"
        )
    if dtype is Float32:
        return warp.MmaTF32Op((16, 8, 8))
    return warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16))


def make_tiled_mma(
    dtype: type[cutlass.Numeric],
    warps_m: int,
    warps_n: int,
    b_dtype: type[cutlass.Numeric] | None = None,
) -> cute.TiledMma:
    """mma.sync over warps_m x warps_n warps, for A and B of `dtype` (bf16, fp16, fp8, float32 as tf32).

    `b_dtype`: B's, if it differs from A's; only e4m3 and e5m2 may. One step of the tiled instruction is
    (16 warps_m, 16 warps_n, 32 bytes of K). ValueError for other dtypes.
    """
    return cute.make_tiled_mma(
        _mma_op(dtype, b_dtype or dtype),
        cute.make_layout((warps_m, warps_n, 1)),
        permutation_mnk=(MMA_M * warps_m, MMA_N * warps_n, mma_k(dtype)),
    )


def fragment_copy_atom(dtype: type[cutlass.Numeric], k_major: bool) -> cute.CopyAtom:
    """The load of a fragment: ldmatrix, transposing where MN is contiguous.

    ldmatrix moves 16-bit units. It cannot transpose 32-bit elements, which take plain loads instead, or 8-bit
    ones, which must have K contiguous (ValueError).
    """
    if dtype.width == 8 and not k_major:
        raise ValueError(f"an operand of {dtype} has MN contiguous; 8-bit operands must have K contiguous")
    if dtype.width == 32 and not k_major:
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=32)
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not k_major, 4), dtype)


@dataclass(frozen=True)
class Fragments:
    """One operand's fragments of a K tile, and the copy that fills them from a stage."""

    tiled_copy: cute.TiledCopy
    tXsX: cute.Tensor  # ((CPY), CPY_MN, k_blocks, stages)
    tXrX: cute.Tensor  # ((CPY), CPY_MN, k_blocks): tCrX as the copy sees it
    tCrX: cute.Tensor  # ((MMA), MMA_MN, k_blocks)

    def load(self, k_block: int, stage: cutlass.Int32) -> None:
        """Loads K block `k_block` of `stage` from shared memory."""
        cute.copy(self.tiled_copy, self.tXsX[None, None, k_block, stage], self.tXrX[None, None, k_block])

    def round_to_tf32(self, k_block: int) -> None:
        """Rounds float32 to tf32, to nearest with ties away from zero; does nothing for other types.

        The instruction would drop the low 13 bits, which nearly triples the error.
        """
        # The stage has the type: fragments of tf32 are Int32, the instruction's registers.
        if self.tXsX.element_type is TFloat32:
            bits = cute.recast_tensor(self.tCrX[None, None, k_block], Int32)
            values = cute.recast_tensor(bits, Float32)
            for i in range(cute.size(values)):
                bits[i] = Int32(cute.arch.cvt_f32_tf32(values[i]))


def make_fragments_a(tiled_mma: cute.TiledMma, sA: cute.Tensor, k_major: bool, tidx) -> Fragments:
    """Fragments of A from sA (M, K, stages)."""
    tCrA = tiled_mma.make_fragment_A(tiled_mma.get_slice(tidx).partition_A(sA)[None, None, None, 0])
    tiled_copy = cute.make_tiled_copy_A(fragment_copy_atom(sA.element_type, k_major), tiled_mma)
    thr_copy = tiled_copy.get_slice(tidx)
    return Fragments(tiled_copy, thr_copy.partition_S(sA), thr_copy.retile(tCrA), tCrA)


def make_fragments_b(tiled_mma: cute.TiledMma, sB: cute.Tensor, k_major: bool, tidx) -> Fragments:
    """Fragments of B from sB (N, K, stages)."""
    tCrB = tiled_mma.make_fragment_B(tiled_mma.get_slice(tidx).partition_B(sB)[None, None, None, 0])
    tiled_copy = cute.make_tiled_copy_B(fragment_copy_atom(sB.element_type, k_major), tiled_mma)
    thr_copy = tiled_copy.get_slice(tidx)
    return Fragments(tiled_copy, thr_copy.partition_S(sB), thr_copy.retile(tCrB), tCrB)


def mma_k_block(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: Fragments, b: Fragments, k_block: int) -> None:
    """Adds A[:, k_block] @ B[:, k_block].T to acc."""
    a.round_to_tf32(k_block)
    b.round_to_tf32(k_block)
    cute.gemm(tiled_mma, acc, a.tCrX[None, None, k_block], b.tCrX[None, None, k_block], acc)


def warp_accumulators(rows: int, columns: int) -> cute.Tensor:
    """Uninitialised float32 accumulators ((2, 2), M, N) of one warp's rows x columns, multiples of 16.

    N is the faster mode, so 16 x 16 elements are eight consecutive registers in the order of an operand A.
    """
    m, n = rows // MMA_M, columns // 8
    layout = cute.make_layout(((2, 2), m, n), stride=((1, 2), 4 * n, 4))
    return cute.make_rmem_tensor(layout, Float32)


def warp_operand_a(rows: int, k: int, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Registers ((2, 2, 2), M, K) of an operand A of one warp's rows x k, multiples of 16 and of 32 bytes.

    8-bit types have ((4, 2, 2), M, K): four elements a register instead of two.
    """
    m, k_steps, of_register = rows // MMA_M, k // mma_k(dtype), 32 // dtype.width
    shape = ((of_register, 2, 2), m, k_steps)
    stride = ((1, of_register, 2 * of_register), 4 * of_register * k_steps, 4 * of_register)
    return cute.make_rmem_tensor(cute.make_layout(shape, stride=stride), dtype)


def warp_product(
    tiled_mma: cute.TiledMma,  # of one warp
    acc: cute.Tensor,  # ((2, 2), M, N) float32
    operand_a: Callable[[int], cute.Tensor],  # K step -> ((2, 2, 2), M)
    read_b: Callable[[int, int, cute.Tensor], None],  # (K step, N step, registers of 16 rows x 32 bytes)
    steps: tuple[int, int],  # (K, N) steps of 32 bytes and of 16
    ahead: int,
    dtype: type[cutlass.Numeric],
) -> None:
    """Adds A @ B.T of one warp to acc, in 16- or 8-bit `dtype`, reading B's fragments `ahead` steps early."""
    of_register = 32 // dtype.width
    b_layout = cute.make_layout(((of_register, 2), 2), stride=((1, of_register), 2 * of_register))
    order = [(k, n) for k in range(steps[0]) for n in range(steps[1])]
    waiting = []
    for i in range(len(order) + ahead):
        if i < len(order):
            b = cute.make_rmem_tensor(b_layout, dtype)
            read_b(*order[i], b)
            waiting.append(b)
        if i >= ahead:
            k, n = order[i - ahead]
            part = _columns(acc, n)
            cute.gemm(tiled_mma, part, operand_a(k), waiting.pop(0), part)


def _columns(acc: cute.Tensor, n: int) -> cute.Tensor:
    """16 columns of the accumulators: ((2, 2), M, 2)."""
    shape, stride = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout((shape[0], shape[1], 2), stride=stride)
    return cute.make_tensor(acc.iterator + 2 * n * stride[2], layout)
