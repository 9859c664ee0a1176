"""Attention forward for Hopper with fp8 operands: the kernel of `sm90`, with QGMMA for both products.

fp8 WGMMA reads both operands along K only, so V comes transposed, (…, Dv, keys), or warps of the producer's
warpgroup transpose its blocks in shared memory (`sm90_turn`). Its keys are permuted within every sixteen, so
that the probabilities are in the right registers for the second product as the first one leaves them (see
`blocks.score_tile.to_operand`).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.work import LAYOUTS, rows_first

from .forward_sm90 import Call, launch


@cute.jit
def attention_sm90_fp8(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,  # (B, Hk, Dv, keys); packed (Hk, Dv, keys), sequences at `padded_start`; turns_v: as k
    later: tuple | None,  # with config.later_v: V as k, and int32 numbers, as `sm90_later.Later` has them
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
    counter: cute.Tensor | None,
    max_ctas: Int32,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
):
    """Launches the kernel; arguments as those of `attention_sm90`."""
    mQ, mK, mO = (rows_first(t, LAYOUTS[layout]) for t in (q, k, o))  # (rows, dim, head, batch)
    modes = (1, 2, 0, None) if layout == "thd" else (2, 3, 1, 0)
    mV = rows_first(v, LAYOUTS[layout] if config.turns_v else modes)  # (Dv, keys, head, batch), or as K
    if cutlass.const_expr(later is not None):
        later = rows_first(later[0], LAYOUTS[layout]), later[1]
    call = Call(
        lse, ScoreOperands(scale, softcap, None, None), Window(left, right), seqlens, max_q=max_q,
        lists=lists, sinks=sinks, counter=counter, descales=descales, later=later,
    )  # fmt: skip
    launch((mQ, mK, mV, mO), call, max_ctas, stream, config, variant)
