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
tile: the hardware hands them out as SMs become free, in the order of `blocks.query_tiles`: longest first.

Variants differ in the key blocks that a tile visits (`blocks.kv_blocks`) and in what happens to the
elements of a score tile (`blocks.mask`), as with the SM90 kernel, which shares the blocks.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.query_tiles import decode_query_tile
from kernels_dsl.blocks.attention.seqlen import seq_info
from kernels_dsl.blocks.attention.work import LAYOUTS, Work, describe_work, rows_first
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.swizzled_rows import ALIGN

from .forward_sm80_spec import make_spec
from .forward_sm80_tile import work_tile


@cute.jit
def attention_sm80(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    o: cute.Tensor,
    lse: cute.Tensor | None,  # float32 (B, H, Sq); packed (H, T)
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple | None,  # (cu_q, cu_k, used_k or None), int32
    max_q: Int32,  # rows of the longest sequence where packed
    lists: tuple | None,
    sinks: cute.Tensor | None,
    mask: cute.Tensor | None,
    aux: tuple | None,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
):
    """Launches the kernel. q, k, v, o: `layout` is a key of `LAYOUTS`; contiguous head dimensions, base and
    strides multiples of 16 bytes.
    """
    tensors = tuple(rows_first(t, LAYOUTS[layout]) for t in (q, k, v, o))  # (rows, dim, head, batch)
    spec = make_spec(config, variant, q.element_type, seqlens is not None)
    launch(
        spec,
        tensors,
        tensors[:2],
        stream,
        seqlens=seqlens,
        max_q=max_q,
        window=Window(left, right),
        scores=ScoreOperands(scale, softcap, mask, aux),
        lists=lists,
        sinks=sinks,
        lse=lse,
    )


def launch(
    spec,
    tensors: tuple,  # Q, K, V, O as `attention_kernel` takes them
    sized: tuple[cute.Tensor, cute.Tensor],  # Q and K (rows, dim, head, batch)
    stream: cuda.CUstream,
    *,
    seqlens: tuple | None,
    max_q: Int32,
    window: Window,
    scores: ScoreOperands,
    lists: tuple | None,
    sinks: cute.Tensor | None,
    lse: cute.Tensor | None,
    descales: tuple | None = None,
) -> None:
    """Launches the kernel, for 16-bit operands and for fp8."""
    tiles, extent, heads_per_kv = describe_work(spec, *sized, seqlens, max_q)
    work = Work(
        tiles=tiles,
        extent=extent,
        window=window,
        scores=scores,
        lists=lists,
        sinks=sinks,
        lse=lse,
        heads_per_kv=heads_per_kv,
        v_dim=cute.size(tensors[-1], mode=[1]),
        counter=None,
        descales=descales,
    )
    config = spec.config
    attention_kernel(spec, tensors, work).launch(
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
def attention_kernel(spec: cutlass.Constexpr, tensors: tuple, work: Work):
    """Device side: the tile of this CTA. `tensors`: Q, K, V, O as (rows, dim, head, batch); fp8 ones as pairs
    (`in_pairs`), V transposed."""
    smem = cutlass.memory.SmemAllocator().allocate(spec.config.smem_bytes, byte_alignment=ALIGN)
    at = decode_query_tile(cute.arch.block_idx()[0], work.tiles)
    seq = seq_info(work.extent, at.batch)
    if cutlass.const_expr(not spec.varlen):
        work_tile(spec, tensors, smem.toint(), (work, at, seq))
    elif at.m * spec.tile_m < seq.q_len:
        work_tile(spec, tensors, smem.toint(), (work, at, seq))
