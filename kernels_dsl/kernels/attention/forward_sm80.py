"""Attention forward for SM80-class GPUs: cp.async, ldmatrix, mma.sync. O = softmax(scale Q K^T + mask) V.

One CTA computes one tile of query rows; all its warps play the same role, each for 16 or 32 rows of its own:
both products, the softmax in registers, and the output. Probabilities stay in registers, since accumulators
of the first product have the layout of an operand of the second.

Pipeline. K and V have two buffers each. One barrier a step tells both that everyone's copies of this step's
blocks are there, and that all warps are done with the buffers of the step before, which the next copies
overwrite; so a copy has a whole step to arrive.

    step t   wait, barrier | start copies of K, V t + 1 | S = Q K | softmax | O = O * correction + P V

With `overlap` the output of block t - 1 is summed between the scores and the softmax of block t, so that the
two can share the issue slots; V is copied one step later.

Several CTAs share an SM, so that one's softmax runs beside another's products. The grid has one CTA for each
tile: the hardware hands them out as SMs become free, in the order of `blocks.attention.query_tiles`, the
longest first. `forward_sm80_tile` has the work of a CTA.

Variants differ in the key blocks that a tile visits (`blocks.attention.kv_blocks`) and in what happens to the
elements of a score tile (`blocks.attention.mask`), as with the SM90 kernel, which shares the blocks.
"""

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.kv_blocks import KeyLists, Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.query_tiles import decode_query_tile
from kernels_dsl.blocks.attention.seqlen import SeqLens, seq_info
from kernels_dsl.blocks.attention.work import (
    LAYOUTS,
    AttentionArguments,
    Operands,
    Work,
    describe_work,
    rows_first,
)
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.swizzled_rows import ALIGN, in_pairs
from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig

from .forward_sm80_spec import Spec, make_spec
from .forward_sm80_tile import work_tile


@cute.jit
def attention_sm80(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    o: cute.Tensor,
    lse: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple[cute.Tensor | None, ...] | None,  # `SeqLens`, and a table where K and V lie in pages
    max_q: Int32,
    lists: tuple[cute.Tensor | None, ...] | None,  # `KeyLists`
    sinks: cute.Tensor | None,
    mask: cute.Tensor | None,
    aux: tuple[cute.Tensor, ...] | None,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr[str],
    config: cutlass.Constexpr[Sm80AttentionConfig],
    variant: cutlass.Constexpr[AttentionVariant],
):
    """Launches the kernel. q, k, v, o: `layout` is a key of `LAYOUTS`; contiguous head dimensions, base and
    strides multiples of 16 bytes. With a table k and v are (pages, keys of a page, Hk, D). The others: see
    `AttentionArguments`, `ScoreOperands`, `Window`.
    """
    starts = None if seqlens is None else SeqLens(*seqlens[:3])
    table = None if seqlens is None or len(seqlens) == 3 else seqlens[3]
    of_keys = LAYOUTS[layout if table is None else "bshd"]
    modes = (LAYOUTS[layout], of_keys, of_keys, LAYOUTS[layout])
    operands = Operands(*map(rows_first, (q, k, v, o), modes))
    arguments = AttentionArguments(
        lse, ScoreOperands(scale, softcap, mask, aux), Window(left, right),
        starts, max_q, None if lists is None else KeyLists(*lists), sinks, table=table,
    )  # fmt: skip
    launch(operands, arguments, stream, config, variant)


def launch(
    operands: Operands,
    arguments: AttentionArguments,
    stream: cuda.CUstream,
    config: Sm80AttentionConfig,
    variant: AttentionVariant,
) -> None:
    """Launches the kernel for 16-bit operands, and for fp8 with V transposed.

    That is (Dv, Sk, Hk, B), the keys in the order that `score_tile.to_operand` needs.
    """
    descales = arguments.descales
    by_block = descales is not None and descales.by_block
    spec = make_spec(config, variant, operands.q.element_type, arguments.seqlens is not None, by_block)
    spec = replace(spec, paged=arguments.table is not None)
    work = describe_work(spec, arguments, operands.q, operands.k, cute.size(operands.o, mode=[1]))
    if spec.fp8:
        q, k, v = (in_pairs(t) for t in (operands.q, operands.k, operands.v))
        operands = Operands(q, k, v, operands.o)
    attention_kernel(spec, operands, work).launch(
        grid=(cutlass.max(work.tiles.size, Int32(1)), 1, 1),
        block=(spec.threads, 1, 1),
        smem=config.smem_bytes,
        min_blocks_per_mp=config.ctas_per_sm,
        # In percent. For more than one CTA the compiler asks a GPU without it, and there may be none.
        preferred_smem_carveout=None if config.ctas_per_sm == 1 else 100,
        stream=stream,
    )


@entry_name("attention_sm80")
@cute.kernel
def attention_kernel(spec: Spec, operands: Operands, work: Work):
    """Device side: the tile of this CTA. fp8 operands are pairs (`in_pairs`), V transposed."""
    smem = cutlass.memory.SmemAllocator().allocate(spec.config.smem_bytes, byte_alignment=ALIGN)
    at = decode_query_tile(cute.arch.block_idx()[0], work.tiles)
    seq = seq_info(work.extent, at.batch)
    if spec.has_rows(at, seq):
        work_tile(spec, operands, smem.toint(), work, at, seq)
