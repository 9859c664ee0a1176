"""Attention forward with e4m3 operands: softmax(scale · Q Kᵀ) V, from fp8 values and their scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.options import integer
from kernels_dsl.checks.overlap import ranges_meet
from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionOptions,
    Extras,
    MaxSeqlens,
    Seqlens,
    checked_scalars,
    widths_of,
)
from kernels_dsl.ops.attention.fp8_plan import ATTENTION_FP8, AttentionFp8Arguments
from kernels_dsl.ops.attention.supports import PACKED, parts_of
from kernels_dsl.ops.checked import is_checked
from kernels_dsl.sparse.block_lists import BlockLists

_Tensor = torch.Tensor
_NAMES = ("sinks", "blocks", "q_descale", "k_descale", "v_descale", "return_lse", "out", "config")
"""The arguments of `attention_fp8` that are no `AttentionOptions`."""


def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    blocks: BlockLists | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Any:
    """softmax(scale · (q · q_descale) (k · k_descale)ᵀ) (v · v_descale), in bf16.

    q: (B, Sq, H, D), k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv), torch.float8_e4m3fn, D and Dv multiples of 16 up
    to 256. The descales, float32: one element, or a factor a head: (B, H) or (B, Hk) for q, (B, Hk) for k and
    v, as FlashAttention-3 has them, or with two more modes of 1, as
    `quantize(x.transpose(1, 2), scaling="matrix")` returns them; None is 1. For k and v also a factor for
    every 128 keys, (B, Hk, ceil(Sk / 128)) or with one more mode of 1, as "128x128" returns them up to D =
    128; they must be greater than 0. The other arguments are those of `kernels_dsl.attention`; there is no
    `mask`, `score_mod`, `mask_mod`.

    Scores and the softmax are float32. The probabilities are scaled by a power of two a row and rounded to
    e4m3: a relative error of at most 1/16, and for those below 2⁻¹² of the row's largest sum over a quarter
    of a block of keys an absolute one of 2⁻¹⁶ of that sum. On Hopper, at D up to 128 and without
    `return_lse`, a third of the exponentials is piecewise linear, with an error of -4 to 2 % of its own
    (docs/fp8.md).

    Returns (B, Sq, H, Dv) bf16, and with `return_lse` float32 (B, H, Sq). Compute capability 9.0, 8.9 and
    12.0. Raises TypeError and ValueError that name the argument; `attention_fp8_supports` gives the reasons
    as text. No gradients.
    """
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    window = window if window is None else widths_of(window)
    key: Any = None
    tensors: tuple[Any, ...] = ()
    if sinks is blocks is out is config is None and return_lse is False and type(q) is type(k) is _Tensor:
        tensors = (q, k, v, q_descale, k_descale, v_descale)
        absent = (q_descale is None, k_descale is None, v_descale is None)
        if True in absent:
            tensors = (q, k, v, *[x for x in tensors[3:] if x is not None])
        try:
            key = (q.shape, k.shape, absent, causal, window, alignment, scale, softcap)
        except RuntimeError:  # nested tensors, which have no shape, are refused further on
            pass
        else:
            bare = call_cache.find(ATTENTION_FP8.calls, key, tensors)
            if bare is not None:
                try:
                    return bare(q, k, v, q_descale, k_descale, v_descale)
                except ValueError as error:
                    call_cache.refused(ATTENTION_FP8.calls, key, error)
    options = AttentionOptions(causal, window, alignment, scale, softcap)
    descales = (q_descale, k_descale, v_descale)
    extras = NO_EXTRAS if sinks is blocks is None else Extras(sinks=sinks, blocks=blocks)
    return _other((q, k, v, *descales), options, extras, key, tensors, return_lse, config, out)


def attention_fp8_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    *,
    seqused_k: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    blocks: BlockLists | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
) -> Any:
    """`attention_fp8` of packed sequences, each to itself, arguments as there and in `attention_varlen`.

    q: (Tq, H, D), k: (Tk, Hk, D), v: (Tk, Hk, Dv). cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,) rising
    from 0. max_seqlen_q: no sequence has more queries. seqused_k: int32 (sequences,). The batch of descales
    and of `blocks` is the sequences.

    Returns (Tq, H, Dv) bf16, and with `return_lse` float32 (H, Tq).
    """
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    window = window if window is None else widths_of(window)
    if type(max_seqlen_q) is not int:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q)
    seqlens = Seqlens(cu_seqlens_q, cu_seqlens_k, seqused_k)
    extras = Extras(sinks=sinks, blocks=blocks, seqlens=seqlens, max_seqlens=MaxSeqlens(max_seqlen_q))
    options = AttentionOptions(causal, window, alignment, scale, softcap)
    descales = (q_descale, k_descale, v_descale)
    return _other((q, k, v, *descales), options, extras, None, (), return_lse, config, out)


def _other(
    operands: tuple[Any, ...],
    options: AttentionOptions,
    extras: Extras,
    key: Any,
    tensors: tuple[Any, ...],
    return_lse: bool,
    config: Any,
    out: Any,
) -> Any:
    """A call with more than q, k, v and descales, `operands`, or that the call cache does not have."""
    q, k, v, *descales = operands
    if key is None and type(q) is type(k) is _Tensor and not is_checked():
        kinds = (*map(type, descales), extras is NO_EXTRAS or extras.form(), out is None, return_lse, config)
        tensors = tuple([x for x in (*operands, *extras.values(), out) if x is not None])
        try:
            key = (q.shape, k.shape, kinds, options)
        except RuntimeError:  # nested tensors, which have no shape, are refused further on
            pass
        else:
            found = call_cache.find(ATTENTION_FP8.calls, key, tensors)
            if found is not None and (out is None or not ranges_meet(out, tensors[:-1], found.extents)):
                try:
                    return found.plan.run(operands, extras, out)
                except ValueError as error:
                    call_cache.refused(ATTENTION_FP8.calls, key, error)
    call = AttentionFp8Arguments(
        q, k, v, options, "bshd" if extras.seqlens is None else "thd", extras,
        return_lse=return_lse, config=config, out=out, q_descale=descales[0], k_descale=descales[1],
        v_descale=descales[2],
    )  # fmt: skip
    return ATTENTION_FP8.first(call, key, tensors, _operator)


def _operator() -> Callable[[AttentionFp8Arguments], Any]:
    from kernels_dsl.ops.attention import register

    return register.attention_fp8


def attention_fp8_supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> str | None:
    """Says why `attention_fp8(q, k, v, **options)` cannot run here; None if it can. Compiles nothing.

    With `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q` and perhaps `seqused_k`: `attention_fp8_varlen`.
    """
    packed = options.get("cu_seqlens_q") is not None or options.get("cu_seqlens_k") is not None
    names = (*_NAMES, *PACKED) if packed else _NAMES
    try:
        parts = parts_of("attention_fp8_varlen" if packed else "attention_fp8", options, names)
        layout = "thd" if packed else "bshd"
        call = AttentionFp8Arguments(q, k, v, parts.options, layout, parts.extras, **parts.others)
        call.check()
        ATTENTION_FP8.new_plan(call.in_memory())
    except (TypeError, ValueError) as error:
        return str(error)
    return None
