"""`bsr_gemm` and `bsr_sddmm`: products in which a factor, or the result, keeps some blocks only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kernels_dsl.ops import call_cache, overlap
from kernels_dsl.ops.bsr import plan as bsr_plan
from kernels_dsl.ops.bsr.pattern import Pattern, pattern_of
from kernels_dsl.ops.bsr.pattern import version as pattern_version
from kernels_dsl.ops.bsr.plan import BsrConfig
from kernels_dsl.ops.bsr.tensor import BsrTensor
from kernels_dsl.ops.eager_path import (
    PLAIN_TYPES,
    check_memory,
    check_output,
    needs_dispatcher,
    signature,
    watched,
    written_out,
)
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.arguments import check_dtype, check_tensor
from kernels_dsl.ops.operators import refuse_forward_mode
from kernels_dsl.ops.options import LARGEST, boolean, instance, number
from kernels_dsl.ops.target import target_of

_MAX_PLANS = 256  # of one matrix
_NO_EXTRAS: tuple[Any, ...] = ()
_READ = ("c", "bias", "residual")
_OPTIONS = (
    *_READ, "bias_axis", "alpha", "beta", "activation", "epilogue", "epilogue_args",
    "out_dtype",
)  # fmt: skip
_FROM_TORCH = WeakIdKeyDictionary()
_NOT_THERE = None, None

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
    extras = _NO_EXTRAS
    if not (c is bias is residual is epilogue is None) or epilogue_args:
        extras = (c, bias, residual, *epilogue_args)
    values = sparse.values
    key: Any = None
    usual: tuple[Any, ...] = (dense, values) if out is None else (dense, values, out)
    if type(dense) in PLAIN_TYPES and type(values) in PLAIN_TYPES:
        one: Any = alpha == 1.0
        if alpha.__class__ is not float:
            one = (alpha.__class__, alpha)
        elif not one and not -LARGEST <= alpha <= LARGEST:
            one = alpha
        try:
            key = (
                dense.shape, left, sparse.transposed, out.__class__, one, activation, out_dtype, family,
                config,
            )  # fmt: skip
        except RuntimeError:  # of a nested tensor, which has no shape
            pass
    if key is not None:
        if extras:
            usual += tuple([x for x in extras if isinstance(x, torch.Tensor)])
            zero: Any = beta
            if c is not None and beta.__class__ is float and -LARGEST <= beta <= LARGEST:
                zero = beta == 0.0
            elif beta.__class__ is not float:
                zero = (beta.__class__, beta)
            key = (key, epilogue, bias_axis, zero, *map(type, extras))
        elif beta.__class__ is not float or beta != 1.0 or bias_axis != "n":
            key = (key, bias_axis, beta.__class__, beta)  # without effect: an error
        plan = call_cache.find(sparse._kept, key, usual)
        if plan is not None and (
            out is None or not overlap.ranges_meet(out, (dense, values, *extras), plan.extents)
        ):
            make = plan.operands
            operands = None if make is None else make((float(alpha), float(beta), *extras))
            try:
                return plan.run(values, dense, out, operands)
            except ValueError:
                call_cache.look_at_addresses(sparse._kept, key)
    options: dict[str, Any] = {
        "c": c, "bias": bias, "bias_axis": bias_axis, "residual": residual, "alpha": alpha, "beta": beta,
        "activation": activation, "epilogue": epilogue, "epilogue_args": epilogue_args,
        "out_dtype": out_dtype,
    }  # fmt: skip
    return first_call(_through_dispatcher, sparse, dense, left, out, (family, config), options, (key, usual))


def _through_dispatcher(
    sparse: BsrTensor, dense: Any, left: bool, out: Any, forced: tuple[Any, Any], options: dict[str, Any]
) -> torch.Tensor:
    from kernels_dsl.ops.bsr import register as bsr_register

    family, config = forced
    return bsr_register.through_dispatcher(
        sparse, dense, left, out=out, family=family, config=config, **options
    )


def first_call(
    dispatched: Callable[..., torch.Tensor],
    sparse: BsrTensor,
    dense: Any,
    left: bool,
    out: Any,
    forced: tuple[Any, Any],
    options: dict[str, Any],
    known: tuple[Any, tuple[Any, ...]],
) -> torch.Tensor:
    """A call that was not found, of `bsr_gemm` or `bsr_scaled_gemm`. `dispatched`: what makes it an
    operator's; `known`: what it is to be kept by; the others as in `plan_of`."""
    product_options.check(options)
    product_options.check_forced(forced[1], forced[0], bsr_plan.CONFIGS)
    if not watched():
        if out is not None:
            check_output("out", out)
        tensors = written_out((dense, *_extras(options)))
        if tensors is not None:
            dense, c, bias, residual, *rest = tensors
            count = len(options.get("scales", ()))
            options.update(c=c, bias=bias, residual=residual, epilogue_args=tuple(rest[count:]))
            if count:
                options["scales"] = tuple(rest[:count])
            known = (None, ())
    if needs_dispatcher((sparse.values, dense, out, *_extras(options))):
        return dispatched(sparse, dense, left, out, forced, options)
    plan = plan_of(sparse, dense, left, out, forced, options)
    result = follow(plan, sparse, dense, left, out, options)
    if known[0] is not None and not target_of(dense).emulated:
        call_cache.keep(sparse._kept, *known, plan)
    return result


