"""Attention in 16 and 8 bits as operators of PyTorch: schemas and fake implementations.

A schema has no place for Python functions, so score and mask functions go by name (`functions`), and none for
records, so that block lists, windows and packed sequences are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from kernels_dsl.checks.eager_path import asks_gradients, refuse_forward_mode, refuse_written
from kernels_dsl.ops.attention import gradient
from kernels_dsl.ops.attention.arguments import (
    AttentionArguments,
    AttentionCall,
    OperatorArguments,
    describe,
    keywords_of,
    longest_of,
)
from kernels_dsl.ops.attention.backward import check_gradient
from kernels_dsl.ops.attention.fp8_plan import ATTENTION_FP8, AttentionFp8Arguments
from kernels_dsl.ops.attention.functions import KernelFunction, function_of, name_of
from kernels_dsl.ops.attention.operation import ATTENTION
from kernels_dsl.ops.attention.outputs import check_out, copy_rows, lse_shape, out_shape
from kernels_dsl.ops.operators import LIBRARY, define, schema_of
from lowering.records import frozen

_LISTS = ("counts", "indices", "full_counts", "full_indices")
_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_DESCALES = ("q_descale", "k_descale", "v_descale")
Call = TypeVar("Call", bound=AttentionArguments)
Pair = tuple[torch.Tensor, torch.Tensor]


@frozen
class Operands(OperatorArguments):
    """The arguments of both operators, of which each leaves some out. Lengths below 0 are none."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    full_counts: torch.Tensor | None = None
    full_indices: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    aux: tuple[Any, ...] = ()
    layout: str = "bshd"
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    alignment: str = "bottom_right"
    scale: float | None = None
    softcap: float = 0.0
    block_q: int = 128
    block_k: int = 128
    max_seqlen_q: int = 0
    max_seqlen_k: int = -1
    return_lse: bool = False
    family: str | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    score_mod_bwd: str | None = None
    deterministic: bool = True

    outputs = ()


_ATTENTION_LACKS = _DESCALES
_FP8_LACKS = (
    "mask", "block_table", "aux", "layout", "max_seqlen_k", "family", "score_mod", "mask_mod",
    "score_mod_bwd", "deterministic",
)  # fmt: skip
_RESULTS = "-> (Tensor, Tensor)"


def _operands(lacks: tuple[str, ...], tensors: tuple[Any, ...], keywords: dict[str, Any]) -> Operands:
    names = [name for name in Operands.types if name not in lacks]
    return Operands(**dict(zip(names, tensors)), **keywords)


def _attention_call(tensors: tuple[Any, ...], keywords: dict[str, Any]) -> AttentionArguments:
    x = _operands(_ATTENTION_LACKS, tensors, keywords)
    return AttentionArguments(
        x.q, x.k, x.v, x.options(), x.layout, x.extras(), x.score_mod, x.mask_mod,
        return_lse=x.return_lse, family=x.family, drops_rows=True, score_mod_bwd=x.score_mod_bwd,
        deterministic=x.deterministic,
    )  # fmt: skip


def _fp8_call(tensors: tuple[Any, ...], keywords: dict[str, Any]) -> AttentionFp8Arguments:
    x = _operands(_FP8_LACKS, tensors, keywords)
    return AttentionFp8Arguments(
        x.q, x.k, x.v, x.options(), "bshd" if x.cu_seqlens_q is None else "thd", x.extras(),
        return_lse=x.return_lse, drops_rows=True, q_descale=x.q_descale, k_descale=x.k_descale,
        v_descale=x.v_descale,
    )  # fmt: skip


def _pair(call: AttentionArguments, result: Any) -> Pair:
    """Output and log-sum-exp, which has no elements where nobody asks for it."""
    return result if call.return_lse else (result, call.q.new_empty((0,), dtype=torch.float32))


def _new_lse(call: AttentionArguments, described: AttentionCall) -> torch.Tensor:
    return call.q.new_empty(lse_shape(described) if call.return_lse else (0,), dtype=torch.float32)


def _taking(record: Callable[..., Call], function: Callable[[Call], Pair]) -> Callable[..., Pair]:
    """`function`, which takes a call's record, as what takes an operator's arguments."""

    def implementation(*tensors: object, **keywords: Any) -> Pair:
        return function(record(tensors, keywords))

    return implementation


def _attention(call: AttentionArguments) -> Pair:
    score_mod, mask_mod = function_of(call.score_mod), function_of(call.mask_mod)
    traced = replace(call, score_mod=score_mod, mask_mod=mask_mod, score_mod_bwd=None)
    return _pair(call, ATTENTION.run(traced))


