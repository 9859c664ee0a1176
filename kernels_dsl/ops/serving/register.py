"""`attention_decode`, `merge_states` and `append_kv` as operators of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.operators import LIBRARY, NO_GRADIENT, check_as_operator, define, schema_of
from kernels_dsl.ops.serving.append_operation import APPEND_KV, AppendArguments, tensors_of
from kernels_dsl.ops.serving.decode_operation import ATTENTION_DECODE, DecodeArguments, Decoded
from kernels_dsl.ops.serving.merge_operation import (
    MERGE_STATES,
    MergeArguments,
    Merged,
    Saved,
    gradients,
)


def _merge(*tensors: torch.Tensor, **options: Any) -> Merged:
    return MERGE_STATES.run(MergeArguments(*tensors, **options))


def _merge_fake(out: torch.Tensor, lse: torch.Tensor, **options: Any) -> Merged:
    dtype = MERGE_STATES.describe(MergeArguments(out, lse, **options))
    return Merged(out.new_empty(out.shape[1:], dtype=dtype), lse.new_empty(lse.shape[1:]))


def _keep(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[torch.Tensor, ...]
) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _merge_backward(ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> Merged:
    return gradients(Saved(*ctx.saved_tensors), d_out, d_lse)


define("merge_states", f"({schema_of(MergeArguments)}) -> (Tensor, Tensor)", _merge, _merge_fake)
torch.library.register_autograd(
    "kernels_dsl::merge_states", _merge_backward, setup_context=_keep, lib=LIBRARY
)


def merge_states(call: MergeArguments) -> Merged:
    """A call with arguments that are right, as an operator."""
    check_as_operator("merge_states", call)
    return Merged(*torch.ops.kernels_dsl.merge_states(call.out, call.lse, out_dtype=call.out_dtype))


_SCHEMA = schema_of(AppendArguments).replace(
    "Tensor v, ", "Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
)


def _append(*tensors: torch.Tensor | None) -> None:
    APPEND_KV.run(AppendArguments(*tensors))


def _append_fake(*tensors: torch.Tensor | None) -> None:
    APPEND_KV.describe(AppendArguments(*tensors))


define("append_kv", f"({_SCHEMA}) -> ()", _append, _append_fake)


def append_kv(call: AppendArguments) -> None:
    """A call with arguments that are right, as an operator. ValueError where gradients are asked for."""
    check_as_operator("append_kv", call)
    torch.ops.kernels_dsl.append_kv(*tensors_of(call))


_DECODE_SCHEMA = schema_of(DecodeArguments)


def _decode(*tensors: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = ATTENTION_DECODE.call_of(**dict(zip(DecodeArguments.tensors, tensors)), **options)
    out, lse = ATTENTION_DECODE.run(call)
    return out, out.new_empty((0,), dtype=torch.float32) if lse is None else lse


def _decode_fake(*tensors: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = ATTENTION_DECODE.call_of(**dict(zip(DecodeArguments.tensors, tensors)), **options)
    found = ATTENTION_DECODE.describe(call)
    shape = found.lse_shape if call.return_lse else (0,)
    return call.q.new_empty(call.q.shape), call.q.new_empty(shape, dtype=torch.float32)


define("attention_decode", f"({_DECODE_SCHEMA}) -> (Tensor, Tensor)", _decode, _decode_fake, NO_GRADIENT)


def attention_decode(call: DecodeArguments) -> Decoded:
    """A call with arguments that are right, as an operator; its result is copied to `out`, if given."""
    check_as_operator("attention_decode", call)
    choices = {name: getattr(call, name) for name in call.choices}
    out, lse = torch.ops.kernels_dsl.attention_decode(*call.inputs(), **choices)
    if call.out is not None:
        out = call.out.copy_(out)
    return Decoded(out, lse if call.return_lse else None)
