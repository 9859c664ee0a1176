"""fp8 attention and, before it, the transpose of V that its second product needs: one call for the host.

Matrix instructions of fp8 read both operands along the summed mode only, which for V is the keys, so V comes
transposed, (…, Dv, keys). Its keys are permuted within every sixteen, so that the probabilities are in the
right registers for the second product as the first one leaves them (see
`blocks.attention.score_tile.to_operand`). On Hopper the attention kernel may transpose all of V itself, or
the last part of it (`forward_sm90_transpose`, `forward_sm90_deferred`).
"""

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.kv_blocks import KeyLists, Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.seqlen import SeqLens
from kernels_dsl.blocks.attention.work import (
    LAYOUTS,
    TRANSPOSED,
    AttentionArguments,
    Descales,
    Operands,
    rows_first,
)
from kernels_dsl.config.attention import AttentionVariant, Sm90AttentionConfig
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig
from kernels_dsl.config.quantize import TileQuantization
from kernels_dsl.kernels.quantize.packed import transpose_packed
from kernels_dsl.kernels.quantize.tile import launch_tiles
from kernels_dsl.kernels.quantize.views import Outputs

from . import forward_sm80, forward_sm90
from .forward_sm90_deferred import DeferredValues, first_heads

TRANSPOSE = TileQuantization("e4m3", None, "one", key_order=True)


@cute.jit
def attention_fp8_with_transpose(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    transposed: cute.Tensor | None,  # (B, Hk, Dv, keys in whole 16), written; None: with config.turns_v
    o: cute.Tensor,
    lse: cute.Tensor | None,
    q_descale: cute.Tensor | None,
    k_descale: cute.Tensor | None,
    v_descale: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple[cute.Tensor, cute.Tensor, cute.Tensor | None] | None,  # `SeqLens`
    max_q: Int32,
    lists: tuple[cute.Tensor | None, ...] | None,  # `KeyLists`
    sinks: cute.Tensor | None,
    counter: cute.Tensor | None,
    numbers: cute.Tensor | None,  # counters of `DeferredValues`, with config.later_v
    max_ctas: Int32,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr[str],
    config: cutlass.Constexpr[Sm90AttentionConfig],
    variant: cutlass.Constexpr[AttentionVariant],
    descale_modes: cutlass.Constexpr[tuple[int | None, ...]],
):
    """Launches both on Hopper. Arguments as those of `attention_sm90`; v contiguous along the head dimension;
    packed transposed values are (Hk, Dv, keys) with sequences at `seqlen.padded_start`.

    `descale_modes`: how many of the first modes of each descale, (B, heads, blocks of keys), count; 0: it is
    one element.
    """
    arguments = AttentionArguments(
        lse, ScoreOperands(scale, softcap, None, None), Window(left, right),
        None if seqlens is None else SeqLens(*seqlens), max_q,
        None if lists is None else KeyLists(*lists), sinks, counter,
        descales=leading_modes(Descales(q_descale, k_descale, v_descale), descale_modes),
    )  # fmt: skip
    deferred = None
    mV = rows_first(v, LAYOUTS[layout])  # (keys, Dv, Hk, B)
    if cutlass.const_expr(not config.turns_v):
        transpose(v, transposed, arguments.seqlens, config.later_v, stream, layout)
        if cutlass.const_expr(config.later_v):
            deferred = DeferredValues(mV, numbers)
        mV = rows_first(transposed, TRANSPOSED[layout])  # (Dv, keys, Hk, B)
    mQ, mK, mO = (rows_first(t, LAYOUTS[layout]) for t in (q, k, o))  # (rows, dim, head, batch)
    forward_sm90.launch(Operands(mQ, mK, mV, mO), arguments, max_ctas, stream, config, variant, deferred)


@cute.jit
def attention_fp8_sm80_with_transpose(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    transposed: cute.Tensor,
    o: cute.Tensor,
    lse: cute.Tensor | None,
    q_descale: cute.Tensor | None,
    k_descale: cute.Tensor | None,
    v_descale: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple[cute.Tensor, cute.Tensor, cute.Tensor | None] | None,  # `SeqLens`
    max_q: Int32,
    lists: tuple[cute.Tensor | None, ...] | None,  # `KeyLists`
    sinks: cute.Tensor | None,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr[str],
    config: cutlass.Constexpr[Sm80AttentionConfig],
    variant: cutlass.Constexpr[AttentionVariant],
    descale_modes: cutlass.Constexpr[tuple[int | None, ...]],
):
    """Launches both on sm_89 and later, with the SM80-class kernel."""
    arguments = AttentionArguments(
        lse, ScoreOperands(scale, softcap, None, None), Window(left, right),
        None if seqlens is None else SeqLens(*seqlens), max_q,
        None if lists is None else KeyLists(*lists), sinks,
        descales=leading_modes(Descales(q_descale, k_descale, v_descale), descale_modes),
    )  # fmt: skip
    transpose(v, transposed, arguments.seqlens, 0, stream, layout)
    mQ, mK, mO = (rows_first(t, LAYOUTS[layout]) for t in (q, k, o))  # (rows, dim, head, batch)
    mV = rows_first(transposed, TRANSPOSED[layout])  # (Dv, keys, Hk, B)
    forward_sm80.launch(Operands(mQ, mK, mV, mO), arguments, stream, config, variant)


def transpose(
    v: cute.Tensor,
    transposed: cute.Tensor,
    seqlens: SeqLens | None,
    later_v: int,
    stream: cuda.CUstream,
    layout: str,
) -> None:
    """Launches the transpose of V; only of the first heads where `later_v` (`Sm90AttentionConfig`)."""
    if layout == "thd":
        transpose_packed(v, transposed, seqlens.cu_k, seqlens.used_k, stream, TRANSPOSE)
        return
    heads_first = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[0, 2, 1, 3]))
    matrices = first_heads(v.shape[0] * v.shape[2], later_v) if later_v else None
    spec = replace(TRANSPOSE, lets_start=later_v > 0)
    outputs = Outputs(None, None, transposed, None)
    launch_tiles(heads_first, outputs, None, stream, spec, matrices)


def leading_modes(descales: Descales, modes: tuple[int | None, ...]) -> Descales:
    """Descales as the kernels index them: (B, heads) or (B, heads, blocks of keys)."""

    def view(descale: cute.Tensor | None, count: int | None) -> cute.Tensor | None:
        if descale is None:
            return None
        if count == 0:  # whatever the batch and the head
            return cute.make_tensor(descale.iterator, cute.make_layout((1, 1), stride=(0, 0)))
        layout = cute.make_layout(descale.shape[:count], stride=descale.stride[:count])
        return cute.make_tensor(descale.iterator, layout)

    return Descales(*(view(descale, count) for descale, count in zip(descales, modes)))