def _attention_fake(call: AttentionArguments) -> Pair:
    call = replace(call, score_mod=None, mask_mod=None, score_mod_bwd=None)
    described, q = describe(call), call.q
    if call.layout == "bhsd" and q.stride(1) < q.stride(2) and described.q_len > 1 and described.heads > 1:
        shape = (described.batch, described.q_len, described.heads, described.dim_v)
        return q.new_empty(shape).transpose(1, 2), _new_lse(call, described)
    return q.new_empty(out_shape(described)), _new_lse(call, described)


def _attention_fp8(call: AttentionFp8Arguments) -> Pair:
    return _pair(call, ATTENTION_FP8.run(call))


def _attention_fp8_fake(call: AttentionFp8Arguments) -> Pair:
    described = ATTENTION_FP8.describe(call)
    return call.q.new_empty(out_shape(described), dtype=torch.bfloat16), _new_lse(call, described)


define(
    "attention", f"({schema_of(Operands, _ATTENTION_LACKS)}) {_RESULTS}",
    _taking(_attention_call, _attention), _taking(_attention_call, _attention_fake),
)  # fmt: skip
torch.library.register_autograd(
    "kernels_dsl::attention", gradient.backward, setup_context=gradient.setup_context, lib=LIBRARY
)
define(
    "attention_fp8", f"({schema_of(Operands, _FP8_LACKS)}) {_RESULTS}",
    _taking(_fp8_call, _attention_fp8), _taking(_fp8_call, _attention_fp8_fake),
    "backward: call it under torch.no_grad()",
)  # fmt: skip


def _shared(call: AttentionArguments) -> dict[str, Any]:
    """The arguments of a call that both operators take."""
    extras = call.extras
    keywords = {**keywords_of(call.options), "return_lse": call.return_lse, "sinks": extras.sinks}
    if extras.blocks is not None:
        keywords.update(zip(_LISTS, extras.blocks.tensors))
        keywords["block_q"], keywords["block_k"] = extras.blocks.block
    if extras.seqlens is not None:
        keywords.update(zip(_SEQLENS, extras.seqlens[:3]))
    keywords["max_seqlen_q"] = longest_of(extras).q
    return keywords


def _result(call: AttentionArguments, output: torch.Tensor, lse: torch.Tensor) -> Any:
    """The result as the caller gets it."""
    if call.out is not None:
        check_out(call.out, tuple(output.shape), output.dtype, output.device)
        output = copy_rows(call.out, output, call.extras)
    return (output, lse) if call.return_lse else output


def _name(argument: str, function: Any) -> str | None:
    if function is None:
        return None
    if isinstance(function, KernelFunction):
        return function.name
    return name_of(argument, function, torch.compiler.is_compiling())


def attention(call: AttentionArguments) -> Any:
    """A call as an operator. TypeError where the operator's schema cannot express an argument."""
    refuse_forward_mode("attention", {**call.read(), "out": call.out})
    extras = call.extras
    for i, x in enumerate(extras.aux):
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"aux[{i}] is a {type(x).__name__}, must be a torch.Tensor under torch.compile, a mode or a "
                "subclass"
            )
    keywords = _shared(call)
    read = call.read()
    if asks_gradients(read.values()):
        refuse_written(read.values(), out=call.out)
        for name, x in read.items():
            if x is not None and x.requires_grad:
                check_gradient(call, name, None)
        keywords["return_lse"] = True
    keywords.update(
        layout=call.layout, mask=extras.mask, family=call.family, aux=extras.aux or None,
        max_seqlen_k=longest_of(extras).k,
        block_table=None if extras.seqlens is None else extras.seqlens.table,
        score_mod=_name("score_mod", call.score_mod), mask_mod=_name("mask_mod", call.mask_mod),
        score_mod_bwd=_name("score_mod_bwd", call.score_mod_bwd), deterministic=call.deterministic,
    )  # fmt: skip
    return _result(call, *torch.ops.kernels_dsl.attention(call.q, call.k, call.v, **keywords))


def attention_fp8(call: AttentionFp8Arguments) -> Any:
    """A call as an operator. ValueError where gradients are asked for with `out`."""
    call.refuse_gradients()
    read = call.read()
    refuse_forward_mode("attention_fp8", {**read, "out": call.out})
    if call.out is not None:
        refuse_written(read.values(), out=call.out)
    tensors = (call.q, call.k, call.v, *call.descales)
    return _result(call, *torch.ops.kernels_dsl.attention_fp8(*tensors, **_shared(call)))
