"""Operators of PyTorch made of operations: their schemas, and what schemas cannot express.

`torch.ops.kernels_dsl.*` is what torch.compile, export, autograd and dispatch modes see. They are made with
`Library.define` and `impl`, which cost a fraction of `torch.library.custom_op`'s time. A schema has no place
for Python functions and objects: an epilogue goes by its registered name, a configuration as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from kernels_dsl.checks.eager_path import check_tensor, refuse_forward_mode, refuse_written
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.config.tuned import config_from_json, config_to_json
from kernels_dsl.ops.epilogues import name_for
from kernels_dsl.ops.operation import Arguments, Operation
from kernels_dsl.ops.tracing import constant_result

LIBRARY = torch.library.Library("kernels_dsl", "FRAGMENT")
NO_GRADIENT = "gradient: use torch.no_grad(), or detach what requires grad"


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

        def refuse(ctx: Any, *grads: object) -> Any:
            raise RuntimeError(message)

        torch.library.register_autograd(f"kernels_dsl::{name}", refuse, lib=LIBRARY)


@constant_result
def config_text(config: GemmConfig) -> str:
    """A configuration as the text that a schema can take."""
    return json.dumps(config_to_json(config), sort_keys=True)


def config_of(text: str | None) -> GemmConfig | None:
    """The configuration of a `config_text`; None for None."""
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


_DECODED: dict[str, Callable[[Any], Any]] = {"config": config_of}
_ENCODED: dict[str, Callable[[Any], Any]] = {
    "config": lambda config: None if config is None else config_text(config),
    "epilogue": epilogue_name,
}
"""Field of a call record -> what goes by a name or a text in the operator's schema."""


def schema_of(record: type[Arguments], leave_out: tuple[str, ...] = ()) -> str:
    """The arguments of a schema, without outputs: tensors, then options by keyword alone."""
    defaults = {field.name: field.default for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    parts: list[str] = []
    for name, kind in record.types.items():
        if name in leave_out:
            continue
        if not kind.startswith("Tensor") and "*" not in parts:
            parts.append("*")
        default = None if kind == "Tensor[]?" else defaults[name]
        text = json.dumps(default) if isinstance(default, str) else repr(default)
        needed = default is dataclasses.MISSING or name in record.required
        parts.append(f"{kind} {name}" + ("" if needed else f"={text}"))
    return ", ".join(parts)


class Operator:
    """`kernels_dsl::name` for the calls of an operation, and `kernels_dsl::name_out` for those that write.

    The schemas are those of the call record: a call is taken apart for one here and put together again.
    no_gradient: as in `define`.
    """

    results: ClassVar[str] = "Tensor"
    """The results in the schema."""

    def __init__(self, operation: Operation[Any, Any], no_gradient: str | None = None) -> None:
        self.operation, self.record = operation, operation.record
        schema, outputs = schema_of(self.record), self.record.outputs
        define(operation.name, f"({schema}) -> {self.results}", self._new, self._new_fake, no_gradient)
        texts = ("Tensor(a!) {}", "Tensor(b!)? {}=None")
        if outputs:
            schema += "".join(f", {text.format(name)}" for text, name in zip(texts, outputs))
            define(f"{operation.name}_out", f"({schema}) -> ()", self._out, self._out_fake)

    def call_of(self, positional: tuple[object, ...], keywords: dict[str, Any]) -> Any:
        """The record of an operator's arguments."""
        arguments: dict[str, Any] = {**dict(zip(self.record.types, positional)), **keywords}
        for name, value in arguments.items():
            if self.record.types.get(name) in ("Tensor[]?", "SymInt[]"):
                arguments[name] = tuple(value or ())
            elif name in _DECODED:
                arguments[name] = _DECODED[name](value)
        return self.record(**arguments)

    def _new(self, *positional: object, **keywords: Any) -> Any:
        return self.operation.run(self.call_of(positional, keywords))

    def _out(self, *positional: object, **keywords: Any) -> None:
        self.operation.run(self.call_of(positional, keywords))

    def _new_fake(self, *positional: object, **keywords: Any) -> Any:
        return self.fake(self.call_of(positional, keywords))

    def _out_fake(self, *positional: object, **keywords: Any) -> None:
        self.operation.describe(self.call_of(positional, keywords))

    def fake(self, call: Any) -> Any:
        """A tensor like the call's result, not written."""
        described = self.operation.describe(call)
        leading: torch.Tensor = getattr(call, call.leading)
        return leading.new_empty(described.d_shape, dtype=described.d_dtype)

    def __call__(self, call: Any) -> Any:
        """A call as an operator: for autograd, torch.compile, tensor subclasses, transforms and modes.

        TypeError where the schema cannot express an argument, ValueError where gradients are asked for that
        do not exist.
        """
        check_as_operator(self.operation.name, call)
        types = call.types
        encoded = {name: _encoded(name, kind, getattr(call, name)) for name, kind in types.items()}
        positional = [encoded.pop(name) for name in call.tensors]
        operators = torch.ops.kernels_dsl
        if not call.written():
            return getattr(operators, self.operation.name)(*positional, **encoded)
        out = self.fake(call) if call.out is None else call.out
        written = {name: getattr(call, name) for name in call.outputs[1:]}
        getattr(operators, f"{self.operation.name}_out")(*positional, out=out, **written, **encoded)
        return out


def check_as_operator(operation: str, call: Any) -> None:
    """Refuses what an operator cannot do: TypeError for what is no tensor, ValueError for gradients that do
    not exist, NotImplementedError for forward mode."""
    read, written = call.read(), call.written()
    optional = {call.aliases.get(n, n) for n, kind in call.types.items() if kind == "Tensor?"}
    for name, value in (*read.items(), *written.items()):
        if name in optional and value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}, must be a torch.Tensor (under torch.compile or a mode)"
            )
        check_tensor(name, value)
    call.refuse_gradients()
    refuse_written(read.values(), **written)
    refuse_forward_mode(operation, {**read, **written})


def _encoded(name: str, kind: str, value: Any) -> Any:
    if kind in ("Tensor[]?", "SymInt[]"):
        return list(value) or None
    return _ENCODED[name](value) if name in _ENCODED else value
