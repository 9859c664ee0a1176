"""`gemm` as operators of PyTorch: schema, fake implementation, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.ops.gemm.arguments import describe
from kernels_dsl.ops.gemm.gemm import run_direct
from kernels_dsl.ops.gemm.grad import backward, refuse_functions, setup_context
from kernels_dsl.ops.operators import (
    LIBRARY,
    asks_gradients,
    config_of,
    config_text,
    define,
    epilogue_name,
    refuse_forward_mode,
    refuse_written,
    require_tensors,
)  # fmt: skip

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? c=None, Tensor? bias=None, Tensor? residual=None, "
    "Tensor[]? epilogue_args=None, *, "
    'str bias_axis="n", float alpha=1.0, float beta=1.0, str? activation=None, str? epilogue=None, '
    "ScalarType? out_dtype=None, str? config=None, str? family=None"
)


_TENSORS = ("c", "bias", "residual", "epilogue_args")
_DEFAULTS: dict[str, Any] = {
    "bias_axis": "n", "alpha": 1.0, "beta": 1.0, "activation": None, "epilogue": None, "out_dtype": None,
}  # fmt: skip


def _options(rest: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """What `describe` takes of an operator call besides a and b; `rest`: the positional ones behind b."""
    given = {**dict.fromkeys(_TENSORS), **_DEFAULTS, **dict(zip(_TENSORS, rest)), **keywords}
    options = {name: given[name] for name in (*_TENSORS, *_DEFAULTS)}
    return {**options, "epilogue_args": tuple(options["epilogue_args"] or ()), "out": given.get("out")}


def _gemm(a: torch.Tensor, b: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
    config, family = config_of(keywords.get("config")), keywords.get("family")
    return run_direct(a, b, config=config, family=family, **_options(rest, keywords))


def _gemm_out(a: torch.Tensor, b: torch.Tensor, *rest: Any, **keywords: Any) -> None:
    _gemm(a, b, *rest, **keywords)


def _gemm_fake(a: torch.Tensor, b: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
    call = describe(a, b, **_options(rest, keywords))
    return a.new_empty(call.d_shape, dtype=call.d_dtype)


def _gemm_out_fake(a: torch.Tensor, b: torch.Tensor, *rest: Any, **keywords: Any) -> None:
    describe(a, b, **_options(rest, keywords))


define("gemm", f"({_ARGUMENTS}) -> Tensor", _gemm, _gemm_fake)
define("gemm_out", f"({_ARGUMENTS}, Tensor(a!) out) -> ()", _gemm_out, _gemm_out_fake)
torch.library.register_autograd("kernels_dsl::gemm", backward, setup_context=setup_context, lib=LIBRARY)


def refuse_gradients(
    values: Sequence[Any], epilogue: Any, activation: str | None, out: torch.Tensor | None
) -> None:
    """ValueError where a call with these tensors asks for gradients that do not exist."""
    if asks_gradients((*values, out)):
        refuse_functions(epilogue, activation)
    refuse_written(values, out=out)


def through_dispatcher(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: str | Callable[..., Any] | None,
    epilogue_args: Sequence[Any],
    out: torch.Tensor | None,
    config: GemmConfig | None,
    **keywords: Any,
) -> torch.Tensor:
    """`gemm` as an operator call, for autograd, torch.compile, tensor subclasses and dispatch modes.

    Raises ValueError where gradients are asked for that do not exist (`epilogue`, `out`), and TypeError where
    the operator's schema cannot express an argument.
    """
    named = {"a": a, "b": b, **{f"epilogue_args[{i}]": x for i, x in enumerate(epilogue_args)}}
    require_tensors(named, {"c": c, "bias": bias, "residual": residual, "out": out})
    values = (*named.values(), c, bias, residual)
    refuse_gradients(values, epilogue, keywords["activation"], out)
    refuse_forward_mode("gemm", {**named, "c": c, "bias": bias, "residual": residual, "out": out})
    keywords["epilogue"] = epilogue_name(epilogue)
    keywords["config"] = None if config is None else config_text(config)
    positional = (a, b, c, bias, residual, list(epilogue_args) or None)
    if out is None:
        return torch.ops.kernels_dsl.gemm(*positional, **keywords)
    torch.ops.kernels_dsl.gemm_out(*positional, out=out, **keywords)
    return out