def run_direct(
    sparse: BsrTensor,
    dense: torch.Tensor,
    left: bool,
    *,
    out: torch.Tensor | None,
    family: str | None,
    config: BsrConfig | None,
    **options: Any,
) -> torch.Tensor:
    """`bsr_gemm`, or `bsr_scaled_gemm`, past the dispatcher and autograd; all arguments must be given, of the
    latter `scales`: of the sparse factor and of the dense one."""
    plan = plan_of(sparse, dense, left, out, (family, config), options)
    return follow(plan, sparse, dense, left, out, options)


def plan_of(
    sparse: BsrTensor, dense: Any, left: bool, out: Any, forced: tuple[Any, Any], options: dict[str, Any]
) -> bsr_plan.Plan:
    """The plan of a call; `forced`: family, configuration; `options`: as those of `run_direct`."""
    extras = _extras(options)
    parts = [options[name] for name in ("bias_axis", "activation", "epilogue", "out_dtype")]
    key = (
        left, sparse.transposed, forced, "scales" in options, options["alpha"] == 1.0, options["beta"] == 0.0,
        *parts, *map(signature, (sparse.values, dense, out, *extras)),
    )  # fmt: skip
    plan: bsr_plan.Plan | None = sparse._kept.get(key)
    if plan is None:
        plan = new_plan(sparse, dense, left, out, forced, options, extras)
        others = {name: options[name] for name in _READ}
        others.update((f"epilogue_args[{i}]", x) for i, x in enumerate(options["epilogue_args"]))
        scales = dict(zip(scale_names(left), options.get("scales", ())))
        factors = {"a" if left else "b": dense, "the values": sparse.values}
        check_memory({**factors, **scales, **others, "out": out})
        if not target_of(dense).emulated:  # the emulator may be another one next time
            call_cache.put(sparse._kept, key, plan, _MAX_PLANS)
    return plan


def new_plan(
    sparse: BsrTensor,
    dense: Any,
    left: bool,
    out: Any,
    forced: tuple[Any, Any],
    options: dict[str, Any],
    extras: tuple[Any, ...] = (),
) -> bsr_plan.Plan:
    """A plan for calls like this one, once it is checked; of `options` some may be missing."""
    family, config = forced
    call = bsr_plan.describe(sparse, dense, left, out=out, **options)
    overlap.check_self_overlap(out)
    return bsr_plan.build(
        call, dense, out, target_of(dense), pattern_of_matrix(sparse), family=family, config=config,
        extras=extras,
    )  # fmt: skip


def follow(
    plan: bsr_plan.Plan, sparse: BsrTensor, dense: Any, left: bool, out: Any, options: dict[str, Any]
) -> torch.Tensor:
    """The call, after what depends on addresses was looked at."""
    if out is not None:
        scales = dict(zip(scale_names(left), options.get("scales", ())))
        factors = {"a" if left else "b": dense, "the values": sparse.values, **scales}
        named = {name: options[name] for name in ("c", "bias", "residual")}
        named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(options["epilogue_args"]))
        overlap.check_alone("out", out, factors)
        overlap.check_overlap(out, {name: x for name, x in named.items() if isinstance(x, torch.Tensor)})
    operands = None
    if plan.operands is not None:
        operands = plan.operands((float(options["alpha"]), float(options["beta"]), *_extras(options)))
    return plan.run(sparse.values, dense, out, operands)


