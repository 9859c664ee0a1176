"""`quantize` as operators of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks.eager_path import refuse_forward_mode, refuse_written
from kernels_dsl.ops.operators import define, schema_of
from kernels_dsl.ops.quantize.buffers import Made, assemble, new_ones, new_results
from kernels_dsl.ops.quantize.operation import QUANTIZE, QuantizeArguments, check_out, check_out_memory

_TRANSPOSES: dict[str, bool | str] = {"no": False, "yes": True, "both": "both"}
_NAMES = {value: name for name, value in _TRANSPOSES.items()}


def _call_of(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, transpose: str, **options: Any
) -> QuantizeArguments:
    return QuantizeArguments(x, scale, transpose=_TRANSPOSES[transpose], **options)


def _quantize(*tensors: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    call = _call_of(*tensors, **options)
    return new_ones(QUANTIZE.run(call), call.scheme)


def _quantize_fake(*tensors: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    call = _call_of(*tensors, **options)
    return new_results(call.x.shape, QUANTIZE.describe(call), call.x.device)


def _quantize_out(x: torch.Tensor, written: list[torch.Tensor], *scale: torch.Tensor, **options: Any) -> None:
    call = _call_of(x, *scale, **options)
    out = assemble(written, call.scheme, call.scale)
    check_out(out, x, call.scale, call.scheme, strides=False)
    try:
        check_out(out, x, call.scale, call.scheme)
        check_out_memory(out, x, call.scale)
    except ValueError:  # copies that torch.compile made lie as they like
        for t, made in zip(written, new_ones(QUANTIZE.run(call), call.scheme)):
            t.copy_(made)
    else:
        QUANTIZE.plan_of(call)(x, call.scale, out)


def _quantize_out_fake(
    x: torch.Tensor, written: list[torch.Tensor], *scale: torch.Tensor, **options: Any
) -> None:
    call = _call_of(x, *scale, **options)
    scheme = QUANTIZE.describe(call)
    check_out(assemble(written, scheme, call.scale), x, call.scale, scheme, strides=False)


_SCHEMA = schema_of(QuantizeArguments)
_NO_GRADIENT = "gradient: call it under torch.no_grad() or detach x"
define("quantize", f"({_SCHEMA}) -> Tensor[]", _quantize, _quantize_fake, _NO_GRADIENT)
# No argument called "out": Dynamo has rules of its own for those.
_WITH_OUT = _SCHEMA.replace("Tensor x, ", "Tensor x, Tensor(a!)[] written, ")
define("quantize_out", f"({_WITH_OUT}) -> ()", _quantize_out, _quantize_out_fake)


def operator(call: QuantizeArguments) -> Made:
    """A call with arguments that are right, as an operator."""
    tensors, written = call.read(), call.written()
    refuse_written(tensors.values(), **written)
    refuse_forward_mode("quantize", {**tensors, **written})
    options = {"dtype": call.dtype, "scaling": call.scaling, "transpose": _NAMES[call.transpose]}
    if call.out is None:
        made = torch.ops.kernels_dsl.quantize(call.x, call.scale, **options)
        return assemble(made, call.scheme, call.scale)
    torch.ops.kernels_dsl.quantize_out(call.x, new_ones(call.out, call.scheme), call.scale, **options)
    return call.out
