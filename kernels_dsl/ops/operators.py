"""What the library's PyTorch operators have in common: how they are defined, what schemas cannot express.

`torch.ops.kernels_dsl.*` is what torch.compile, export, autograd and dispatch modes see. They are made with
`Library.define` and `impl`, which cost a fraction of `torch.library.custom_op`'s time. A schema has no place
for Python functions and objects: an epilogue goes by its registered name, a configuration as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.config.tuned import config_from_json, config_to_json
from kernels_dsl.ops.eager_path import check_tensor
from kernels_dsl.ops.epilogues import name_for
from kernels_dsl.ops.tracing import constant_result

LIBRARY = torch.library.Library("kernels_dsl", "FRAGMENT")


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    no_gradient: str | None = None,
) -> None:
    """Define `kernels_dsl::name` with a schema (all behind the name), its function and its fake one.

    It takes CUDA tensors, and CPU tensors for the emulator: elsewhere these get an error that says so.
    no_gradient: what its backward says in a RuntimeError; None: it writes its arguments, or the caller
    registers a backward.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CUDA", "CPU"):
        LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"kernels_dsl::{name}", fake, lib=LIBRARY)
    if no_gradient is not None:
        message = f"kernels_dsl::{name} has no {no_gradient}"

        def refuse(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(message)

        torch.library.register_autograd(f"kernels_dsl::{name}", refuse, lib=LIBRARY)


@constant_result
def config_text(config: GemmConfig) -> str:
    """A configuration as the text that a schema can take."""
    return json.dumps(config_to_json(config), sort_keys=True)


def config_of(text: str | None) -> GemmConfig | None:
    """What `config_text` was given; None for None."""
    return None if text is None else config_from_json(json.loads(text))


def epilogue_name(epilogue: str | Callable[..., Any] | None) -> str | None:
    """The name of an epilogue. TypeError for a function under torch.compile, which cannot tell them apart."""
    if epilogue is None or isinstance(epilogue, str):
        return epilogue
    if torch.compiler.is_compiling():
        raise TypeError(
            "epilogue is a function, must be a name under torch.compile: "
            "kernels_dsl.register_epilogue(name, function)"
        )
    return name_for(epilogue)


def require_tensors(named: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> None:
    """TypeError for the first argument that is no dense tensor; those that are `optional` may be None."""
    given = {name: value for name, value in (optional or {}).items() if value is not None}
    for name, value in {**named, **given}.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}, must be a torch.Tensor (under torch.compile or a mode)"
            )
        check_tensor(name, value)


def asks_gradients(values: Iterable[Any]) -> bool:
    """Whether the call of an operator with these arguments would be differentiated."""
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    )


def refuse_written(values: Iterable[Any], **written: torch.Tensor | None) -> None:
    """ValueError where gradients are asked for and one of the named outputs is given."""
    given = [name for name, tensor in written.items() if tensor is not None]
    if given and asks_gradients((*values, *written.values())):
        raise ValueError(
            f"{given[0]} is given and a tensor requires grad, must not: use torch.no_grad(), or no {given[0]}"
        )


def refuse_forward_mode(operation: str, named: Mapping[str, Any]) -> None:
    """NotImplementedError where an argument has a tangent, of torch.func.jvp or of a dual tensor.

    PyTorch takes an operator without a forward-mode derivative for a constant.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and _has_tangent(value):
            raise NotImplementedError(
                f"{name} has a tangent, must have none: {operation} has no forward-mode derivative"
            )


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Also where it cannot be told: in a transform that torch.func.jvp has around it."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor):
        level = functorch.peek_interpreter_stack()
        if level is None or level.key() != functorch.TransformType.Jvp:
            return True
    return forward_ad.unpack_dual(tensor).tangent is not None
