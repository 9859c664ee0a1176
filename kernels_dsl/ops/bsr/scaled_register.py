"""`bsr_scaled_gemm` as operators of PyTorch: schema, fake implementation, and what autograd is told."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.bsr.pattern import pattern_of
from kernels_dsl.ops.bsr.register import _matrix
from kernels_dsl.ops.bsr.scaled import described, run_direct
from kernels_dsl.ops.bsr.tensor import BsrTensor
from kernels_dsl.ops.operators import (
    define,
    epilogue_name,
    refuse_forward_mode,
    refuse_written,
    require_tensors,
)

_ARGUMENTS = (
    "Tensor crow, Tensor col, Tensor values, Tensor dense, Tensor scales, Tensor dense_scale, "
    "Tensor? c=None, Tensor? bias=None, Tensor? residual=None, Tensor[]? epilogue_args=None, *, "
    "SymInt[] shape, bool transposed=False, bool dense_left=False, float alpha=1.0, float beta=1.0, "
    'str bias_axis="n", str? activation=None, str? epilogue=None, ScalarType? out_dtype=None, '
    "str? family=None"
)
_OPTIONS = {
    "alpha": 1.0, "beta": 1.0, "bias_axis": "n", "activation": None, "epilogue": None, "out_dtype": None,
}  # fmt: skip


def _parts(tensors: tuple[Any, ...], keywords: dict[str, Any], plans: dict[Any, Any]) -> tuple[Any, ...]:
    """(sparse, dense, left, extras, options, out) of an operator call, as `described` takes them."""
    names = ("c", "bias", "residual", "epilogue_args")
    crow, col, values, dense, blocks, other, *rest = tensors
    given = dict(zip(names, rest))
    given.update((name, keywords[name]) for name in names if name in keywords)
    extras = (*(given.get(name) for name in names[:3]), blocks, other, *(given.get("epilogue_args") or ()))
    options = tuple(keywords.get(name, default) for name, default in _OPTIONS.items())
    sparse = _matrix((crow, col, values), keywords["shape"], keywords.get("transposed", False), plans)
    return sparse, dense, keywords.get("dense_left", False), extras, options, keywords.get("out")


def _run(*tensors: Any, **keywords: Any) -> torch.Tensor:
    crow, col, values = tensors[:3]
    rows, columns = keywords["shape"][0] // values.shape[-2], keywords["shape"][1] // values.shape[-1]
    plans = pattern_of(crow, col, rows, columns).plans
    sparse, dense, left, extras, options, out = _parts(tensors, keywords, plans)
    return run_direct(sparse, dense, left, extras, options, out, (None, keywords.get("family")))


def _run_out(*tensors: Any, **keywords: Any) -> None:
    _run(*tensors, **keywords)


def _fake(*tensors: Any, **keywords: Any) -> torch.Tensor:
    call = described(*_parts(tensors, keywords, {})).gemm
    return tensors[3].new_empty(call.d_shape, dtype=call.d_dtype)


def _fake_out(*tensors: Any, **keywords: Any) -> None:
    described(*_parts(tensors, keywords, {}))


define(
    "bsr_scaled_gemm", f"({_ARGUMENTS}) -> Tensor", _run, _fake,
    "gradient: use torch.no_grad(), or detach what requires grad",
)  # fmt: skip
define("bsr_scaled_gemm_out", f"({_ARGUMENTS}, Tensor(a!) out) -> ()", _run_out, _fake_out)


def call(
    sparse: BsrTensor,
    dense: torch.Tensor,
    left: bool,
    extras: tuple[Any, ...],
    options: tuple[Any, ...],
    out: torch.Tensor | None,
    forced: tuple[Any, str | None],
) -> torch.Tensor:
    """A call as an operator; arguments as those of `bsr_scaled.run_direct`.

    Raises TypeError where the operator's schema cannot express an argument, ValueError for a `config` and
    where gradients are asked for with `out`.
    """
    c, bias, residual, blocks, other, *epilogue_args = extras
    scales = ("scale_b", "scale_a") if left else ("scale_a", "scale_b")
    named = {"a" if left else "b": dense, **dict(zip(scales, (blocks, other)))}
    named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(epilogue_args))
    require_tensors(named)
    config, family = forced
    if config is not None:
        raise ValueError("config is given, must be None with gradients, under torch.compile and in modes")
    rest = {"the values": sparse.values, "c": c, "bias": bias, "residual": residual, "out": out}
    refuse_forward_mode("bsr_scaled_gemm", {**named, **rest})
    refuse_written((sparse.values, *named.values(), c, bias, residual), out=out)
    keywords: dict[str, Any] = dict(zip(_OPTIONS, options))
    keywords["epilogue"] = epilogue_name(keywords["epilogue"])
    keywords.update(shape=list(sparse.shape), transposed=sparse.transposed, dense_left=left, family=family)
    positional = (
        sparse.crow_indices, sparse.col_indices, sparse.values, dense, blocks, other, c, bias, residual,
        epilogue_args or None,
    )  # fmt: skip
    if out is None:
        return torch.ops.kernels_dsl.bsr_scaled_gemm(*positional, **keywords)
    torch.ops.kernels_dsl.bsr_scaled_gemm_out(*positional, out=out, **keywords)
    return out
