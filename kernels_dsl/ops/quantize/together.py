"""Three tensors with a scale a matrix in one launch, such as the Q, K and V of an attention layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import needs_dispatcher, signature
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.quantize.arguments import FORMATS, Scheme, check, check_target
from kernels_dsl.ops.quantize.buffers import buffers_of, finished, maker_of
from kernels_dsl.ops.quantize.kernels import Kernels, three_matrices
from kernels_dsl.ops.quantize.quantize import quantize
from kernels_dsl.ops.sm_margin import with_margin
from kernels_dsl.ops.target import target_of

Pairs = list[tuple[torch.Tensor, ...]]
_PLANS: dict[Any, Callable[..., Pairs] | None] = {}
_DTYPE = torch.float8_e4m3fn


def quantize_matrices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pairs:
    """`quantize(x, scaling="matrix")` of each; in one launch where they have the same matrices."""
    tensors = (q, k, v)
    plan = None
    if not needs_dispatcher(tensors):
        key = with_margin(tuple(map(signature, tensors)))
        plan = _PLANS.get(key)
        if plan is None and key not in _PLANS:
            plan = _plan(tensors)
            if not target_of(q, "q").emulated:
                call_cache.put(_PLANS, key, plan)
    return plan(*tensors) if plan is not None else [quantize(x, scaling="matrix") for x in tensors]


def _plan(tensors: tuple[torch.Tensor, ...]) -> Callable[..., Pairs] | None:
    """A function that serves such calls in one launch; None where they need several."""
    first = tensors[0]
    if any(
        (x.dtype, x.device, x.shape[-2:]) != (first.dtype, first.device, first.shape[-2:])
        or x.dim() > 4
        or x.numel() == 0
        or x.stride(-1) != 1
        for x in tensors
    ):
        return None
    for x in tensors:
        check(x, _DTYPE, "matrix", False, None)
    target, scheme = target_of(first, "q"), Scheme(_DTYPE, "matrix", False, False)
    check_target(target)
    send = three_matrices([Kernels(FORMATS[_DTYPE], target, x) for x in tensors])
    if send is None:
        return None
    buffers = [buffers_of(x.shape, scheme) for x in tensors]
    make = maker_of([b for own in buffers for b in own], first.device)

    def run(*tensors: torch.Tensor) -> Pairs:
        made = make()
        send(*tensors, made)
        return [tuple(finished(own, made[2 * n : 2 * n + 2])) for n, own in enumerate(buffers)]

    return run
