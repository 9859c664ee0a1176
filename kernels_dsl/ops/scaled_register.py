"""`scaled_gemm` as operators of PyTorch: schema, fake implementation, and what autograd is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from kernels_dsl.config.tuned import config_from_json
from kernels_dsl.ops.register import config_text, epilogue_name
from kernels_dsl.ops.scaled_gemm import OPTIONS, described, run_direct

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? scale_result=None, "
    "Tensor? c=None, Tensor? bias=None, Tensor? residual=None, Tensor[]? epilogue_args=None, *, "
    'float alpha=1.0, float beta=1.0, str bias_axis="n", str? activation=None, str? epilogue=None, '
    "ScalarType? out_dtype=None, bool use_fast_accum=False, str? config=None, str? family=None"
)
LIBRARY = torch.library.Library("kernels_dsl", "FRAGMENT")
LIBRARY.define(f"scaled_gemm({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"scaled_gemm_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!)? amax=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _parts(tensors: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """(a, b, extras, options, out, forced) of an operator call, as `run_direct` takes them."""
    names = ("scale_a", "scale_b", "scale_result", "c", "bias", "residual", "epilogue_args")
    a, b, *rest = tensors
    given = dict(zip(names, rest))
    given.update((name, keywords[name]) for name in names if name in keywords)
    epilogue_args: Sequence[torch.Tensor] = given.get("epilogue_args") or ()
    order = ("c", "bias", "residual", "scale_a", "scale_b", "scale_result")
    extras = (*map(given.get, order), keywords.get("amax"), *epilogue_args)
    options = tuple(keywords.get(name, default) for name, default in OPTIONS.items())
    config = keywords.get("config")
    forced = (None if config is None else config_from_json(json.loads(config)), keywords.get("family"))
    return a, b, extras, options, keywords.get("out"), forced


def _scaled_gemm(*tensors: Any, **keywords: Any) -> torch.Tensor:
    return run_direct(*_parts(tensors, keywords))


def _scaled_gemm_out(*tensors: Any, **keywords: Any) -> None:
    run_direct(*_parts(tensors, keywords))


def _scaled_gemm_fake(*tensors: Any, **keywords: Any) -> torch.Tensor:
    call = described(*_parts(tensors, keywords)[:5])
    return tensors[0].new_empty(call.d_shape, dtype=call.d_dtype)


def _scaled_gemm_out_fake(*tensors: Any, **keywords: Any) -> None:
    described(*_parts(tensors, keywords)[:5])


def _setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    """Nothing to keep: there is no backward."""


def _backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "kernels_dsl::scaled_gemm has no gradient: use torch.no_grad(), or detach what requires grad"
    )


for _key in ("CUDA", "CPU"):  # CPU tensors are for the emulator, and get an error that says so elsewhere
    LIBRARY.impl("scaled_gemm", _scaled_gemm, _key)
    LIBRARY.impl("scaled_gemm_out", _scaled_gemm_out, _key)
torch.library.register_fake("kernels_dsl::scaled_gemm", _scaled_gemm_fake, lib=LIBRARY)
torch.library.register_fake("kernels_dsl::scaled_gemm_out", _scaled_gemm_out_fake, lib=LIBRARY)
torch.library.register_autograd(
    "kernels_dsl::scaled_gemm", _backward, setup_context=_setup_context, lib=LIBRARY
)


def call(
    a: torch.Tensor,
    b: torch.Tensor,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    forced: tuple[Any, Any],
) -> torch.Tensor:
    """A call as an operator; arguments as those of `scaled_gemm.run_direct`.

    With `amax`, which is written, the operator is that with an output. Raises TypeError where the operator's
    schema cannot express an argument, ValueError where gradients are asked for with `out` or `amax`.
    """
    c, bias, residual, scale_a, scale_b, scale_result, amax, *epilogue_args = extras
    named = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(epilogue_args))
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}, must be a torch.Tensor (under torch.compile or a mode)"
            )
    tensors = (*named.values(), c, bias, residual, out)
    grad = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
    if grad and not (out is None and amax is None):
        name = "amax" if out is None else "out"
        raise ValueError(
            f"{name} is given and a tensor requires grad, must not: use torch.no_grad(), or no {name}"
        )
    keywords: dict[str, Any] = dict(zip(OPTIONS, options))
    keywords["epilogue"] = epilogue_name(keywords["epilogue"])
    config, keywords["family"] = forced
    keywords["config"] = None if config is None else config_text(config)
    positional = (a, b, scale_a, scale_b, scale_result, c, bias, residual, epilogue_args or None)
    if out is None and amax is None:
        return torch.ops.kernels_dsl.scaled_gemm(*positional, **keywords)
    if out is None:
        asked = described(a, b, extras, options, None)
        out = a.new_empty(asked.d_shape, dtype=asked.d_dtype)
    torch.ops.kernels_dsl.scaled_gemm_out(*positional, out=out, amax=amax, **keywords)
    return out
