"""Products as nodes of autograd; `recorded.Recorded` is the plan of a call that makes one."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.gemm.grad import backward, keep_for_backward
from kernels_dsl.ops.gemm.recorded import RecordedCall


def record(ctx: Any, call: RecordedCall, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Computes the product and keeps what its gradients need: the forward function of every node.

    `inputs`: indices, the two factors, c, bias and residual.
    """
    recorded, plan = call.recorded, call.recorded.plan
    keywords = {**recorded.keywords, "alpha": call.alpha, "beta": call.beta}
    kept = () if recorded.kept is None else (recorded.kept(),)
    keep_for_backward(ctx, inputs, keywords, len(inputs) - 3, call, kept)
    *_, left, right, c, bias, residual = inputs
    operands = None
    if plan.operands is not None:
        operands = plan.operands((call.alpha, call.beta, c, bias, residual, *kept))
    return plan.run(left, right, None, operands)


class GatedGemm(torch.autograd.Function):
    """A call of `gemm_gated`."""

    forward = staticmethod(record)
    backward = staticmethod(backward)


class Gemm(torch.autograd.Function):
    """A call of `gemm`."""

    forward = staticmethod(record)
    backward = staticmethod(backward)
