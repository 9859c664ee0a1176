"""Attention backward for SM80-class GPUs: cp.async, ldmatrix, mma.sync. dQ, dK and dV from dO and the
log-sum-exp.

A CTA keeps a tile of keys and walks the query blocks that see them, of all query heads that share the keys.
Its warps have 16 or 32 keys each. In most tiles all play the same role and hold dK and dV of their keys in
registers; where shared memory has no room for more keys, two warps have the same keys and half of the queries
each, and add up at the end. (Others: `backward_sm80_gradients`, `backward_sm80_columns`.) Scores are computed
transposed, so that P and dS come out of the accumulators as the register operand of dV += P^T dO and
dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K, which sums over all keys.

A step of warps with the same role, for one query block:

    S^T = K Q^T, dP^T = V dO^T | P = exp2(S - lse), dV += P^T dO | dS = P (dP - row sum), dK += dS^T Q
    dS to shared memory, barrier | copies of a later block start | dQ = dS K, to memory

With two buffers of Q, dO and dS that barrier is the only one: the buffers that the next copies overwrite were
read before it. With fewer there is a second one, after the copies that the next step waits for.

Shares of dQ are added to float32 sums in global memory, which `backward_finish` scales, converts and stores.
In the deterministic variant a query tile's shares are added in the order of their key tiles.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.query_blocks import decode_key_tile
from kernels_dsl.blocks.attention.seqlen import seq_info
from kernels_dsl.blocks.attention.work import LAYOUTS, rows_first
from kernels_dsl.blocks.hw.dsl import entry_name
from kernels_dsl.blocks.hw.swizzled_rows import ALIGN

from .backward_sm80_copies import Tensors
from .backward_sm80_spec import make_spec
from .backward_sm80_tile import key_tile
from .backward_work import BackwardWork, Sums, describe_backward, key_job


@cute.jit
def attention_backward_sm80(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    do: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    lse: cute.Tensor,  # float32, see `Sums`
    row_sums: cute.Tensor,
    dq_sums: cute.Tensor | None,
    turns: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple[cute.Tensor, cute.Tensor, cute.Tensor | None] | None,  # `SeqLens`
    max_k: Int32,  # keys of the longest sequence where packed
    mask: cute.Tensor | None,
    aux: tuple[cute.Tensor, ...] | None,
    lists: tuple[cute.Tensor, cute.Tensor] | None,  # `QueryLists`
    d_mask: cute.Tensor | None,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
):
    """Launches the kernel. q, k, v, do, dk, dv: `layout` is a key of `LAYOUTS`; contiguous head dimensions,
    base and strides multiples of 16 bytes.
    """
    mQ, mK, mV, mdO, mdK, mdV = (rows_first(t, LAYOUTS[layout]) for t in (q, k, v, do, dk, dv))
    spec = make_spec(config, variant, mQ.element_type, seqlens is not None)
    work = describe_backward(
        spec, mQ, mK, seqlens, max_k, Window(left, right), ScoreOperands(scale, softcap, mask, aux),
        Sums(lse, row_sums, dq_sums, turns), lists=lists, d_mask=d_mask,
    )  # fmt: skip
    kernel = backward_kernel(spec, Tensors(mQ, mK, mV, mdO, mdK, mdV), work)
    kernel.launch(
        grid=(work.tiles.size, 1, 1),
        block=(spec.threads, 1, 1),
        smem=config.smem_bytes,
        min_blocks_per_mp=1,
        stream=stream,
    )


@entry_name("attention_backward_sm80")
@cute.kernel
def backward_kernel(spec: cutlass.Constexpr, tensors: Tensors, work: BackwardWork):
    """Computes the key tile of this CTA."""
    smem = cutlass.memory.SmemAllocator().allocate(spec.config.smem_bytes, byte_alignment=ALIGN)
    at = decode_key_tile(Int32(cute.arch.block_idx()[0]), work.tiles, spec.from_last)
    seq = seq_info(work.extent, at.batch)
    job = key_job(spec, work, at, seq)
    # The grid is made for the longest sequence.
    if cutlass.const_expr(not spec.varlen):
        key_tile(spec, tensors, smem.toint(), work, job)
    elif at.n * spec.tile_k < seq.k_len:
        key_tile(spec, tensors, smem.toint(), work, job)
