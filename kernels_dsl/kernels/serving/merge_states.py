"""Partial attention results over disjoint sets of keys, merged into the result over all of them.

A thread has one vector of one row of the output. It finds the largest log-sum-exp of the row, then adds the
vectors of the states in their order, so that the bits depend on nothing but the states. Sums are float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.hw.dsl import choose, entry_name
from kernels_dsl.blocks.hw.vectors import load_vector, vector_at

THREADS = 128
LOG2_E = math.log2(math.e)


class States(NamedTuple):
    """Results of attention; `lse`: natural logarithms, float32, without the last mode of `out`."""

    out: cute.Tensor
    lse: cute.Tensor


class Divisors(NamedTuple):
    """Divisors that turn the number of a thread's vector into its coordinates."""

    vectors: cute.FastDivmodDivisorV2  # of a row
    heads: cute.FastDivmodDivisorV2
    rows: cute.FastDivmodDivisorV2  # of a sequence


def merge_states(
    out: cute.Tensor,
    lse: cute.Tensor,
    merged: cute.Tensor,
    merged_lse: cute.Tensor,
    stream,
    vector: cutlass.Constexpr[int],
    early: cutlass.Constexpr[bool],
):
    """Launch on out (n, B, S, H, D) and lse (n, B, S, H): merged (B, S, H, D), merged_lse (B, S, H).

    vector: elements that a thread loads at once, which D and all strides are multiples of, as are addresses;
    1 for any. early: a kernel may start before the one before it has ended (sm_90 and later).
    """
    _, batches, rows, heads, columns = out.shape
    vectors = columns // vector
    divisors = Divisors(*(cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (vectors, heads, rows)))
    count = batches * rows * heads * vectors
    merge_states_kernel(States(out, lse), States(merged, merged_lse), divisors, count, vector, early).launch(
        grid=[cute.ceil_div(count, THREADS), 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=early,
    )


@entry_name("merge_states")
@cute.kernel
def merge_states_kernel(
    parts: States,
    merged: States,
    divisors: Divisors,
    count: Int32,
    vector: cutlass.Constexpr,
    early: cutlass.Constexpr,
):
    """Device side of `merge_states`; `count`: vectors of the output."""
    if const_expr(early):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    number = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if number < count:
        row, v = divmod(number, divisors.vectors)
        row, h = divmod(row, divisors.heads)
        b, s = divmod(row, divisors.rows)
        lse, out = parts.lse[None, b, s, h], parts.out[None, b, s, h, None]
        states = lse.shape[0]
        highest = Float32(-math.inf)
        for n in cutlass.range(states, unroll=4):
            highest = cute.arch.fmax(highest, lse[n])
        base = choose(highest == Float32(-math.inf), Float32(0.0), highest)
        total = Float32(0.0)
        sums = cute.make_rmem_tensor(vector, Float32)
        sums.fill(0.0)
        for n in cutlass.range(states, unroll=1):
            state = lse[n]
            if state != Float32(-math.inf):  # else no key, and memory that nobody may have written
                weight = cute.math.exp2((state - base) * Float32(LOG2_E), fastmath=True)
                total = total + weight
                values = load_vector(out, (n, v * vector), vector)
                for i in range_constexpr(vector):
                    sums[i] = sums[i] + weight * values[i].to(Float32)
        if total != Float32(0.0):
            for i in range_constexpr(vector):
                sums[i] = sums[i] / total
        target = merged.out[b, s, h, None]
        found = cute.make_rmem_tensor(vector, target.element_type)
        found.store(sums.load().to(target.element_type))
        cute.autovec_copy(found, vector_at(target, (v * vector,), vector))
        if v == 0:
            merged.lse[b, s, h] = base + cute.math.log(total)
