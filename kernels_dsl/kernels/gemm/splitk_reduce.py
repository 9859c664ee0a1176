"""Second kernel of a split-K GEMM: sums the partial results in a fixed order and applies the epilogue.

One thread computes one vector of D. The partial sums are read like operands of the epilogue, all of them
before the first addition, so that their latencies overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from kernels_dsl.blocks.epilogue import gated_rows
from kernels_dsl.blocks.epilogue.gates import GatedEpilogue
from kernels_dsl.blocks.epilogue.operands import Operands, apply_epilogue, load_operand, load_operands
from kernels_dsl.blocks.epilogue.staged_store import output_vector, row_vectors, store_vectors
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.reduce.lines import Staged, inner_of, reduce_staged, without_partials
from kernels_dsl.blocks.reduce.maximum import publish_maxima, running_maxima
from kernels_dsl.blocks.reduce.reductions import ReducedEpilogue
from kernels_dsl.config.gemm import SPLIT_REDUCTION_TILE

THREADS = (SPLIT_REDUCTION_TILE, 16)
MAX_VECTOR = 8


class Tiles(NamedTuple):
    """Tiles of D along M and N."""

    m: Int32
    n: Int32


@dataclass(frozen=True)
class ReduceSpec:
    """Trace-time facts of an instance. `vector`: elements of D that a thread computes."""

    vector: int
    split_k: int
    epilogue: Any
    early: bool


def splitk_reduce(
    mW: cute.Tensor,
    mD: cute.Tensor,
    operands: Operands,
    stream,
    split_k: cutlass.Constexpr[int],
    epilogue: cutlass.Constexpr,
    early: cutlass.Constexpr[bool] = False,
):
    """Launch D[:, :, l] = epilogue(sum over s of W[:, :, l * split_k + s], *operands[:, :, l]).

    mW (M, N, L * split_k) float32, mD (M, N, L) bf16, fp16 or float32, operands as in
    `kernels_dsl.blocks.epilogue.operands`. The sum runs over s upwards. `early` starts the kernel while the
    GEMM before it still runs (programmatic dependent launch, SM90 and later), and waits there for its
    results.
    """
    vector, columns = output_vector(mD, MAX_VECTOR), mD.shape[1]
    if isinstance(epilogue, GatedEpilogue):
        vector, columns = gated_rows.vector_of(mD, MAX_VECTOR), 2 * columns
    elif isinstance(epilogue, ReducedEpilogue):
        vector = SPLIT_REDUCTION_TILE // THREADS[1]
    spec = ReduceSpec(vector, split_k, epilogue, early)
    tile = (THREADS[0], THREADS[1] * spec.vector)
    tiles = Tiles(cute.ceil_div(mD.shape[0], tile[0]), cute.ceil_div(columns, tile[1]))
    splitk_reduce_kernel(mW, mD, operands, tiles, spec).launch(
        grid=[tiles.m * tiles.n * mD.shape[2], 1, 1],
        block=[THREADS[0] * THREADS[1], 1, 1],
        stream=stream,
        use_pdl=early,
    )


def split_views(mW: cute.Tensor, shape: cute.Shape, split_k: int) -> tuple[cute.Tensor, ...]:
    """The partial results of each split, as tensors of the product's shape (M, N, L)."""
    stride = (mW.stride[0], mW.stride[1], mW.stride[2] * split_k)
    layout = cute.make_layout(shape, stride=stride)
    return tuple(cute.make_tensor(mW.iterator + s * mW.stride[2], layout) for s in range(split_k))


@entry_name("splitk_reduce")
@cute.kernel
def splitk_reduce_kernel(
    mW: cute.Tensor,
    mD: cute.Tensor,
    operands: Operands,
    tiles: Tiles,
    spec: cutlass.Constexpr[ReduceSpec],
):
    """Device side of `splitk_reduce`: a CTA computes a tile of 16 rows and 16 vectors."""
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    row, n = bidx // tiles.n, bidx % tiles.n
    l, m = row // tiles.m, row % tiles.m
    tile = (THREADS[0], THREADS[1] * spec.vector, 1)
    shape = gated_rows.product_shape(mD, spec.epilogue)
    cD = cute.local_tile(cute.make_identity_tensor(shape), tile, (m, n, l))  # (bM, bN, 1) of (m, n, l)
    tDcD = row_vectors(THREADS, spec.vector).get_slice(tidx).partition_D(cD[None, None, 0])  # ((1, V), 1, 1)

    if cutlass.const_expr(spec.early):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # from here on the GEMM's partial sums are there
    partials = [load_operand(mP, tDcD, shape) for mP in split_views(mW, shape, spec.split_k)]
    operands, reduced = without_partials(spec.epilogue, operands)
    operands = running_maxima(operands)
    mZ = None
    if cutlass.const_expr(isinstance(spec.epilogue, GatedEpilogue)):
        operands, mZ = gated_rows.without_preact(spec.epilogue, operands)
    values = load_operands(operands, tDcD, shape)
    total = partials[0].load()
    for s in range_constexpr(1, spec.split_k):
        total = total + partials[s].load()
    if cutlass.const_expr(isinstance(spec.epilogue, GatedEpilogue)):
        z = apply_epilogue(spec.epilogue.inner, total, values)
        gated_rows.store(z, tDcD, spec.epilogue, mD, mZ)
    else:
        tDrD = cute.make_rmem_tensor(tDcD.shape, mD.element_type)
        result = apply_epilogue(inner_of(spec.epilogue), total, values)
        tDrD.store(result.to(mD.element_type))
        store_vectors(tDrD, tDcD, mD, spec.vector)
        if cutlass.const_expr(reduced is not None):
            _reduce_tile(spec.epilogue, reduced, Staged(result, cD[0], shape), tidx)
    publish_maxima(operands)


@cute.jit
def _reduce_tile(
    epilogue: cutlass.Constexpr, partials: cute.Tensor, tile: cutlass.Constexpr[Staged], tidx: Int32
):
    """Reduces the CTA's tile, of which each thread has one element. `tile.values`: that element."""
    rows, columns = THREADS
    layout = cute.make_layout(THREADS, stride=(columns + 1, 1))
    values = cutlass.memory.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
    element = cute.make_rmem_tensor(1, Float32)
    element.store(tile.values.reshape(1))
    values[tidx // columns, tidx % columns] = element[0]
    cute.arch.sync_threads()
    m, n, _ = tile.origin
    part = m // rows if cutlass.const_expr(epilogue.over == "m") else n // columns
    reduce_staged(epilogue, partials, tile._replace(values=values), part, rows * columns, tidx)
