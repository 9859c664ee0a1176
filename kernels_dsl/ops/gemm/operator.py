"""An operator of PyTorch for a product whose host function takes (a, b, extras, options, out, forced)."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.gemm.product import Product
from kernels_dsl.ops.operators import (
    config_of,
    config_text,
    define,
    epilogue_name,
    refuse_forward_mode,
    refuse_written,
    require_tensors,
)  # fmt: skip


class GemmOperator:
    """`kernels_dsl::name`, and `kernels_dsl::name_out`, which writes `out` and what else the product writes.

    schema: of the arguments. tensors: names of the positional ones behind a and b, `epilogue_args` last, the
    first `required` of them no None.
    """

    def __init__(self, product: Product, schema: str, *, tensors: tuple[str, ...], required: int) -> None:
        self.name, self.tensors, self.required = product.name, tensors, required
        self.extras, self.options, self.written = product.extras, product.options, product.written
        self._described, self._run = product.described, product.run_direct
        advice = "gradient: use torch.no_grad(), or detach what requires grad"
        define(self.name, f"({schema}) -> Tensor", self._new, self._new_fake, advice)
        outputs = "Tensor(a!) out" + (f", Tensor(b!)? {self.written}=None" if self.written else "")
        define(f"{self.name}_out", f"({schema}, {outputs}) -> ()", self._out, self._out_fake)

    def _parts(self, tensors: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """(a, b, extras, options, out, forced) of an operator call."""
        a, b, *rest = tensors
        given = {**dict(zip(self.tensors, rest)), **keywords}
        extras = (*map(given.get, self.extras), *(given.get("epilogue_args") or ()))
        options = tuple(given.get(name, default) for name, default in self.options.items())
        return a, b, extras, options, given.get("out"), (config_of(given.get("config")), given.get("family"))

    def _new(self, *tensors: Any, **keywords: Any) -> torch.Tensor:
        return self._run(*self._parts(tensors, keywords))

    def _out(self, *tensors: Any, **keywords: Any) -> None:
        self._run(*self._parts(tensors, keywords))

    def _new_fake(self, *tensors: Any, **keywords: Any) -> torch.Tensor:
        call = self._described(*self._parts(tensors, keywords)[:5])
        return tensors[0].new_empty(call.d_shape, dtype=call.d_dtype)

    def _out_fake(self, *tensors: Any, **keywords: Any) -> None:
        self._described(*self._parts(tensors, keywords)[:5])

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        extras: tuple[Any, ...],
        options: tuple[Any, ...],
        out: torch.Tensor | None,
        forced: tuple[Any, str | None],
    ) -> torch.Tensor:
        """A call as an operator; arguments as those of the host function.

        Raises TypeError where the schema cannot express an argument, ValueError where gradients are asked for
        with what is written.
        """
        given = {name: value for name, value in zip(self.extras, extras) if name}
        epilogue_args = list(extras[len(self.extras) :])
        named = {"a": a, "b": b, **{name: given[name] for name in self.tensors[: self.required]}}
        named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(epilogue_args))
        require_tensors(named, {**given, "out": out})
        written = {self.written: given[self.written]} if self.written else {}
        refuse_written((a, b, *extras), out=out, **written)
        refuse_forward_mode(self.name, {**named, **given, "out": out})
        keywords: dict[str, Any] = dict(zip(self.options, options))
        keywords["epilogue"] = epilogue_name(keywords["epilogue"])
        config, keywords["family"] = forced
        keywords["config"] = None if config is None else config_text(config)
        positional = (a, b, *(given[name] for name in self.tensors[:-1]), epilogue_args or None)
        operators = torch.ops.kernels_dsl
        if out is None and not any(x is not None for x in written.values()):
            return getattr(operators, self.name)(*positional, **keywords)
        if out is None:
            asked = self._described(a, b, extras, options, None)
            out = a.new_empty(asked.d_shape, dtype=asked.d_dtype)
        getattr(operators, f"{self.name}_out")(*positional, out=out, **written, **keywords)
        return out
