"""Block-sparse products as operators of PyTorch: schema, fake implementation, gradients.

`torch.ops.kernels_dsl.bsr_gemm`, `bsr_gemm_out` and `bsr_sddmm` take the tensors of a `BsrTensor` one by one,
so torch.compile, export and autograd see nothing but tensors. With z = alpha · A B + beta · C + bias,
D = f(z) + R and G the gradient of D, dz = G · f'(z): the dense factor gets alpha · Aᵀ dz, the values the
blocks of alpha · dz Bᵀ that A keeps, and so on for the other orientations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.ops.bsr.bsr import run_direct, run_sampled
from kernels_dsl.ops.bsr.pattern import pattern_of
from kernels_dsl.ops.bsr.plan import check_sampled, describe
from kernels_dsl.ops.bsr.tensor import BsrTensor
from kernels_dsl.ops.gemm.grad import refuse_functions, through_activation
from kernels_dsl.ops.operators import (
    LIBRARY,
    asks_gradients,
    define,
    epilogue_name,
    refuse_forward_mode,
    refuse_written,
    require_tensors,
)  # fmt: skip

_INPUTS = (
    "Tensor crow, Tensor col, Tensor values, Tensor dense, Tensor? c=None, Tensor? bias=None, "
    "Tensor? residual=None, Tensor[]? epilogue_args=None, *, SymInt[] shape, bool transposed=False, "
    'bool dense_left=False, str bias_axis="n", float alpha=1.0, float beta=1.0, str? activation=None, '
    "str? epilogue=None, ScalarType? out_dtype=None, str? family=None"
)
_SAMPLED = (
    "Tensor crow, Tensor col, Tensor a, Tensor b, *, SymInt[] shape, SymInt[] block, float alpha=1.0, "
    "ScalarType? out_dtype=None"
)
_DEFAULTS: dict[str, Any] = {
    "bias_axis": "n", "alpha": 1.0, "beta": 1.0, "activation": None, "epilogue": None, "out_dtype": None,
}  # fmt: skip
_TENSORS = 8  # positional arguments of bsr_gemm


def _matrix(
    tensors: Sequence[torch.Tensor], shape: Sequence[int], transposed: bool, plans: dict[Any, Any]
) -> BsrTensor:
    """The matrix of operator arguments, which a `BsrTensor` was taken apart for; `plans` become its own."""
    made = BsrTensor(tensors[0], tensors[1], tensors[2], (shape[0], shape[1]), transposed)
    object.__setattr__(made, "_kept", plans)
    return made


def _options(positional: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    c, bias, residual, epilogue_args = (*positional, None, None, None, None)[:4]
    named = {name: keywords.get(name, default) for name, default in _DEFAULTS.items()}
    return {
        **named, "c": c, "bias": bias, "residual": residual, "epilogue_args": tuple(epilogue_args or ()),
    }  # fmt: skip


def _run(tensors: Sequence[Any], out: torch.Tensor | None, keywords: dict[str, Any]) -> torch.Tensor:
    crow, col, values, dense, *rest = tensors
    shape, transposed = keywords["shape"], keywords.get("transposed", False)
    left, family = keywords.get("dense_left", False), keywords.get("family")
    rows, columns = shape[0] // values.shape[-2], shape[1] // values.shape[-1]
    pattern = pattern_of(crow, col, rows, columns)
    sparse = _matrix((crow, col, values), shape, transposed, pattern.plans)
    return run_direct(sparse, dense, left, out=out, family=family, config=None, **_options(rest, keywords))


def _bsr_gemm(*tensors: Any, **keywords: Any) -> torch.Tensor:
    return _run(tensors, None, keywords)


def _bsr_gemm_out(*tensors: Any, out: torch.Tensor, **keywords: Any) -> None:
    _run(tensors, out, keywords)


def _described(tensors: Sequence[Any], out: torch.Tensor | None, keywords: dict[str, Any]) -> Any:
    crow, col, values, dense, *rest = tensors
    sparse = _matrix((crow, col, values), keywords["shape"], keywords.get("transposed", False), {})
    return describe(sparse, dense, keywords.get("dense_left", False), out=out, **_options(rest, keywords))


def _bsr_gemm_fake(*tensors: Any, **keywords: Any) -> torch.Tensor:
    call = _described(tensors, None, keywords).gemm
    return tensors[3].new_empty(call.d_shape, dtype=call.d_dtype)


def _bsr_gemm_out_fake(*tensors: Any, out: torch.Tensor, **keywords: Any) -> None:
    _described(tensors, out, keywords)


def _bsr_sddmm(
    crow: torch.Tensor,
    col: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    shape: Sequence[int],
    block: Sequence[int],
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return run_sampled(
        crow, col, a, b, shape=(shape[0], shape[1]), block=(block[0], block[1]), alpha=alpha,
        out_dtype=out_dtype or a.dtype,
    )  # fmt: skip


def _bsr_sddmm_fake(
    crow: torch.Tensor,
    col: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    shape: Sequence[int],
    block: Sequence[int],
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    dtype = out_dtype or a.dtype
    batch = check_sampled(a, b, (shape[0], shape[1]), (block[0], block[1]), dtype)
    return a.new_empty((*([] if batch is None else [batch]), col.shape[0], *block), dtype=dtype)


define("bsr_gemm", f"({_INPUTS}) -> Tensor", _bsr_gemm, _bsr_gemm_fake)
define("bsr_gemm_out", f"({_INPUTS}, Tensor(a!) out) -> ()", _bsr_gemm_out, _bsr_gemm_out_fake)
define("bsr_sddmm", f"({_SAMPLED}) -> Tensor", _bsr_sddmm, _bsr_sddmm_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    crow, col, values, dense, c, bias, residual, _epilogue_args = inputs
    refuse_functions(keyword_only_inputs["epilogue"], keyword_only_inputs["activation"])
    again = keyword_only_inputs["activation"] is not None
    ctx.save_for_backward(crow, col, values, dense, c if again else None, bias if again else None)
    ctx.keywords = keyword_only_inputs
    named = {"c": c, "bias": bias, "residual": residual}
    ctx.shapes = {name: None if x is None else x.shape for name, x in named.items()}
    ctx.dtypes = {name: None if x is None else x.dtype for name, x in named.items()}


def _summed(found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient in like's shape and dtype: summed over batches that `like` does not have."""
    if found.dim() > like.dim():
        found = found.sum(0)
    return found.to(like.dtype)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of the positional arguments, None for those that are not needed."""
    crow, col, values, dense, c, bias = ctx.saved_tensors
    keywords = ctx.keywords
    count = len(ctx.needs_input_grad)
    needed = (tuple(ctx.needs_input_grad) + (False,) * _TENSORS)[:_TENSORS]
    made: dict[str, Any] = dict.fromkeys(("values", "dense", "c", "bias", "residual"))
    if needed[6]:
        made["residual"] = gradient.sum_to_size(ctx.shapes["residual"]).to(ctx.dtypes["residual"])
    d_z = gradient
    if any(needed[2:6]):
        if keywords["activation"] is not None:
            names = ("shape", "transposed", "dense_left", "bias_axis", "alpha", "beta", "family")
            again = {name: keywords[name] for name in names}
            z = torch.ops.kernels_dsl.bsr_gemm(
                crow, col, values, dense, c, bias, **again, out_dtype=torch.float32
            )
            d_z = through_activation(gradient, z, keywords["activation"])
        if needed[5]:
            rows = d_z.float().sum(-2 if keywords["bias_axis"] == "n" else -1)
            made["bias"] = rows.reshape(-1, rows.shape[-1]).sum(0).to(ctx.dtypes["bias"])
        if needed[4]:
            made["c"] = (d_z * keywords["beta"]).sum_to_size(ctx.shapes["c"]).to(ctx.dtypes["c"])
        d_z = d_z.to(values.dtype)
    if needed[2]:
        made["values"] = _values_gradient(ctx.saved_tensors, d_z, keywords)
    if needed[3]:
        batched = d_z.dim() > dense.dim()
        product = torch.ops.kernels_dsl.bsr_gemm(
            crow, col, values, d_z, shape=keywords["shape"], transposed=not keywords["transposed"],
            dense_left=keywords["dense_left"], alpha=keywords["alpha"], family=keywords["family"],
            out_dtype=torch.float32 if batched else dense.dtype,
        )  # fmt: skip
        made["dense"] = _summed(product, dense)
    order = (None, None, made["values"], made["dense"], made["c"], made["bias"], made["residual"], None)
    return order[:count]


def _values_gradient(saved: Sequence[Any], d_z: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
    """The stored blocks of alpha · dz Bᵀ, or of its transpose, by orientation."""
    crow, col, values, dense = saved[:4]
    left, transposed = keywords["dense_left"], keywords["transposed"]
    x, y = (dense.mT, d_z) if left else (d_z, dense.mT)
    if transposed:
        x, y = y.mT, x.mT
    batched = d_z.dim() == 3 and values.dim() == 3
    found = torch.ops.kernels_dsl.bsr_sddmm(
        crow, col, x, y, shape=keywords["shape"], block=list(values.shape[-2:]), alpha=keywords["alpha"],
        out_dtype=torch.float32 if batched else values.dtype,
    )  # fmt: skip
    return _summed(found, values)


torch.library.register_autograd("kernels_dsl::bsr_gemm", _backward, setup_context=_setup, lib=LIBRARY)


def _setup_sampled(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.keywords = keyword_only_inputs


def _backward_sampled(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """da = alpha · dV bᵀ and db = alpha · aᵀ dV, dV being block-sparse."""
    crow, col, a, b = ctx.saved_tensors
    common = {"shape": ctx.keywords["shape"], "alpha": ctx.keywords["alpha"]}
    gradient = gradient.to(a.dtype).contiguous()
    d_a = d_b = None
    product = torch.ops.kernels_dsl.bsr_gemm
    if ctx.needs_input_grad[2]:
        d_a = _summed(product(crow, col, gradient, b.mT, **common, out_dtype=torch.float32), a)
    if ctx.needs_input_grad[3]:
        d_b = product(crow, col, gradient, a.mT, **common, dense_left=True, out_dtype=torch.float32)
        d_b = _summed(d_b, b)
    return None, None, d_a, d_b


torch.library.register_autograd(
    "kernels_dsl::bsr_sddmm", _backward_sampled, setup_context=_setup_sampled, lib=LIBRARY
)


def through_dispatcher(
    sparse: BsrTensor,
    dense: torch.Tensor,
    left: bool,
    *,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: str | Callable[..., Any] | None,
    epilogue_args: Sequence[Any],
    out: torch.Tensor | None,
    config: Any,
    **keywords: Any,
) -> torch.Tensor:
    """`bsr_gemm` as an operator call: for autograd, torch.compile, tensor subclasses and dispatch modes.

    Raises ValueError where gradients are asked for that do not exist (`epilogue`, `out`) or for a `config`,
    and TypeError for an argument that the operator's schema cannot express.
    """
    extras = {f"epilogue_args[{i}]": x for i, x in enumerate(epilogue_args)}
    optional = {"c": c, "bias": bias, "residual": residual, "out": out}
    require_tensors({"a" if left else "b": dense, **extras}, optional)
    if config is not None:
        raise ValueError("config is given, must be None with gradients, under torch.compile and in modes")
    values = (sparse.values, dense, c, bias, residual, *epilogue_args)
    rest = {"the values": sparse.values, "c": c, "bias": bias, "residual": residual, "out": out}
    refuse_forward_mode("bsr_gemm", {"a" if left else "b": dense, **rest, **extras})
    if asks_gradients((*values, out)):
        refuse_functions(epilogue, keywords["activation"])
    refuse_written(values, out=out)
    epilogue = epilogue_name(epilogue)
    keywords.update(
        epilogue=epilogue, shape=list(sparse.shape), transposed=sparse.transposed, dense_left=left
    )
    positional = (
        sparse.crow_indices, sparse.col_indices, sparse.values, dense, c, bias, residual,
        list(epilogue_args) or None,
    )  # fmt: skip
    if out is None:
        return torch.ops.kernels_dsl.bsr_gemm(*positional, **keywords)
    torch.ops.kernels_dsl.bsr_gemm_out(*positional, out=out, **keywords)
    return out
