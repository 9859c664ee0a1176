"""Attention forward for SM80-class GPUs with fp8 operands: the kernel of `sm80`, with QMMA for both products.

`mma.sync` of fp8 (sm_89 and later) reads both operands along the summed mode only, and ldmatrix transposes
16-bit elements only, so V comes transposed, (…, Dv, keys). Its keys are permuted within every sixteen as for
Hopper (`sm90_fp8`): a warp's accumulators and operands have the same places there and here.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.work import LAYOUTS, rows_first
from kernels_dsl.blocks.hw.swizzled_rows import in_pairs

from .forward_sm80 import launch
from .forward_sm80_spec import make_spec


@cute.jit
def attention_sm80_fp8(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,  # (B, Hk, Dv, keys); packed (Hk, Dv, keys), sequences at `padded_start`
    o: cute.Tensor,
    lse: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple | None,  # (cu_q, cu_k, used_k or None), int32
    max_q: Int32,  # rows of the longest sequence where packed
    descales: tuple,  # of q (B, H), of k and v (B, Hk) or (B, Hk, blocks of keys), float32 or None
    lists: tuple | None,
    sinks: cute.Tensor | None,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
):
    """Launches the kernel; arguments as those of `attention_sm80`."""
    mQ, mK, mO = (rows_first(t, LAYOUTS[layout]) for t in (q, k, o))  # (rows, dim, head, batch)
    mV = rows_first(v, (1, 2, 0, None) if layout == "thd" else (2, 3, 1, 0))  # (Dv, keys, head, batch)
    by_block = any(x is not None and cute.rank(x) == 3 for x in descales)
    spec = make_spec(config, variant, q.element_type, seqlens is not None, by_block)
    launch(
        spec,
        (*(in_pairs(t) for t in (mQ, mK, mV)), mO),
        (mQ, mK),
        stream,
        seqlens=seqlens,
        max_q=max_q,
        window=Window(left, right),
        scores=ScoreOperands(scale, softcap, None, None),
        lists=lists,
        sinks=sinks,
        lse=lse,
        descales=descales,
    )
