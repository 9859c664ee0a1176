"""`gemm` as operators of PyTorch: schema, fake implementation, gradients.

`torch.ops.kernels_dsl.gemm` and `gemm_out` are what torch.compile, export, autograd and dispatch modes see.
They are made with `Library.define` and `impl`, which cost a fraction of `torch.library.custom_op`'s time.
A schema has no place for Python functions and objects: an epilogue goes by its registered name, a
configuration as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.config.tuned import config_from_json, config_to_json
from kernels_dsl.ops.epilogues import name_for
from kernels_dsl.ops.gemm import run_direct
from kernels_dsl.ops.gemm_arguments import describe
from kernels_dsl.ops.gemm_grad import backward, setup_context

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? c=None, Tensor? bias=None, Tensor? residual=None, "
    "Tensor[]? epilogue_args=None, *, "
    'str bias_axis="n", float alpha=1.0, float beta=1.0, str? activation=None, str? epilogue=None, '
    "ScalarType? out_dtype=None, str? config=None, str? family=None"
)
LIBRARY = torch.library.Library("kernels_dsl", "FRAGMENT")
LIBRARY.define(f"gemm({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(f"gemm_out({_ARGUMENTS}, Tensor(a!) out) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def _options(
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue_args: Sequence[torch.Tensor] | None,
    keywords: dict[str, Any],
) -> dict[str, Any]:
    """The arguments of an operator call with defaults filled in, in the form of `run_direct`."""
    options: dict[str, Any] = {
        "bias_axis": "n", "alpha": 1.0, "beta": 1.0, "activation": None, "epilogue": None, "out_dtype": None,
        "config": None, "family": None,
    }  # fmt: skip
    options.update(keywords)
    if options["config"] is not None:
        options["config"] = config_from_json(json.loads(options["config"]))
    return {
        **options,
        "c": c,
        "bias": bias,
        "residual": residual,
        "epilogue_args": tuple(epilogue_args or ()),
    }


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    epilogue_args: Sequence[torch.Tensor] | None = None,
    **keywords: Any,
) -> torch.Tensor:
    return run_direct(a, b, out=None, **_options(c, bias, residual, epilogue_args, keywords))


def _gemm_out(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    epilogue_args: Sequence[torch.Tensor] | None = None,
    *,
    out: torch.Tensor,
    **keywords: Any,
) -> None:
    run_direct(a, b, out=out, **_options(c, bias, residual, epilogue_args, keywords))


def _described(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, options: dict[str, Any]) -> Any:
    checked = {name: value for name, value in options.items() if name not in ("config", "family")}
    return describe(a, b, out=out, **checked)


def _gemm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    epilogue_args: Sequence[torch.Tensor] | None = None,
    **keywords: Any,
) -> torch.Tensor:
    call = _described(a, b, None, _options(c, bias, residual, epilogue_args, keywords))
    return a.new_empty(call.d_shape, dtype=call.d_dtype)


def _gemm_out_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    epilogue_args: Sequence[torch.Tensor] | None = None,
    *,
    out: torch.Tensor,
    **keywords: Any,
) -> None:
    _described(a, b, out, _options(c, bias, residual, epilogue_args, keywords))


for _key in ("CUDA", "CPU"):  # CPU tensors are for the emulator, and get an error that says so elsewhere
    LIBRARY.impl("gemm", _gemm, _key)
    LIBRARY.impl("gemm_out", _gemm_out, _key)
torch.library.register_fake("kernels_dsl::gemm", _gemm_fake, lib=LIBRARY)
torch.library.register_fake("kernels_dsl::gemm_out", _gemm_out_fake, lib=LIBRARY)
torch.library.register_autograd("kernels_dsl::gemm", backward, setup_context=setup_context, lib=LIBRARY)


@torch.compiler.assume_constant_result
def config_text(config: GemmConfig) -> str:
    return json.dumps(config_to_json(config), sort_keys=True)


def epilogue_name(epilogue: str | Callable[..., Any] | None) -> str | None:
    if epilogue is None or isinstance(epilogue, str):
        return epilogue
    if torch.compiler.is_compiling():
        raise TypeError(
            "epilogue is a function, must be a name under torch.compile: "
            "kernels_dsl.register_epilogue(name, function)"
        )
    return name_for(epilogue)


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
    tensors = {"a": a, "b": b, "c": c, "bias": bias, "residual": residual}
    for name in ("a", "b"):
        if not isinstance(tensors[name], torch.Tensor):
            raise TypeError(f"{name} is a {type(tensors[name]).__name__}, must be a torch.Tensor")
    tensors.update((f"epilogue_args[{i}]", x) for i, x in enumerate(epilogue_args))
    grad = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in (*tensors.values(), out)
    )
    if grad and epilogue is not None:
        raise ValueError(
            "epilogue is given and an input requires grad, must not: PyTorch cannot differentiate a user's "
            "epilogue; use torch.no_grad(), or activation and the other arguments"
        )
    if grad and out is not None:
        raise ValueError("out is given and a tensor requires grad, must not: use torch.no_grad(), or no out")
    for name, value in tensors.items():
        if name.startswith("epilogue_args") and not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}, must be a tensor under torch.compile or a mode"
            )
    keywords["epilogue"] = epilogue_name(epilogue)
    keywords["config"] = None if config is None else config_text(config)
    positional = (a, b, c, bias, residual, list(epilogue_args) or None)
    if out is None:
        return torch.ops.kernels_dsl.gemm(*positional, **keywords)
    torch.ops.kernels_dsl.gemm_out(*positional, out=out, **keywords)
    return out
