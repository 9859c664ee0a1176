"""The gradient of a gated product's columns, from that of the gated result: one pass over memory.

Column i of the result is f(gate, up) of columns 2 i and 2 i + 1 of the product z. All tensors are dense, so
that rows do not matter: number i of the gradient goes with numbers 2 i and 2 i + 1 of z.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.vectors import load_vector, vector_at

THREADS = 256


def gate_gradient(
    gradient: cute.Tensor,
    z: cute.Tensor,
    d_z: cute.Tensor,
    stream,
    activation: cutlass.Constexpr[str],
    vector: cutlass.Constexpr[int],
    early: cutlass.Constexpr[bool],
):
    """Launch on gradient (n,), z (2 n,), d_z (2 n,).

    vector: pairs that a thread takes, at most; addresses are multiples of what it loads and stores at once.
    early: a kernel may start before the one before it has ended (sm_90 and later).
    """
    vectors = cute.ceil_div(gradient.shape[0], vector)
    gate_gradient_kernel(gradient, z, d_z, activation, vector, early).launch(
        grid=[cute.ceil_div(vectors, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=early
    )


@entry_name("gate_gradient")
@cute.kernel
def gate_gradient_kernel(
    gradient: cute.Tensor,
    z: cute.Tensor,
    d_z: cute.Tensor,
    activation: cutlass.Constexpr,
    vector: cutlass.Constexpr,
    early: cutlass.Constexpr,
):
    """Device side of `gate_gradient`."""
    if const_expr(early):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    pairs = gradient.shape[0]
    first = (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]) * vector
    if first + vector <= pairs:
        of_result = load_vector(gradient, first, vector)
        of_z = load_vector(z, 2 * first, 2 * vector)
        found = _of_pairs(of_result, of_z, d_z.element_type, activation)
        cute.autovec_copy(found, vector_at(d_z, 2 * first, 2 * vector))
    else:
        for i in range_constexpr(vector - 1):  # those after the last whole vector
            if first + i < pairs:
                _one_pair(gradient, z, d_z, first + i, activation)


@cute.jit
def _one_pair(gradient: cute.Tensor, z: cute.Tensor, d_z: cute.Tensor, pair: Int32, activation: str):
    of_result, of_z = load_vector(gradient, pair, 1), cute.make_rmem_tensor(2, z.element_type)
    for i in range_constexpr(2):
        of_z[i] = z[2 * pair + i]
    found = _of_pairs(of_result, of_z, d_z.element_type, activation)
    for i in range_constexpr(2):
        d_z[2 * pair + i] = found[i]


def _of_pairs(
    of_result: cute.Tensor, of_z: cute.Tensor, dtype: type[cutlass.Numeric], activation: str
) -> cute.Tensor:
    """The gradients of pairs in registers, rounded to `dtype`."""
    count = cute.size(of_result)
    columns = cute.make_rmem_tensor(2 * count, Float32)
    columns.store(of_z.load().to(Float32))
    gate, up = (cute.make_tensor(columns.iterator + i, cute.make_layout(count, stride=2)) for i in (0, 1))
    partials = GATES[activation].traced_partials(of_result.load().to(Float32), gate.load(), up.load())
    gate.store(partials.gate)
    up.store(partials.up)
    found = cute.make_rmem_tensor(2 * count, dtype)
    found.store(columns.load().to(dtype))
    return found
