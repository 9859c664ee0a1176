"""fp8 attention and, before it, the transpose of V that its second product needs."""

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.config.quantize import TileQuantization
from kernels_dsl.kernels.attention.forward_sm80_fp8 import attention_sm80_fp8
from kernels_dsl.kernels.attention.forward_sm90_deferred import first_heads
from kernels_dsl.kernels.attention.forward_sm90_fp8 import attention_sm90_fp8
from kernels_dsl.kernels.quantize.packed import transpose_packed
from kernels_dsl.kernels.quantize.tile import launch_tiles
from kernels_dsl.kernels.quantize.views import Outputs

TRANSPOSE = TileQuantization("e4m3", None, "one", key_order=True)


@cute.jit
def attention_fp8_with_transpose(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    turned: cute.Tensor | None,  # as `attention_sm90_fp8`'s v, in whole 16 keys; written. None: `turns_v`
    o: cute.Tensor,
    lse: cute.Tensor | None,
    q_descale: cute.Tensor | None,
    k_descale: cute.Tensor | None,
    v_descale: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple | None,
    max_q: Int32,
    lists: tuple | None,
    sinks: cute.Tensor | None,
    counter: cute.Tensor | None,
    numbers: cute.Tensor | None,  # int32, 0, with config.later_v
    max_ctas: Int32,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    descale_modes: cutlass.Constexpr,
):
    """Launches both; arguments as those of `attention_sm90_fp8`, but v as the caller has it, contiguous along
    the head dimension. `descale_modes` says how many of the first modes of each descale, (B, heads, blocks of
    keys), count; 0: it is one element.
    """
    values = v if turned is None else turned
    if cutlass.const_expr(not config.turns_v):
        _transpose(v, turned, seqlens, config.later_v, stream, layout)
    descales = _counted_modes((q_descale, k_descale, v_descale), descale_modes)
    later = None
    if cutlass.const_expr(config.later_v):
        later = v, numbers
    tensors, scalars = (q, k, values, later, o, lse), (scale, softcap, left, right)
    rest = (seqlens, max_q, descales, lists, sinks, counter, max_ctas, stream)
    attention_sm90_fp8(*tensors, *scalars, *rest, layout=layout, config=config, variant=variant)


@cute.jit
def attention_fp8_sm80_with_transpose(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    turned: cute.Tensor,
    o: cute.Tensor,
    lse: cute.Tensor | None,
    q_descale: cute.Tensor | None,
    k_descale: cute.Tensor | None,
    v_descale: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    seqlens: tuple | None,
    max_q: Int32,
    lists: tuple | None,
    sinks: cute.Tensor | None,
    stream: cuda.CUstream,
    layout: cutlass.Constexpr,
    config: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    descale_modes: cutlass.Constexpr,
):
    """The same with the SM80-class kernel."""
    _transpose(v, turned, seqlens, 0, stream, layout)
    descales = _counted_modes((q_descale, k_descale, v_descale), descale_modes)
    tensors, scalars = (q, k, turned, o, lse), (scale, softcap, left, right)
    rest = (seqlens, max_q, descales, lists, sinks, stream)
    attention_sm80_fp8(*tensors, *scalars, *rest, layout=layout, config=config, variant=variant)


def _transpose(
    v: cute.Tensor, turned: cute.Tensor, seqlens: tuple | None, later_v: int, stream, layout: str
) -> None:
    """Launches the transpose of V; only of the first heads where `later_v` (`Sm90AttentionConfig`)."""
    if layout == "thd":
        transpose_packed(v, turned, seqlens[1], seqlens[2], stream, TRANSPOSE)
        return
    heads_first = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[0, 2, 1, 3]))
    matrices = first_heads(v.shape[0] * v.shape[2], later_v) if later_v else None
    spec = replace(TRANSPOSE, lets_start=later_v > 0)
    outputs = Outputs(None, None, turned, None)
    launch_tiles(heads_first, outputs, None, stream, spec, matrices)


def _counted_modes(descales: tuple, modes: tuple) -> tuple:
    """Descales as the kernels take them."""
    return tuple(_leading_modes(x, count) for x, count in zip(descales, modes))


def _leading_modes(descale, modes: int):
    """A descale as (B, heads) or (B, heads, blocks of keys)."""
    if descale is None:
        return None
    if modes == 0:  # whatever the batch and the head
        return cute.make_tensor(descale.iterator, cute.make_layout((1, 1), stride=(0, 0)))
    layout = cute.make_layout(descale.shape[:modes], stride=descale.stride[:modes])
    return cute.make_tensor(descale.iterator, layout)