def _extras(options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments that a kernel reads besides the factors."""
    others = (options["c"], options["bias"], options["residual"])
    return (*others, *options.get("scales", ()), *options["epilogue_args"])


def scale_names(left: bool) -> tuple[str, str]:
    """What the scales of the sparse factor and of the dense one are called; `left`: that stands there."""
    return ("scale_b", "scale_a") if left else ("scale_a", "scale_b")


def pattern_of_matrix(sparse: BsrTensor) -> Pattern:
    rows, columns = sparse.shape[0] // sparse.block[0], sparse.shape[1] // sparse.block[1]
    return pattern_of(sparse.crow_indices, sparse.col_indices, rows, columns)


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
    """(sparse, dense, whether the dense one is on the left) of arguments that no `BsrTensor` is among."""
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
    """Why `bsr_gemm(a, b, …)` with these arguments cannot run here; None if it can. Compiles nothing."""
    forced = options.pop("family", None), options.pop("config", None)
    out = options.pop("out", None)
    check = options.pop("check", False)
    sparse: BsrTensor
    dense: Any
    try:
        boolean("check", check)
        check_names("bsr_gemm", options)
        if isinstance(a, BsrTensor):
            sparse, dense, left = a, b, False
        elif isinstance(b, BsrTensor):
            sparse, dense, left = b, a, True
        else:
            sparse, dense, left = _factors(a, b)
        new_plan(sparse, dense, left, out, forced, options)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def check_names(operation: str, options: dict[str, Any]) -> None:
    """TypeError for one that is none of the arguments that block-sparse products share."""
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"{name} is given, must not: {operation} has no such argument")


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
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x)
    number("alpha", alpha)
    out_dtype = a.dtype if instance("out_dtype", out_dtype, torch.dtype, type(None)) is None else out_dtype
    check_dtype("out_dtype", out_dtype, (torch.bfloat16, torch.float16))
    # In the caller's terms, as the operator may get other ones.
    bsr_plan.check_sampled(a, b, pattern.size, pattern.block, out_dtype)
    refuse_forward_mode("bsr_sddmm", {"a": a, "b": b})
    tensors = None if watched() else written_out((a, b))
    if tensors is not None:
        a, b = tensors
    if pattern.transposed:  # the stored blocks are those of (a b)ᵀ = bᵀ aᵀ
        a, b = b.mT, a.mT
    given = (pattern.crow_indices, pattern.col_indices, a, b)
    options: dict[str, Any] = {"alpha": alpha, "out_dtype": out_dtype}
    if not needs_dispatcher(given):
        values = run_sampled(*given, shape=pattern.shape, block=pattern.block, **options)
        return pattern.with_values(values)
    from kernels_dsl.ops.bsr import register as bsr_register  # noqa: F401  registers the operator

    values = torch.ops.kernels_dsl.bsr_sddmm(
        *given, shape=list(pattern.shape), block=list(pattern.block), **options
    )
    return pattern.with_values(values)


def run_sampled(
    crow: torch.Tensor,
    col: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    shape: tuple[int, int],
    block: tuple[int, int],
    alpha: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The values of `bsr_sddmm` past the dispatcher and autograd."""
    batch = bsr_plan.check_sampled(a, b, shape, block, out_dtype)
    target = target_of(a)
    pattern = pattern_of(crow, col, shape[0] // block[0], shape[1] // block[1])
    key = ("sampled", block, alpha == 1.0, out_dtype, signature(a), signature(b))
    run = pattern.plans.get(key)
    if run is None:
        run = bsr_plan.build_sampled(
            a, b, pattern, block, target, batch=batch, out_dtype=out_dtype, scaled=alpha != 1.0
        )
        if not target.emulated:
            call_cache.put(pattern.plans, key, run, _MAX_PLANS)
    return run(a, b, None, None if alpha == 1.0 else (float(alpha),))
