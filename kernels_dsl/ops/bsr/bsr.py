"""`bsr_gemm` and `bsr_sddmm`: products in which a factor, or the result, keeps some blocks only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kernels_dsl.checks.eager_path import PLAIN_TYPES, check_tensor, refuse_forward_mode
from kernels_dsl.checks.options import boolean, instance, number
from kernels_dsl.ops.bsr.arguments import BsrArguments, BsrConfig, SampledArguments, check_sampled
from kernels_dsl.ops.bsr.product import BSR_GEMM, BSR_SDDMM, repeated_sampled
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.arguments import check_dtype
from kernels_dsl.ops.gemm.product import repeated, tensors_among, weight
from kernels_dsl.sparse.pattern import version as pattern_version
from kernels_dsl.sparse.tensor import BsrTensor

_FROM_TORCH = WeakIdKeyDictionary()
_NOT_THERE = None, None

_Tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled


def bsr_gemm(
    a: BsrTensor | torch.Tensor,
    b: BsrTensor | torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_axis: str = "n",
    residual: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    epilogue: str | Callable[..., Any] | None = None,
    epilogue_args: Sequence[Any] = (),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    family: str | None = None,
    config: BsrConfig | None = None,
    check: bool = False,
) -> torch.Tensor:
    """activation(alpha · a @ b + beta · c + bias) + residual, where a or b is block-sparse; float32 sums.

    One of a and b is a `BsrTensor` (or its `t()`) or a torch.sparse_bsr tensor, the other dense: (M, K) or
    (L, M, K), (K, N) or (L, K, N), of the same dtype, bf16 or fp16; any strides, any alignment, any extent
    of the dense mode. Batched values (L, nnz, bm, bk) and a batched dense factor have the same L; either
    may lack the batch. Rows of the dense factor that meet no kept block are not read: NaN there stays out.

    The other arguments are those of `gemm`. `check` verifies the indices first, waiting for the GPU; see
    `BsrTensor` for what holds without. `family`: "sm90" or "sm80" forces one; `config` is in place of the
    chosen one; one with `split` False cuts no list.

    Returns (M, N) or (L, M, N). Differentiable in the values, the dense factor, c, bias and residual, but
    not with `epilogue` or `out`. Sums run in the order of the stored columns, those of long lists in pieces
    that are added in order, those of block rows in pairs in an order that follows from the whole pattern, so
    results repeat bit for bit.
    Raises TypeError and ValueError before any launch, naming the argument.
    """
    sparse: BsrTensor
    dense: Any
    if type(a) is BsrTensor:
        sparse, dense, left = a, b, False
    elif type(b) is BsrTensor:
        sparse, dense, left = b, a, True
    else:
        sparse, dense, left = _factors(a, b)
    if check is not False and boolean("check", check):
        sparse.check()
    if epilogue_args.__class__ is not tuple:
        epilogue_args = product_options.arguments(epilogue_args)
    values = sparse.values
    key: Any = None
    tensors: tuple[Any, ...] = (values, dense) if out is None else (values, dense, out)
    plain = type(dense) is type(values) is _Tensor
    if plain or (type(dense) in PLAIN_TYPES and type(values) in PLAIN_TYPES):
        one = weight(alpha, 1.0) if alpha.__class__ is not float or alpha != 1.0 else True
        try:
            key = (
                dense.shape, left, sparse.transposed, out.__class__, one, activation, out_dtype, family,
                config,
            )  # fmt: skip
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    if key is not None:
        extras: tuple[Any, ...] = ()
        if not (c is bias is residual is epilogue is None) or epilogue_args:
            extras = (c, bias, residual, *epilogue_args)
            tensors += tensors_among(extras)
            zero = weight(beta, 0.0) if c is not None else (beta.__class__, beta)
            key = (key, epilogue, bias_axis, zero, *map(type, extras))
        elif beta.__class__ is not float or beta != 1.0 or bias_axis != "n":
            key = (key, bias_axis, beta.__class__, beta)  # without effect: an error
        result = repeated(sparse._kept, key, tensors, out, alpha, beta, extras)
        if result is not None:
            return result
    call = BsrArguments(
        sparse.crow_indices, sparse.col_indices, values, dense, c, bias, residual, epilogue_args,
        shape=sparse.shape, transposed=sparse.transposed, dense_left=left, bias_axis=bias_axis, alpha=alpha,
        beta=beta, activation=activation, epilogue=epilogue, out_dtype=out_dtype, family=family,
        config=config, matrix=sparse, out=out,
    )  # fmt: skip
    return BSR_GEMM.first(call, key, tensors, _operator)


def _operator() -> Callable[[BsrArguments], torch.Tensor]:
    from kernels_dsl.ops.bsr import register

    return register.BSR_GEMM_OPERATOR


def _from_torch(matrix: torch.Tensor) -> BsrTensor:
    """The `BsrTensor` of a torch.sparse_bsr tensor, kept until that changes or dies unless gradients flow."""
    if _is_compiling() or (matrix.requires_grad and _grad_enabled()):
        return BsrTensor.from_torch(matrix)
    found, version = _FROM_TORCH.get(matrix, _NOT_THERE)
    now = pattern_version(matrix)  # copy_ and resize_as_sparse_ change indices in place
    if found is None or version != now:
        found = BsrTensor.from_torch(matrix.detach())
        _FROM_TORCH[matrix] = found, now
    return found


def _factors(a: Any, b: Any) -> tuple[BsrTensor, torch.Tensor, bool]:
    """(sparse, dense, whether the dense one is on the left)."""
    if isinstance(a, BsrTensor) or isinstance(b, BsrTensor):
        return (a, b, False) if isinstance(a, BsrTensor) else (b, a, True)
    for x in (a, b):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"a and b are {type(a).__name__} and {type(b).__name__}, must be tensors")
    if a.layout == torch.sparse_bsr:
        return _from_torch(a), b, False
    if b.layout == torch.sparse_bsr:
        return _from_torch(b), a, True
    raise TypeError(
        f"a and b have layouts {a.layout} and {b.layout}, one must be a BsrTensor or torch.sparse_bsr"
    )


def bsr_supports(a: BsrTensor | torch.Tensor, b: BsrTensor | torch.Tensor, **options: Any) -> str | None:
    """Says why `bsr_gemm(a, b, …)` with these arguments cannot run here; None if it can. Compiles nothing."""
    try:
        boolean("check", options.pop("check", False))
        sparse, dense, left = _factors(a, b)
        return BSR_GEMM.why_not(sparse=sparse, dense=dense, dense_left=left, **options)
    except (TypeError, ValueError) as error:
        return str(error)


def bsr_sddmm(
    a: torch.Tensor,
    b: torch.Tensor,
    pattern: BsrTensor | torch.Tensor,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> BsrTensor:
    """The blocks of alpha · a @ b that `pattern` keeps: a sampled product, with float32 sums.

    a (M, K) or (L, M, K), b (K, N) or (L, K, N), bf16 or fp16 of one dtype, any strides. pattern:
    a `BsrTensor` (or its `t()`) or torch.sparse_bsr tensor of shape (M, N), of which the indices and the
    block's extents count. out_dtype: bf16 or fp16, default a's.

    Returns a `BsrTensor` of the pattern, with values (nnz, bm, bk) or (L, nnz, bm, bk); no `out`, as that is
    no dense tensor. Differentiable in a and b. Raises TypeError and ValueError that name the argument.
    """
    if not isinstance(pattern, BsrTensor):
        if not isinstance(pattern, torch.Tensor) or pattern.layout != torch.sparse_bsr:
            raise TypeError("pattern must be a BsrTensor or a torch.sparse_bsr tensor")
        pattern = _from_torch(pattern)
    key: Any = None
    if type(a) is type(b) is _Tensor and alpha.__class__ is float and not pattern.transposed:
        try:
            key = ("sampled", a.shape, b.shape, alpha, out_dtype)
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
        else:
            values = repeated_sampled(pattern._kept, key, (a, b), alpha)
            if values is not None:
                return pattern.with_values(values)
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x)
    number("alpha", alpha)
    wanted = instance("out_dtype", out_dtype, torch.dtype, type(None)) or a.dtype
    check_dtype("out_dtype", wanted, (torch.bfloat16, torch.float16))
    # In the caller's terms, as the operator may get other ones.
    check_sampled(a, b, pattern.size, pattern.block, wanted)
    refuse_forward_mode("bsr_sddmm", {"a": a, "b": b})
    factors = (b.mT, a.mT) if pattern.transposed else (a, b)  # the stored blocks are those of (a b)ᵀ = bᵀ aᵀ
    call = SampledArguments(
        pattern.crow_indices, pattern.col_indices, *factors, pattern.shape, pattern.block,
        alpha=alpha, out_dtype=wanted, matrix=pattern,
    )  # fmt: skip
    return pattern.with_values(BSR_SDDMM.first(call, key, (a, b), _sampled_operator))


def _sampled_operator() -> Callable[[SampledArguments], torch.Tensor]:
    from kernels_dsl.ops.bsr import register

    return register.BSR_SDDMM_OPERATOR
