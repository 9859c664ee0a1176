"""What a call of `grouped_gemm` or `scaled_grouped_gemm` asks for: `arguments` with rows in groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.functions import ScaledEpilogue
from kernels_dsl.config.gemm import NUMBER
from kernels_dsl.config.promotion import GROUP, Promotion
from kernels_dsl.ops.eager_path import check_tensor
from kernels_dsl.ops.gemm.arguments import (
    BLOCK_SCALE,
    FP8_DTYPES,
    GROUP_ENDS,
    INPUT_DTYPES,
    GemmCall,
    OperandSpec,
    check_device,
    check_dtype,
    check_extents,
    check_matrices,
    check_out,
    describe_epilogue,
    result_dtype,
)
from kernels_dsl.ops.scaled.arguments import OUT_DTYPES, amax_spec, fast_sums, result_spec

EXTRAS = 5
"""What these have beyond the arguments of `gemm`: the scales of a, b and the result, where groups end, and
the place for the result's largest magnitude, which have these numbers as their `OperandSpec.index`."""
_SCALE_A, _SCALE_B, _OFFS, _AMAX = 0, 1, 3, 4


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    *,
    amax: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    **epilogue: Any,
) -> GemmCall:
    """Check the arguments of `scaled_grouped_gemm` and say what they ask for; those of `grouped_gemm` where
    there are no `scales` of a, b and the result. TypeError or ValueError says what is wrong."""
    scaled = scales[0] is not None or scales[1] is not None
    check_matrices(a, b, FP8_DTYPES if scaled else INPUT_DTYPES, mixed=scaled)
    for name, value, modes, rank in (("a", a, "(M, K)", 2), ("b", b, "(G, K, N)", 3)):
        if value.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, must be {modes}")
    m, k, n, groups = a.shape[0], a.shape[1], b.shape[2], b.shape[0]
    check_extents(m, n, k)
    check_tensor("offs", offs)
    check_dtype("offs", offs.dtype, (torch.int32,))
    check_device("offs", offs, a.device)
    if tuple(offs.shape) != (groups,):
        raise ValueError(
            f"offs has shape {tuple(offs.shape)}, must be ({groups},), an end for each matrix of b"
        )
    specs: tuple[OperandSpec, ...] = ()
    promotion = None
    if scaled:
        specs, promotion = _scales(scales[0], scales[1], a, b)
        if not fast_sums(use_fast_accum, promotion) and promotion is None and k > GROUP:
            promotion = Promotion()
        if k == 0 and promotion is not None:
            specs, promotion = (), None  # scales of no elements
    inner, operands = _epilogue(m, n, groups, a.device, bias, epilogue)
    shifted = tuple(replace(x, index=x.index + EXTRAS) if x.source == "args" else x for x in operands)
    default, allowed = (torch.bfloat16, OUT_DTYPES) if scaled else (a.dtype, INPUT_DTYPES)
    out_dtype = result_dtype(out, out_dtype, default, allowed)
    in_epilogue = sum(spec.modes != BLOCK_SCALE for spec in specs)
    if scales[2] is not None:
        specs = (*specs, result_spec(scales[2], out_dtype, a.device))
    if amax is not None:
        specs = (*specs, amax_spec(amax, a.device, _AMAX))
    further = scales[2] is not None, amax is not None
    function = ScaledEpilogue(inner, in_epilogue, *further) if in_epilogue or any(further) else inner
    ends = OperandSpec("args", GROUP_ENDS, _OFFS)
    call = GemmCall(
        m, n, k, None, a.dtype, out_dtype, epilogue=function, operands=(ends, *specs, *shifted),
        promotion=promotion, groups=groups,
    )  # fmt: skip
    if out is not None:
        check_out(out, call, a.device)
    return call


def _epilogue(
    m: int, n: int, groups: int, device: torch.device, bias: torch.Tensor | None, epilogue: dict[str, Any]
) -> tuple[Any, tuple[OperandSpec, ...]]:
    """As `describe_epilogue`, with a bias a column, (N,), or a group and column, (G, N)."""
    modes = "n"
    if isinstance(bias, torch.Tensor) and bias.dim() == 2:
        if tuple(bias.shape) != (groups, n):
            raise ValueError(f"bias has shape {tuple(bias.shape)}, must be ({n},) or ({groups}, {n})")
        modes, bias = "ln", bias[0] if groups else bias.new_empty(n)
    function, operands = describe_epilogue((m, n), device, bias=bias, **epilogue)
    return function, tuple(replace(x, modes=modes) if x.source == "bias" else x for x in operands)


def _scales(
    scale_a: Any, scale_b: Any, a: torch.Tensor, b: torch.Tensor
) -> tuple[tuple[OperandSpec, ...], Promotion | None]:
    """The scales of a and b as operands, and the promotion that those of 128 elements of K make necessary."""
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        check_tensor(name, scale)
        check_dtype(name, scale.dtype, (torch.float32,))
        check_device(name, scale, a.device)
    (m, k), groups, n = a.shape, b.shape[0], b.shape[2]
    parts, of_a, of_b = -(-k // GROUP), tuple(scale_a.shape), tuple(scale_b.shape)
    # Pairs, not a dictionary: symbolic extents have no hash.
    plain_a = (((m,), "m"), ((m, 1), "m1"), ((groups, 1, 1), "l11"))
    plain_b = (((groups, n), "ln"), ((groups, 1, n), "l1n"), ((groups, 1, 1), "l11"))
    found = _broadcast(scale_a, plain_a, _SCALE_A), _broadcast(scale_b, plain_b, _SCALE_B)
    if found[0] is not None and found[1] is not None:
        return (found[0], found[1]), None
    wide, large = (groups, parts, n), (groups, parts, -(-n // GROUP))
    if of_a == (m, parts) and of_b in (wide, large):
        specs = (OperandSpec("args", BLOCK_SCALE, _SCALE_A), OperandSpec("args", BLOCK_SCALE, _SCALE_B))
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
    scale: torch.Tensor, allowed: tuple[tuple[tuple[int, ...], str], ...], index: int
) -> OperandSpec | None:
    """The scale as an operand of the epilogue, by its own modes; None where it is none. `allowed`: shapes and
    their modes."""
    if scale.numel() == 1:
        return OperandSpec("args", NUMBER, index)
    shape = tuple(scale.shape)
    return next((OperandSpec("args", modes, index) for sizes, modes in allowed if sizes == shape), None)
