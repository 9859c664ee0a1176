"""Stores of dK and dV in the SM90 attention backward, from registers: no shared memory is left for them while
the next tile is loaded."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.hw.vectors import PAIRS, eight_columns, vector_at

from .backward_sm90_spec import BackwardSpec
from .backward_sm90_visits import Site
from .backward_work import VECTOR


class Output(NamedTuple):
    """dK or dV: TMA store or None, its coordinates, and the tensor (rows, D, (heads, B))."""

    atom: cute.CopyAtom | None
    coordinates: cute.Tensor
    tensor: cute.Tensor


class Outputs(NamedTuple):
    """Destinations of a work tile's results."""

    dk: Output
    dv: Output


def image_of(spec: BackwardSpec, output: Output, site: Site) -> Int32:
    """Number of the tile's head and sequence among those of an output."""
    at, heads = site.job.at, output.tensor.shape[2]
    return at.kv_head + (Int32(0) if spec.varlen else at.batch * heads[0])


@cute.jit
def store_rows(spec: cutlass.Constexpr, output: Output, acc: cute.Tensor, factor: Float32, site: Site):
    """Stores this warpgroup's 64 rows of dK or dV times `factor`, 16 bytes a thread."""
    seq, thread = site.job.seq, site.thread
    target = output.tensor[None, None, image_of(spec, output, site)]
    if cutlass.const_expr(spec.varlen):
        target = cute.domain_offset((seq.k_start, 0), target)
    for first in cutlass.range_constexpr(0, cute.size(acc) // VECTOR, PAIRS):
        column = 8 * (first + thread % PAIRS)
        for r in cutlass.range_constexpr(2):
            row = site.key + 8 * r
            pairs = cute.make_rmem_tensor(2 * PAIRS, spec.dtype)
            for i in cutlass.range_constexpr(2 * PAIRS):
                value = acc[VECTOR * (first + i // 2) + 2 * r + i % 2]
                pairs[i] = (value * factor).to(spec.dtype)
            words = cute.recast_tensor(pairs, Int32)
            moved = eight_columns([words[i] for i in range(PAIRS)], thread)
            for i in cutlass.range_constexpr(PAIRS):
                words[i] = moved[i]
            if row < seq.k_len and column < target.shape[1]:
                cute.autovec_copy(pairs, vector_at(target, (row, column), 2 * PAIRS))
