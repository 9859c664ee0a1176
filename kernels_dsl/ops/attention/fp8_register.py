"""`attention_fp8` as an operator of PyTorch: schema, fake implementation, and what autograd is told."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.attention.arguments import Extras
from kernels_dsl.ops.attention.attention_fp8 import NAMED, described, run_direct
from kernels_dsl.ops.attention.blocks import BlockLists
from kernels_dsl.ops.attention.outputs import check_out, copy_rows, lse_shape, out_shape
from kernels_dsl.ops.gradients import refuse_forward_mode, refuse_written
from kernels_dsl.ops.operators import define

_DESCALES = ("q_descale", "k_descale", "v_descale")
_LISTS = ("counts", "indices", "full_counts", "full_indices")
_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_NAMES = (*_DESCALES, "sinks", *_LISTS, *_SEQLENS)
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"Tensor? {name}=None" for name in _NAMES)
    + ", *, bool causal=False, int? window_left=None, int? window_right=None, str alignment='bottom_right', "
    "float? scale=None, float softcap=0.0, int block_q=128, int block_k=128, int max_seqlen_q=0, "
    "bool return_lse=False) -> (Tensor, Tensor)"
)


def _parts(
    tensors: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Extras]:
    """(descales, options, extras) of an operator call; `tensors`: those behind q, k and v."""
    padded = tensors + tuple(given.get(name) for name in _NAMES[len(tensors) :])
    descales, sinks, lists, seqlens = padded[:3], padded[3], padded[4:8], padded[8:]
    blocks = None
    if any(x is not None for x in lists):
        block = (given.get("block_q", 128), given.get("block_k", 128))
        counts, indices, full_counts, full_indices = lists
        blocks = BlockLists(counts, indices, full_counts, full_indices, block)
    window = (given.get("window_left"), given.get("window_right"))
    options = (
        given.get("causal", False), None if window == (None, None) else window,
        given.get("alignment", "bottom_right"), given.get("scale"), given.get("softcap", 0.0),
    )  # fmt: skip
    if seqlens[0] is None:
        return descales, options, Extras(sinks=sinks, blocks=blocks)
    longest = (given.get("max_seqlen_q", 0), None)
    return descales, options, Extras(sinks=sinks, blocks=blocks, seqlens=seqlens, max_seqlens=longest)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor | None, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    descales, options, extras = _parts(tensors, given)
    if given.get("return_lse", False):
        return run_direct((q, k, v), descales, options, extras, (True, None, None))
    out = run_direct((q, k, v), descales, options, extras, (False, None, None))
    return out, q.new_empty((0,), dtype=torch.float32)


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor | None, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    descales, options, extras = _parts(tensors, given)
    call = described((q, k, v), descales, options, extras)
    shape = lse_shape(call) if given.get("return_lse", False) else (0,)
    lse = q.new_empty(shape, dtype=torch.float32)
    return q.new_empty(out_shape(call), dtype=torch.bfloat16), lse


define("attention_fp8", _SCHEMA, _attention, _attention_fake, "backward: call it under torch.no_grad()")


def call(
    tensors: tuple[torch.Tensor, ...],
    descales: tuple[Any, ...],
    options: tuple[Any, ...],
    extras: Extras,
    rest: tuple[bool, torch.Tensor | None],
) -> Any:
    """A call as an operator; arguments as those of `attention_fp8.run_direct`, `rest`: (return_lse, out).

    ValueError where gradients are asked for with `out`.
    """
    return_lse, given = rest
    named = {**dict(zip(NAMED, (*tensors, *descales))), **extras.tensors()}
    refuse_forward_mode("attention_fp8", {**named, "out": given})
    if given is not None:
        refuse_written(named.values(), out=given)
    causal, window, alignment, scale, softcap = options
    left, right = (None, None) if window is None else window
    keywords: dict[str, Any] = {
        "causal": causal, "window_left": left, "window_right": right, "alignment": alignment, "scale": scale,
        "softcap": softcap, "return_lse": return_lse, "sinks": extras.sinks,
    }  # fmt: skip
    if extras.blocks is not None:
        keywords.update(zip(_LISTS, extras.blocks.tensors))
        keywords["block_q"], keywords["block_k"] = extras.blocks.block
    if extras.seqlens is not None:
        keywords.update(zip(_SEQLENS, extras.seqlens))
    if extras.max_seqlens is not None:
        keywords["max_seqlen_q"] = extras.max_seqlens[0]
    out, lse = torch.ops.kernels_dsl.attention_fp8(*tensors, *descales, **keywords)
    if given is not None:
        check_out(given, tuple(out.shape), out.dtype, out.device)
        out = copy_rows(given, out, extras)
    return (out, lse) if return_lse else out
