"""The arguments of `grouped_gemm` and `scaled_grouped_gemm`: `arguments` with rows in groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.checks.eager_path import check_tensor
from kernels_dsl.config.gemm import NUMBER
from kernels_dsl.config.promotion import GROUP, Promotion
from kernels_dsl.ops.gemm.arguments import (
    BLOCK_SCALE,
    FP8_DTYPES,
    GROUP_ENDS,
    INPUT_DTYPES,
    DenseArguments,
    GemmCall,
    OperandSpec,
    check_device,
    check_dtype,
    check_matrices,
    check_out,
    describe_epilogue,
    extents_of,
    result_dtype,
)
from kernels_dsl.ops.gemm.product import Product
from kernels_dsl.ops.operation import Named
from kernels_dsl.ops.scaled.arguments import OUT_DTYPES, check_scales, promoted, scaled_epilogue
from lowering.records import frozen


@frozen
class GroupedArguments(DenseArguments):
    """The arguments of `grouped_gemm`, and with scales of a and b those of `scaled_grouped_gemm`."""

    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    scale_result: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    epilogue_args: tuple[Any, ...] = ()
    alpha: float = 1.0
    activation: str | None = None
    epilogue: Named = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    config: Named = None
    family: str | None = None
    out: torch.Tensor | None = None
    amax: torch.Tensor | None = None

    outputs = ("out", "amax")
    operands = (
        "alpha", "beta", "c", "bias", "residual", "scale_a", "scale_b", "scale_result", "offs", "amax",
    )  # fmt: skip


def describe(call: GroupedArguments) -> GemmCall:
    """Check the arguments of `grouped_gemm` or `scaled_grouped_gemm` and say what they ask for. TypeError or
    ValueError says what is wrong."""
    a, b, offs = call.a, call.b, call.offs
    scaled = call.scale_a is not None or call.scale_b is not None
    check_matrices(a, b, FP8_DTYPES if scaled else INPUT_DTYPES, mixed=scaled)
    for name, value, modes, rank in (("a", a, "(M, K)", 2), ("b", b, "(G, K, N)", 3)):
        if value.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, must be {modes}")
    (m, n, k), groups = extents_of(a, b), b.shape[0]
    check_tensor("offs", offs)
    check_dtype("offs", offs.dtype, (torch.int32,))
    check_device("offs", offs, a.device)
    if tuple(offs.shape) != (groups,):
        raise ValueError(
            f"offs has shape {tuple(offs.shape)}, must be ({groups},), an end for each matrix of b"
        )
    scales: tuple[OperandSpec, ...] = ()
    promotion = None
    if scaled:
        check_scales(call)
        scales, promotion = promoted(*_scales(call), call.use_fast_accum, k)
    epilogue, operands = _epilogue(call, m, n, groups)
    default, allowed = (torch.bfloat16, OUT_DTYPES) if scaled else (a.dtype, INPUT_DTYPES)
    out_dtype = result_dtype(call.out, call.out_dtype, default, allowed)
    epilogue, scales = scaled_epilogue(call, epilogue, scales, out_dtype)
    found = GemmCall(
        m, n, k, None, a.dtype, out_dtype, epilogue,
        operands=(OperandSpec("offs", GROUP_ENDS), *scales, *operands), promotion=promotion, groups=groups,
    )  # fmt: skip
    if call.out is not None:
        check_out(call.out, found, a.device)
    return found


def _epilogue(call: GroupedArguments, m: int, n: int, groups: int) -> tuple[Any, tuple[OperandSpec, ...]]:
    """As `describe_epilogue`, with a bias a column, (N,), or a group and column, (G, N)."""
    modes, bias = "n", call.bias
    if isinstance(bias, torch.Tensor) and bias.dim() == 2:
        if tuple(bias.shape) != (groups, n):
            raise ValueError(f"bias has shape {tuple(bias.shape)}, must be ({n},) or ({groups}, {n})")
        modes, bias = "ln", bias[0] if groups else bias.new_empty(n)
    function, operands = describe_epilogue((m, n), call.a.device, {**vars(call), "bias": bias})
    return function, tuple(replace(x, modes=modes) if x.source == "bias" else x for x in operands)


def _scales(call: GroupedArguments) -> tuple[tuple[OperandSpec, ...], Promotion | None]:
    """The scales of a and b as operands, and the promotion that those of 128 elements of K make necessary."""
    scale_a, scale_b = call.scale_a, call.scale_b
    assert scale_a is not None and scale_b is not None
    (m, k), groups, n = call.a.shape, call.b.shape[0], call.b.shape[2]
    parts, of_a, of_b = -(-k // GROUP), tuple(scale_a.shape), tuple(scale_b.shape)
    # Pairs, not a dictionary: symbolic extents have no hash.
    plain_a = (((m,), "m"), ((m, 1), "m1"), ((groups, 1, 1), "l11"))
    plain_b = (((groups, n), "ln"), ((groups, 1, n), "l1n"), ((groups, 1, 1), "l11"))
    found = _broadcast("scale_a", scale_a, plain_a), _broadcast("scale_b", scale_b, plain_b)
    if found[0] is not None and found[1] is not None:
        return (found[0], found[1]), None
    wide, large = (groups, parts, n), (groups, parts, -(-n // GROUP))
    if of_a == (m, parts) and of_b in (wide, large):
        specs = (OperandSpec("scale_a", BLOCK_SCALE), OperandSpec("scale_b", BLOCK_SCALE))
        return specs, Promotion(1, 1 if of_b == wide else GROUP)
    if found[0] is None and (of_a != (m, parts) or found[1] is not None):
        raise ValueError(
            f"scale_a has shape {of_a}, must be one element, ({m},) or ({m}, 1) for a scale a row, "
            f"({groups}, 1, 1) for one a group, or for 128 elements of K ({m}, {parts}), both scales then"
        )
    raise ValueError(
        f"scale_b has shape {of_b}, must be one element, ({groups}, {n}) or ({groups}, 1, {n}) for a scale a "
        f"column, ({groups}, 1, 1) for one a group, or for 128 elements of K {wide} or {large}, both then"
    )


def _broadcast(
    name: str, scale: torch.Tensor, allowed: tuple[tuple[tuple[int, ...], str], ...]
) -> OperandSpec | None:
    """The scale as an operand of the epilogue, by its own modes; None where it is none. `allowed`: shapes and
    their modes."""
    if scale.numel() == 1:
        return OperandSpec(name, NUMBER)
    shape = tuple(scale.shape)
    return next((OperandSpec(name, modes) for sizes, modes in allowed if sizes == shape), None)


GROUPED_GEMM = Product("grouped_gemm", GroupedArguments, describe)
