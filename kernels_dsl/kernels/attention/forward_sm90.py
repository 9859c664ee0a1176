"""Attention forward for Hopper: TMA, WGMMA, warp-specialised, persistent. O = softmax(scale Q K^T + mask) V.

Roles. The last warpgroup of a CTA is the producer: one of its warps issues the TMA loads
(`forward_sm90_producer`). Each warpgroup before it is a consumer of 64 query rows: both products by WGMMA,
the softmax in registers, and the output (`forward_sm90_consumer`). With fp8 operands the producer's other
warps may transpose V (`forward_sm90_transpose`, `forward_sm90_deferred`). `forward_sm90_kernel` hands out the
roles.

Pipelines. Q, K and V have a ring each, released by every consumer warp. Q's has two stages where there is
room for them, and Q is released after its tile's last scores. The output goes through a ring of staging
buffers a warpgroup (`blocks.epilogue`), so that the next tile's Q, K and V can arrive while this tile's
output leaves.

Timeline of a consumer. The scores of the next key block are computed while this one's softmax and output
are in flight (Shah et al., 'FlashAttention-3', 2024), and named barriers pass the right to issue WGMMA
from warpgroup to warpgroup, so that one's softmax runs beside another's products:

    tensor cores | Q K0 | Q K1, P0 V0 | (others) | Q K2, P1 V1 | (others) ...
    registers           | softmax 0 | | softmax 1, rescale O  | | softmax 2, rescale O ...

Variants differ in the key blocks that a tile visits (`blocks.attention.kv_blocks`) and in what happens to the
elements of a score tile (`blocks.attention.mask`). Only blocks that an edge cuts are masked.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_dsl.blocks.attention.kv_blocks import KeyLists, Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.seqlen import SeqLens
from kernels_dsl.blocks.attention.work import (
    LAYOUTS,
    AttentionArguments,
    Operands,
    describe_work,
    pack_heads,
    rows_first,
)
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import first_part, staged_smem_layout
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from kernels_dsl.config.attention import AttentionVariant, Sm90AttentionConfig

from .forward_sm90_deferred import DeferredValues, describe_deferred, segment_layouts
from .forward_sm90_kernel import attention_kernel
from .forward_sm90_records import Layouts, Loads, Mmas, Output
from .forward_sm90_spec import ForwardSpec, make_spec


@cute.jit
def attention_sm90(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    o: cute.Tensor,
    lse: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple[cute.Tensor, cute.Tensor, cute.Tensor | None] | None,  # `SeqLens`
    max_q: Int32,
    lists: tuple[cute.Tensor | None, ...] | None,  # `KeyLists`
    sinks: cute.Tensor | None,
    mask: cute.Tensor | None,
    aux: tuple[cute.Tensor, ...] | None,
    counter: cute.Tensor | None,
    max_ctas: Int32,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr[str],
    config: cutlass.Constexpr[Sm90AttentionConfig],
    variant: cutlass.Constexpr[AttentionVariant],
):
    """Launches the kernel. q, k, v, o: `layout` is a key of `LAYOUTS`; contiguous head dimensions, 16-byte
    aligned base and strides (o: only where `config.o_tma`). `max_ctas`: SMs that run CTAs at one time. The
    others: see `AttentionArguments`, `ScoreOperands`, `Window`.
    """
    mQ, mK, mO = (rows_first(t, LAYOUTS[layout]) for t in (q, k, o))  # (rows, dim, head, batch)
    mV = cute.make_tensor(v.iterator, cute.select(rows_first(v, LAYOUTS[layout]).layout, mode=[1, 0, 2, 3]))
    arguments = AttentionArguments(
        lse, ScoreOperands(scale, softcap, mask, aux), Window(left, right),
        None if seqlens is None else SeqLens(*seqlens), max_q,
        None if lists is None else KeyLists(*lists), sinks, counter,
    )  # fmt: skip
    launch(Operands(mQ, mK, mV, mO), arguments, max_ctas, stream, config, variant)


def launch(
    operands: Operands,
    arguments: AttentionArguments,
    max_ctas: Int32,
    stream: cuda.CUstream,
    config: Sm90AttentionConfig,
    variant: AttentionVariant,
    deferred_values: DeferredValues | None = None,
) -> None:
    """Launches the kernel for 16-bit operands and for fp8.

    V is transposed, (Dv, Sk, Hk, B): 16-bit along Dv, fp8 along the keys, in the order that
    `score_tile.to_operand` needs. With `config.turns_v` it is as K.
    """
    mQ, mK, mV, mO = operands
    descales = arguments.descales
    spec = make_spec(
        config, variant, mQ.element_type, mO.element_type, arguments.seqlens is not None,
        descales is not None and descales.by_block,
    )  # fmt: skip
    if spec.pack > 1:
        mQ, mO = pack_heads(mQ, spec.pack), pack_heads(mO, spec.pack)
    mmas, layouts = make_mmas(spec), make_layouts(spec)
    keys = spec.tile.keys
    v_tile = (keys, spec.dim_v) if spec.raw_stages else (spec.dim_v, keys)
    loads = Loads(
        tma.make_load_atom(mQ, layouts.q, (spec.tile_m, spec.dim)),
        tma.make_load_atom(mK, first_part(layouts.k, (keys, spec.dim)), (keys, spec.dim)),
        tma.make_load_atom(mV, first_part(layouts.raw_v or layouts.v, v_tile), v_tile),
    )
    mO = cute.group_modes(mO, 2, 4)  # (rows, dim, (head, batch)): what the epilogue takes
    output = Output(None, mO, mO)
    if spec.epilogue.use_tma:
        output = Output(*tma.make_store_atom(mO, layouts.o, spec.epilogue.subtile), mO)
    deferred = None
    if deferred_values is not None and layouts.segments is not None:
        deferred = describe_deferred(spec, deferred_values, mV, layouts.segments)
    first = None if deferred is None else deferred.first
    work = describe_work(spec, arguments, mQ, mK, cute.size(mO, mode=[1]), first)
    ctas = cutlass.max(cutlass.min(max_ctas * spec.ctas_per_sm, work.tiles.size), Int32(1))
    attention_kernel(spec, mmas, layouts, loads, output, work, deferred).launch(
        grid=(ctas, 1, 1),
        block=(spec.threads, 1, 1),
        min_blocks_per_mp=spec.ctas_per_sm,
        # In percent. For more than one CTA the compiler asks a GPU without it, and there may be none; for
        # one it would cost a driver call at every launch.
        preferred_smem_carveout=None if spec.ctas_per_sm == 1 else 100,
        stream=stream,
        use_pdl=True,
    )


def make_mmas(spec: ForwardSpec) -> Mmas:
    """WGMMA of both products and of the output."""
    major = OperandMajorMode
    rmem = warpgroup.OperandSource.RMEM
    return Mmas(
        make_warpgroup_mma(spec.dtype, major.K, major.K, spec.tile_n),
        make_warpgroup_mma(spec.dtype, major.K, spec.v_major, spec.dim_v, rmem),
        make_warpgroup_mma(spec.out_dtype, major.K, major.K, spec.epilogue.epi_n),
    )


def make_layouts(spec: ForwardSpec) -> Layouts:
    """Layouts of all tiles in shared memory."""
    major = OperandMajorMode
    raw_v = None
    q = staged_smem_layout(spec.dtype, (spec.tile_m, spec.dim), spec.q_stages, major.K)
    k = staged_smem_layout(spec.dtype, (spec.tile_n, spec.dim), spec.stages, major.K)
    v = staged_smem_layout(spec.dtype, (spec.dim_v, spec.tile_n), spec.stages, spec.v_major)
    if spec.raw_stages:
        raw_v = staged_smem_layout(spec.dtype, (spec.tile_n, spec.dim_v), spec.raw_stages, major.K)
    o = staged_smem_layout(spec.out_dtype, spec.epilogue.subtile, spec.epilogue.stages, major.K)
    return Layouts(q, k, v, o, raw_v, segment_layouts(spec) if spec.deferred_shares else None)
