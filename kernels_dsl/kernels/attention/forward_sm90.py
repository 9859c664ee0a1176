"""Attention forward for Hopper: TMA, WGMMA, warp-specialised, persistent. O = softmax(scale Q K^T + mask) V.

Roles. The last warpgroup of a CTA is the producer: one of its warps issues the TMA loads. Each warpgroup
before it is a consumer of 64 query rows: both products by WGMMA, the softmax in registers, and the output.

Pipelines. Q, K and V have a ring each, released by every consumer warp. Q's has two stages where there is
room for them, and Q is released after its tile's last scores. The output goes through a ring of staging
buffers a warpgroup (`blocks.epilogue`), so that the next tile's Q, K and V can arrive while this tile's
output leaves.

Timeline of a consumer. The scores of the next key block are computed while this one's softmax and output
are in flight (Shah et al., 'FlashAttention-3', 2024), and named barriers pass the right to issue WGMMA
from warpgroup to warpgroup, so that one's softmax runs beside another's products:

    tensor cores | Q K0 | Q K1, P0 V0 | (others) | Q K2, P1 V1 | (others) ...
    registers           | softmax 0 | | softmax 1, rescale O  | | softmax 2, rescale O ...

Variants differ in the key blocks that a tile visits (`blocks.kv_blocks`) and in what happens to the
elements of a score tile (`blocks.mask`). Only blocks that an edge cuts are masked.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.work import LAYOUTS, Work, describe_work, pack_heads, rows_first
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma

from .forward_sm90_deferred import describe_later, later_layouts
from .forward_sm90_kernel import attention_kernel
from .forward_sm90_spec import make_spec


@cute.jit
def attention_sm90(
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
    counter: cute.Tensor | None,  # int32 (1,), 0: tiles are taken from it as CTAs become free
    max_ctas: Int32,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
):
    """Launches the kernel. q, k, v, o: `layout` is a key of `LAYOUTS`; contiguous head dimensions, 16-byte
    aligned base and strides (o: only where `config.o_tma`). `max_ctas`: SMs that run CTAs at one time.
    """
    mQ, mK, mO = (rows_first(t, LAYOUTS[layout]) for t in (q, k, o))  # (rows, dim, head, batch)
    mV = cute.make_tensor(v.iterator, cute.select(rows_first(v, LAYOUTS[layout]).layout, mode=[1, 0, 2, 3]))
    call = Call(
        lse, ScoreOperands(scale, softcap, mask, aux), Window(left, right), seqlens, max_q=max_q, lists=lists,
        sinks=sinks, counter=counter, descales=None,
    )  # fmt: skip
    launch((mQ, mK, mV, mO), call, max_ctas, stream, config, variant)


class Call(NamedTuple):
    """Runtime arguments beside q, k, v, o; see `attention_sm90`, and `Work` for `descales`."""

    lse: cute.Tensor | None
    scores: ScoreOperands
    window: Window
    seqlens: tuple | None
    max_q: Int32
    lists: tuple | None
    sinks: cute.Tensor | None
    counter: cute.Tensor | None
    descales: tuple | None
    later: tuple | None = None
    """V as it comes, (keys, Dv, Hk, B), and the numbers of `sm90_later`."""


def launch(tensors: tuple, call: Call, max_ctas: Int32, stream, config, variant) -> None:
    """Launches the kernel on Q (Sq, D, H, B), K (Sk, D, Hk, B), V (Dv, Sk, Hk, B) and O (Sq, Dv, H, B).

    16-bit V is contiguous along Dv. fp8 V is contiguous along the keys, in the order that
    `blocks.score_tile.to_operand` needs, or with `config.turns_v` (Sk, Dv, Hk, B) as K.
    """
    mQ, mK, mV, mO = tensors
    dtypes = (mQ.element_type, mO.element_type)
    scales_blocks = any(s is not None and cute.rank(s) == 3 for s in call.descales or ())
    spec = make_spec(config, variant, dtypes, call.seqlens is not None, scales_blocks)
    if cutlass.const_expr(spec.pack > 1):
        mQ, mO = pack_heads(mQ, spec.pack), pack_heads(mO, spec.pack)
    source = warpgroup.OperandSource
    major = OperandMajorMode
    v_major = major.K if spec.dtype.width == 8 else major.MN
    mma_qk = make_warpgroup_mma(spec.dtype, major.K, major.K, spec.tile_n)
    mma_pv = make_warpgroup_mma(spec.dtype, major.K, v_major, spec.dim_v, source.RMEM)
    mma_out = make_warpgroup_mma(spec.out_dtype, major.K, major.K, spec.epilogue.epi_n)
    q_layout = staged_smem_layout(spec.dtype, (spec.tile_m, spec.dim), spec.q_stages, major.K)
    k_layout = staged_smem_layout(spec.dtype, (spec.tile_n, spec.dim), spec.stages, major.K)
    v_layout = staged_smem_layout(spec.dtype, (spec.dim_v, spec.tile_n), spec.stages, v_major)
    v_tile, raw_layout = (spec.dim_v, spec.tile_n), None
    if cutlass.const_expr(spec.raw_stages):
        v_tile = (spec.tile_n, spec.dim_v)
        raw_layout = staged_smem_layout(spec.dtype, v_tile, spec.raw_stages, major.K)
    o_layout = staged_smem_layout(spec.out_dtype, spec.epilogue.subtile, spec.epilogue.stages, major.K)

    loads = (
        tma.make_load_atom(mQ, q_layout, (spec.tile_m, spec.dim)),
        tma.make_load_atom(mK, k_layout, (spec.tile_n, spec.dim)),
        tma.make_load_atom(mV, raw_layout or v_layout, v_tile),
    )
    mO = cute.group_modes(mO, 2, 4)  # (rows, dim, (head, batch)): what the epilogue takes
    store = (None, mO)
    if cutlass.const_expr(spec.epilogue.use_tma):
        store = (*tma.make_store_atom(mO, o_layout, spec.epilogue.subtile),)

    later, segments = None, None
    if cutlass.const_expr(call.later is not None):
        segments = later_layouts(spec)
        later = describe_later(spec, call.later[0], mV, call.later[1], segments)
    first = None if later is None else later.first
    tiles, extent, heads_per_kv = describe_work(spec, mQ, mK, call.seqlens, call.max_q, first)
    work = Work(
        tiles=tiles,
        extent=extent,
        window=call.window,
        scores=call.scores,
        lists=call.lists,
        sinks=call.sinks,
        lse=call.lse,
        heads_per_kv=heads_per_kv,
        v_dim=cute.size(mO, mode=[1]),
        counter=call.counter,
        descales=call.descales,
        later=later,
    )
    ctas = cutlass.max(cutlass.min(max_ctas * spec.ctas_per_sm, work.tiles.size), Int32(1))
    layouts = (q_layout, k_layout, v_layout, o_layout, raw_layout, segments)
    kernel = attention_kernel(spec, (mma_qk, mma_pv, mma_out), layouts, loads, (*store, mO), work)
    kernel.launch(
        grid=(ctas, 1, 1),
        block=(spec.threads, 1, 1),
        min_blocks_per_mp=spec.ctas_per_sm,
        # In percent. For more than one CTA the compiler asks a GPU without it, and there may be none; for
        # one it would cost a driver call at every launch.
        preferred_smem_carveout=None if spec.ctas_per_sm == 1 else 100,
        stream=stream,
        use_pdl=True,
    )
