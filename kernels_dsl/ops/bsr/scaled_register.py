"""`bsr_scaled_gemm` as operators of PyTorch: schema, fake implementation, and what autograd is told."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.bsr.bsr import run_direct, scale_names
from kernels_dsl.ops.bsr.pattern import pattern_of
from kernels_dsl.ops.bsr.plan import describe
from kernels_dsl.ops.bsr.register import _matrix
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
_TENSORS = ("c", "bias", "residual", "epilogue_args")
_OPTIONS = {
    "alpha": 1.0, "beta": 1.0, "bias_axis": "n", "activation": None, "epilogue": None, "out_dtype": None,
}  # fmt: skip


def _parts(
    tensors: tuple[Any, ...], keywords: dict[str, Any], plans: dict[Any, Any]
) -> tuple[BsrTensor, torch.Tensor, bool, dict[str, Any]]:
    """(sparse, dense, left, the others) of an operator call."""
    crow, col, values, dense, *scales = tensors[:6]
    given = {**dict(zip(_TENSORS, tensors[6:])), **keywords}
    others = {name: given.get(name, default) for name, default in _OPTIONS.items()}
    others.update({name: given.get(name) for name in (*_TENSORS[:3], "out")}, scales=tuple(scales))
    others["epilogue_args"] = tuple(given.get("epilogue_args") or ())
    sparse = _matrix((crow, col, values), keywords["shape"], keywords.get("transposed", False), plans)
    return sparse, dense, keywords.get("dense_left", False), others


def _run(*tensors: Any, **keywords: Any) -> torch.Tensor:
    crow, col, values = tensors[:3]
    rows, columns = keywords["shape"][0] // values.shape[-2], keywords["shape"][1] // values.shape[-1]
    *factors, others = _parts(tensors, keywords, pattern_of(crow, col, rows, columns).plans)
    return run_direct(*factors, family=keywords.get("family"), config=None, **others)


def _run_out(*tensors: Any, **keywords: Any) -> None:
    _run(*tensors, **keywords)


def _fake(*tensors: Any, **keywords: Any) -> torch.Tensor:
    *factors, others = _parts(tensors, keywords, {})
    call = describe(*factors, **others).gemm
    return tensors[3].new_empty(call.d_shape, dtype=call.d_dtype)


def _fake_out(*tensors: Any, **keywords: Any) -> None:
    _fake(*tensors, **keywords)


define(
    "bsr_scaled_gemm", f"({_ARGUMENTS}) -> Tensor", _run, _fake,
    "gradient: use torch.no_grad(), or detach what requires grad",
)  # fmt: skip
define("bsr_scaled_gemm_out", f"({_ARGUMENTS}, Tensor(a!) out) -> ()", _run_out, _fake_out)


def call(
    sparse: BsrTensor,
    dense: torch.Tensor,
    left: bool,
    out: torch.Tensor | None,
    forced: tuple[str | None, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """A call as an operator; `forced`: family, configuration; `options`: the others of `bsr.run_direct`.

    Raises TypeError where the operator's schema cannot express an argument, ValueError for a `config` and
    where gradients are asked for with `out`.
    """
    scales, epilogue_args = options["scales"], list(options["epilogue_args"])
    named = {"a" if left else "b": dense, **dict(zip(scale_names(left), scales))}
    named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(epilogue_args))
    require_tensors(named, {**{name: options[name] for name in _TENSORS[:3]}, "out": out})
    family, config = forced
    if config is not None:
        raise ValueError("config is given, must be None with gradients, under torch.compile and in modes")
    others = {name: options[name] for name in _TENSORS[:3]}
    read = {**named, "the values": sparse.values, **others}
    refuse_forward_mode("bsr_scaled_gemm", {**read, "out": out})
    refuse_written(read.values(), out=out)
    keywords: dict[str, Any] = {name: options[name] for name in _OPTIONS}
    keywords["epilogue"] = epilogue_name(keywords["epilogue"])
    keywords.update(shape=list(sparse.shape), transposed=sparse.transposed, dense_left=left, family=family)
    matrix = (sparse.crow_indices, sparse.col_indices, sparse.values)
    positional = (*matrix, dense, *scales, *others.values(), epilogue_args or None)
    if out is None:
        return torch.ops.kernels_dsl.bsr_scaled_gemm(*positional, **keywords)
    torch.ops.kernels_dsl.bsr_scaled_gemm_out(*positional, out=out, **keywords)
    return out
