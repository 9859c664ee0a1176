"""`grouped_gemm` and `scaled_grouped_gemm` as one operator of PyTorch, and one with an output: schema, fake
implementation, and what autograd is told."""

from __future__ import annotations

import json
from typing import Any

import torch

from kernels_dsl.config.tuned import config_from_json
from kernels_dsl.ops.grouped import OPTIONS, described, run_direct
from kernels_dsl.ops.register import config_text, epilogue_name

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor offs, Tensor? scale_a=None, Tensor? scale_b=None, Tensor? scale_result=None, "
    "Tensor? bias=None, Tensor? residual=None, Tensor[]? epilogue_args=None, *, "
    "float alpha=1.0, str? activation=None, str? epilogue=None, "
    "ScalarType? out_dtype=None, bool use_fast_accum=False, str? config=None, str? family=None"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY = torch.library.Library("kernels_dsl", "FRAGMENT")
LIBRARY.define(f"grouped_gemm({_ARGUMENTS}) -> Tensor", tags=_TAGS)
LIBRARY.define(f"grouped_gemm_out({_ARGUMENTS}, Tensor(a!) out) -> ()", tags=_TAGS)
_NAMES = ("offs", "scale_a", "scale_b", "scale_result", "bias", "residual", "epilogue_args")


def _parts(tensors: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """(a, b, extras, options, out, forced) of an operator call, as `run_direct` takes them."""
    a, b, *rest = tensors
    given = dict(zip(_NAMES, rest))
    given.update((name, keywords[name]) for name in _NAMES if name in keywords)
    order = ("bias", "residual", "scale_a", "scale_b", "scale_result", "offs")
    extras = (None, *map(given.get, order), *(given.get("epilogue_args") or ()))
    options = tuple(keywords.get(name, default) for name, default in OPTIONS.items())
    config = keywords.get("config")
    forced = (None if config is None else config_from_json(json.loads(config)), keywords.get("family"))
    return a, b, extras, options, keywords.get("out"), forced


def _run(*tensors: Any, **keywords: Any) -> torch.Tensor:
    return run_direct(*_parts(tensors, keywords))


def _run_out(*tensors: Any, **keywords: Any) -> None:
    run_direct(*_parts(tensors, keywords))


def _fake(*tensors: Any, **keywords: Any) -> torch.Tensor:
    call = described(*_parts(tensors, keywords)[:5])
    return tensors[0].new_empty(call.d_shape, dtype=call.d_dtype)


def _fake_out(*tensors: Any, **keywords: Any) -> None:
    described(*_parts(tensors, keywords)[:5])


def _setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    """Nothing to keep: there is no backward."""


def _backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "kernels_dsl::grouped_gemm has no gradient: use torch.no_grad(), or detach what requires grad"
    )


for _key in ("CUDA", "CPU"):  # CPU tensors are for the emulator, and get an error that says so elsewhere
    LIBRARY.impl("grouped_gemm", _run, _key)
    LIBRARY.impl("grouped_gemm_out", _run_out, _key)
torch.library.register_fake("kernels_dsl::grouped_gemm", _fake, lib=LIBRARY)
torch.library.register_fake("kernels_dsl::grouped_gemm_out", _fake_out, lib=LIBRARY)
torch.library.register_autograd(
    "kernels_dsl::grouped_gemm", _backward, setup_context=_setup_context, lib=LIBRARY
)


def call(
    a: torch.Tensor,
    b: torch.Tensor,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    forced: tuple[Any, Any],
) -> torch.Tensor:
    """A call as an operator; arguments as those of `grouped.run_direct`.

    Raises TypeError where the operator's schema cannot express an argument, ValueError where gradients are
    asked for with `out`.
    """
    _, bias, residual, scale_a, scale_b, scale_result, offs, *epilogue_args = extras
    named = {"a": a, "b": b, "offs": offs}
    named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(epilogue_args))
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}, must be a torch.Tensor (under torch.compile or a mode)"
            )
    tensors = (*named.values(), bias, residual, out)
    grad = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
    if grad and out is not None:
        raise ValueError("out is given and a tensor requires grad, must not: use torch.no_grad(), or no out")
    keywords: dict[str, Any] = dict(zip(OPTIONS, options))
    keywords["epilogue"] = epilogue_name(keywords["epilogue"])
    config, keywords["family"] = forced
    keywords["config"] = None if config is None else config_text(config)
    positional = (a, b, offs, scale_a, scale_b, scale_result, bias, residual, epilogue_args or None)
    if out is None:
        return torch.ops.kernels_dsl.grouped_gemm(*positional, **keywords)
    torch.ops.kernels_dsl.grouped_gemm_out(*positional, out=out, **keywords)
    return out
