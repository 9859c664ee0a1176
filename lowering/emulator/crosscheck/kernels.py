"""Tiny kernels that hold one instruction each: registers, and the warp's matrix instructions.

Every tensor is a 32-bit integer image of registers or of shared memory, so that the host side decides what
the bits mean. The instruction is PTX text with `$0`, `$1`… for its operands: results first, then inputs.
"""

# Kernel bodies are traced, not run: the DSL's values have no static types.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="call-arg"

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

LANES = 32
THREADS = 128


@dsl_user_op
def inline(text: str, results: int, inputs: list, *, loc=None, ip=None) -> list:
    """The PTX `text` with `results` and len(inputs) 32-bit operands; returns the results as Int32."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in inputs]
    constraints = ",".join(["=r"] * results + ["r"] * len(values))
    kind = None if results == 0 else T.i32()
    if results > 1:
        kind = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * results)})>")
    out = llvm.inline_asm(
        kind, values, text, constraints, has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    if results == 0:
        return []
    if results == 1:
        return [Int32(out)]
    return [Int32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(results)]


@cute.kernel
def _elementwise(inputs: tuple, out: cute.Tensor, texts: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    operands = [tensor[i] for tensor in inputs]
    for row in cutlass.range_constexpr(len(texts)):
        out[row, i] = inline(texts[row], 1, operands)[0]


def elementwise(inputs: tuple, out: cute.Tensor, stream, texts: cutlass.Constexpr):
    """`out[row, i] = texts[row](inputs[0][i], inputs[1][i], …)`: Int32, a multiple of 128 elements each."""
    count = cute.size(inputs[0])
    rows = cute.make_tensor(out.iterator, cute.make_layout((len(texts), count), stride=(count, 1)))
    _elementwise(inputs, rows, texts).launch(
        grid=(count // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def _registers(inputs: tuple, out: cute.Tensor, text: cutlass.Constexpr):
    lane, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    operands = []
    for tensor in inputs:
        for r in cutlass.range_constexpr(cute.size(tensor, mode=[2])):
            operands.append(tensor[block, lane, r])
    results = inline(text, cute.size(out, mode=[2]), operands)
    for r in cutlass.range_constexpr(cute.size(out, mode=[2])):
        out[block, lane, r] = results[r]


def registers(
    inputs: tuple, out: cute.Tensor, stream,
    text: cutlass.Constexpr, counts: cutlass.Constexpr,
):  # fmt: skip
    """One warp a block; each tensor is (blocks, 32, count) Int32: `text` on all registers of a lane.

    `counts`: registers of each input, then of `out`.
    """
    static = [_with_registers(t, c) for t, c in zip((*inputs, out), counts)]
    _registers(tuple(static[:-1]), static[-1], text).launch(
        grid=(out.shape[0], 1, 1), block=(LANES, 1, 1), stream=stream
    )


def _with_registers(tensor: cute.Tensor, count: int) -> cute.Tensor:
    """The same (blocks, 32, count) tensor with a static layout within a block."""
    layout = cute.make_layout((tensor.shape[0], LANES, count), stride=(LANES * count, count, 1))
    return cute.make_tensor(tensor.iterator, layout)


@cute.kernel
def _through_shared(
    image: cute.Tensor, addresses: cute.Tensor, held: cute.Tensor, out: cute.Tensor,
    text: cutlass.Constexpr, words: cutlass.Constexpr, store: cutlass.Constexpr,
):  # fmt: skip
    lane, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    shared = smem.allocate_tensor(Int32, cute.make_layout(words), byte_alignment=128)
    for i in cutlass.range_constexpr(words // LANES):
        shared[i * LANES + lane] = image[block, i * LANES + lane, 0]
    cute.arch.sync_threads()
    address = shared.iterator.toint() + addresses[block, lane, 0]
    count = cute.size(held if store else out, mode=[2])
    if cutlass.const_expr(store):
        inline(text, 0, [address] + [held[block, lane, r] for r in range(count)])
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(words // LANES):
            out[block, i * LANES + lane, 0] = shared[i * LANES + lane]
    else:
        results = inline(text, count, [address])
        for r in cutlass.range_constexpr(count):
            out[block, lane, r] = results[r]


def through_shared(
    image: cute.Tensor, addresses: cute.Tensor, held: cute.Tensor, out: cute.Tensor, stream,
    text: cutlass.Constexpr, words: cutlass.Constexpr, count: cutlass.Constexpr, store: cutlass.Constexpr,
):  # fmt: skip
    """`ldmatrix`, `stmatrix` and plain shared memory accesses of one warp a block.

    `image` (blocks, words, 1): shared memory before; `addresses` (blocks, 32, 1): byte offset of each lane;
    `held` (blocks, 32, count): registers to store. `out`: registers loaded (blocks, 32, count) or, with
    `store`, shared memory afterwards (blocks, words, 1).
    """
    blocks = image.shape[0]

    def view(tensor, rows, columns):
        layout = cute.make_layout((blocks, rows, columns), stride=(rows * columns, columns, 1))
        return cute.make_tensor(tensor.iterator, layout)

    target = view(out, words, 1) if store else view(out, LANES, count)
    _through_shared(
        view(image, words, 1), view(addresses, LANES, 1), view(held, LANES, count), target, text, words, store
    ).launch(grid=(blocks, 1, 1), block=(LANES, 1, 1), stream=stream)
