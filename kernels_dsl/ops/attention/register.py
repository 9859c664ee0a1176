"""Attention as an operator of PyTorch: schema, fake implementation, and what autograd is told.

`torch.ops.kernels_dsl.attention` is what torch.compile, export and dispatch modes see. A schema has no place
for Python functions, so score and mask functions go by name (`functions`).
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.attention.arguments import NAMES, Extras, describe
from kernels_dsl.ops.attention.attention import run_direct
from kernels_dsl.ops.attention.blocks import BlockLists
from kernels_dsl.ops.attention.functions import KernelFunction, function_of, name_of
from kernels_dsl.ops.attention.outputs import check_out, copy_rows, lse_shape, out_shape
from kernels_dsl.ops.gradients import refuse_forward_mode
from kernels_dsl.ops.operators import define

_TENSORS = (
    "mask", "sinks", "counts", "indices", "full_counts", "full_indices", "cu_seqlens_q", "cu_seqlens_k",
    "seqused_k",
)  # fmt: skip
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"Tensor? {name}=None" for name in _TENSORS)
    + ", Tensor[]? aux=None, *, str layout='bshd', bool causal=False, int? window_left=None, "
    "int? window_right=None, str alignment='bottom_right', float? scale=None, float softcap=0.0, "
    "int block_q=128, int block_k=128, int max_seqlen_q=0, int max_seqlen_k=-1, "
    "bool return_lse=False, str? family=None, str? score_mod=None, str? mask_mod=None) -> (Tensor, Tensor)"
)
_DEFAULTS: dict[str, Any] = {
    "layout": "bshd", "causal": False, "window_left": None, "window_right": None, "alignment": "bottom_right",
    "scale": None, "softcap": 0.0, "block_q": 128, "block_k": 128, "max_seqlen_q": 0, "max_seqlen_k": -1,
    "return_lse": False, "family": None, "score_mod": None, "mask_mod": None, "aux": None,
}  # fmt: skip


def _options(
    tensors: tuple[Any, ...], given: dict[str, Any]
) -> tuple[dict[str, Any], tuple[Any, ...], Extras]:
    """(all keywords, options of `run_direct`, tensors) of an operator call. `tensors`: of _TENSORS, aux."""
    positional = dict(zip((*_TENSORS, "aux"), tensors))
    a: dict[str, Any] = {**dict.fromkeys(_TENSORS), **_DEFAULTS, **given, **positional}
    lists = (a["counts"], a["indices"], a["full_counts"], a["full_indices"])
    blocks = None
    if any(x is not None for x in lists):
        blocks = BlockLists(*lists, block=(a["block_q"], a["block_k"]))
    seqlens, longest = None, None
    if a["layout"] == "thd":
        seqlens = (a["cu_seqlens_q"], a["cu_seqlens_k"], a["seqused_k"])
        longest = (a["max_seqlen_q"], None if a["max_seqlen_k"] < 0 else a["max_seqlen_k"])
    window = (a["window_left"], a["window_right"])
    unlimited = window == (None, None)
    options = (a["causal"], None if unlimited else window, a["alignment"], a["scale"], a["softcap"])
    return a, options, Extras(a["mask"], a["sinks"], blocks, tuple(a["aux"] or ()), seqlens, longest)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: Any, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    a, options, extras = _options(tensors, given)
    rest = (True, None, (None, a["family"]), True)
    functions = (function_of(a["score_mod"]), function_of(a["mask_mod"]))
    if a["return_lse"]:
        return run_direct(q, k, v, a["layout"], options, extras, functions, rest)
    out = run_direct(q, k, v, a["layout"], options, extras, functions, (False, *rest[1:]))
    return out, q.new_empty((0,), dtype=torch.float32)


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: Any, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    a, (causal, window, alignment, scale, softcap), extras = _options(tensors, given)
    call = describe(
        q, k, v, layout=a["layout"], causal=causal, window=window, alignment=alignment, scale=scale,
        softcap=softcap, extras=extras,
    )  # fmt: skip
    lse = q.new_empty(lse_shape(call) if a["return_lse"] else (0,), dtype=torch.float32)
    if call.layout == "bhsd" and q.stride(1) < q.stride(2) and call.q_len > 1 and call.heads > 1:
        return q.new_empty((call.batch, call.q_len, call.heads, call.dim_v)).transpose(1, 2), lse
    return q.new_empty(out_shape(call)), lse


define("attention", _SCHEMA, _attention, _attention_fake, "backward yet: call it under torch.no_grad()")


def _name(argument: str, function: Any) -> str | None:
    if function is None:
        return None
    if isinstance(function, KernelFunction):
        return function.name
    return name_of(argument, function, torch.compiler.is_compiling())


def call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    options: tuple[Any, ...],
    extras: Extras,
    rest: tuple[Any, ...],
) -> Any:
    """A call as an operator. `rest`: (score_mod, mask_mod, return_lse, out, family).

    TypeError where the operator's schema cannot express an argument.
    """
    score_mod, mask_mod, return_lse, out, family = rest
    named = dict(zip(NAMES.get(layout, ("q", "k", "v")), (q, k, v)))
    refuse_forward_mode("attention", {**named, **extras.tensors(), "out": out})
    for i, x in enumerate(extras.aux):
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"aux[{i}] is a {type(x).__name__}, must be a torch.Tensor under torch.compile, a mode or a "
                "subclass"
            )
    causal, window, alignment, scale, softcap = options
    left, right = (None, None) if window is None else window
    keywords: dict[str, Any] = {
        "layout": layout, "causal": causal, "window_left": left, "window_right": right,
        "alignment": alignment, "scale": scale, "softcap": softcap, "mask": extras.mask,
        "sinks": extras.sinks, "return_lse": return_lse,
        "family": family, "score_mod": _name("score_mod", score_mod), "mask_mod": _name("mask_mod", mask_mod),
        "aux": extras.aux or None,
    }  # fmt: skip
    if extras.blocks is not None:
        names = ("counts", "indices", "full_counts", "full_indices")
        keywords.update(zip(names, extras.blocks.tensors))
        keywords["block_q"], keywords["block_k"] = extras.blocks.block
    if extras.seqlens is not None:
        keywords.update(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), extras.seqlens))
    if extras.max_seqlens is not None:
        max_q, max_k = extras.max_seqlens
        keywords.update(max_seqlen_q=max_q, max_seqlen_k=-1 if max_k is None else max_k)
    result, lse = torch.ops.kernels_dsl.attention(q, k, v, **keywords)
    if out is not None:
        check_out(out, tuple(result.shape), result.dtype, result.device)
        result = copy_rows(out, result, extras)
    return (result, lse) if return_lse else result
