"""WGMMA: the matrix instruction that four warps issue together and that reads shared memory by itself.

The order that PTX demands is kept here: fence, issue, commit, and a wait before anyone else touches
the accumulators or overwrites the operands (PTX ISA, 'asynchronous warpgroup level matrix instructions').
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import cute_nvgpu as cute_nvgpu_ir
from cutlass.cute.atom import make_atom
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import mma as warpgroup_mma
from cutlass.cute.typing import Boolean
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import inline_ptx

WGMMA_M = 64


class MmaTF32Op(warpgroup_mma.MmaOp):
    """`wgmma.m64nNk8.f32.tf32.tf32`, which the DSL's own set of operations lacks. K-major operands only."""

    descriptive_name = "warpgroup TF32 MMA Operation"

    def __init__(self, instruction_n: int):
        tf32, f32 = cutlass.TFloat32, cutlass.Float32
        super().__init__(
            tf32, tf32, f32, (WGMMA_M, instruction_n, 8),
            warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K,
        )  # fmt: skip

    def _make_trait(self, *, loc=None, ip=None, **_):
        shape = cute.core._pack_shape(self.shape_mnk, loc=loc, ip=ip)
        atom_type = cute_nvgpu_ir.MmaAtomSM90Type.get(
            shape.type.attribute,
            self.a_major_mode._to_ir(),
            self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type,
            self.b_dtype.mlir_type,
            self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )
        atom = make_atom(atom_type, [Boolean(False).ir_value(loc=loc, ip=ip)], loc=loc, ip=ip)
        return warpgroup_mma.MmaTraits(atom)


def make_warpgroup_mma(
    dtype: type[cutlass.Numeric],
    a_major: OperandMajorMode,
    b_major: OperandMajorMode,
    n: int,
    a_source: warpgroup.OperandSource = warpgroup.OperandSource.SMEM,
    b_dtype: type[cutlass.Numeric] | None = None,
) -> cute.TiledMma:
    """The 64 x n WGMMA of one warpgroup with float32 accumulators.

    B is in shared memory, A there or in registers.

    `dtype` is that of both operands: Float16, BFloat16, an 8-bit float (K-major only), or TFloat32 (K-major
    only, in shared memory). Two 8-bit floats may differ: then `dtype` is A's.
    """
    b_dtype = b_dtype or dtype
    if b_dtype is not dtype and (dtype.width, b_dtype.width) != (8, 8):
        raise ValueError(f"A and B must have one dtype, or both 8 bits; they have {dtype} and {b_dtype}")
    if dtype.width == 8:
        if (a_major, b_major) != (OperandMajorMode.K, OperandMajorMode.K):
            raise ValueError("fp8 WGMMA reads K-major operands only")
        op = warpgroup.MmaF8Op(dtype, b_dtype, cutlass.Float32, (WGMMA_M, n, 32), a_source, a_major, b_major)
        return cute.make_tiled_mma(cute.make_mma_atom(op))
    if dtype is cutlass.TFloat32:
        if (a_major, b_major) != (OperandMajorMode.K, OperandMajorMode.K):
            raise ValueError("tf32 WGMMA reads K-major operands only")
        op = MmaTF32Op(n)
    else:
        op = warpgroup.MmaF16BF16Op(dtype, cutlass.Float32, (WGMMA_M, n, 16), a_source, a_major, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


@dsl_user_op
def _computed_here(word: Int32, *, loc=None, ip=None) -> Int32:
    return inline_ptx(Int32, (word,), "mov.b32 $0, $1;", "=r,r", effects=True, loc=loc, ip=ip)


def settle(operand: cute.Tensor) -> None:
    """Has the registers of an operand A computed here and never again.

    Where they are also stored, the compiler may convert them a second time, in another basic block and so
    after the fence of their product, which then reads registers that change.
    """
    words = cute.recast_tensor(operand, Int32)
    for i in range(cute.size(words)):
        words[i] = _computed_here(words[i])


@dsl_user_op
def _sleep_if_negative(word: Int32, *, loc=None, ip=None) -> None:
    text = "{ .reg .pred p; setp.lt.s32 p, $0, 0; @p nanosleep.u32 1; }"
    inline_ptx(None, (word,), text, "r", effects=True, loc=loc, ip=ip)


def complete(operand: cute.Tensor) -> None:
    """Has the registers of an operand A, of numbers that are not negative, computed before a barrier that
    follows. ptxas moves arithmetic past barriers, but not an instruction with an effect: here one that waits
    where a number is negative."""
    words = cute.recast_tensor(operand, Int32)
    found = words[0]
    for i in range(1, cute.size(words)):
        found = found | words[i]
    _sleep_if_negative(found)


@cute.jit
def issue_k_tile(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # (MMA, MMA_M, MMA_N) float32
    tCrA: cute.Tensor,  # (MMA, MMA_M, MMA_K, stages * units) descriptors
    tCrB: cute.Tensor,  # (MMA, MMA_N, MMA_K, stages * units) descriptors
    stage: cutlass.Int32,
    accumulate: cutlass.Constexpr,
    steps: cutlass.Constexpr = None,
    units: cutlass.Constexpr = 1,
):
    """Issues acc (+)= A[stage] @ B[stage] as one committed group; does not wait.

    A stage has `units` slots, and of each the first `steps` instructions along K are issued (None: all).

    `accumulate` is known at trace time: a predicate would make the accumulators of a first tile live,
    and ptxas then keeps copies of them.
    """
    warpgroup.fence()
    tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for unit in cutlass.range_constexpr(units):
        slot = stage * units + unit
        for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2]) if steps is None else steps):
            cute.gemm(tiled_mma, acc, tCrA[None, None, k, slot], tCrB[None, None, k, slot], acc)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def issue_steps(tiled_mma, acc: cute.Tensor, a: list, b: list, accumulate: bool) -> None:
    """Issues acc (+)= the sum of a[k] @ b[k], (MMA, MMA_MN) descriptors each, as one committed group."""
    # Setting a field rebinds the atom's value, which must not leave a loop that the caller may be in.
    own_mma = cute.make_tiled_mma(cute.make_mma_atom(tiled_mma.op))
    own_mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for a_k, b_k in zip(a, b):
        cute.gemm(own_mma, acc, a_k, b_k, acc)
        own_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def issue_product(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # (MMA, MMA_M, MMA_N) float32
    a: cute.Tensor,  # (MMA, MMA_M, MMA_K) descriptors, or registers
    b: cute.Tensor,  # (MMA, MMA_N, MMA_K) descriptors
    accumulate: cutlass.Constexpr,
):
    """Issues acc (+)= A @ B as one committed group; does not wait. `accumulate`: see `issue_k_tile`."""
    # Setting a field rebinds the atom's value, which must not leave a loop that the caller may be in.
    own_mma = cute.make_tiled_mma(cute.make_mma_atom(tiled_mma.op))
    own_mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(own_mma, acc, a[None, None, k], b[None, None, k], acc)
        own_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
