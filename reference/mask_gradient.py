"""Rounding errors of an additive mask's gradient, element by element."""

from __future__ import annotations

from dataclasses import replace

import torch

from reference.attention import Masking, attention


def rounding_error(
    expected: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    masking: Masking,
    d_out: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """The error, up to some 3.5 standard deviations, of a mask's gradient P (dP - sum of dO * O) in 16 bits.

    P is rounded, as the result of PyTorch's softmax, and the row sums are those of the rounded output, as in
    PyTorch's memory-efficient attention and in FlashAttention-2. Autograd of the reference rounds dP instead;
    an element has errors of its own, not a sum's average, so that one algorithm's are no bound for another's.

    expected: the float64 gradient, with as many elements as `masking.bias`. operands: q, k, v, (B, S, H, D),
    of a 16-bit dtype; d_out: (B, Sq, H, Dv).
    """
    assert masking.bias is not None
    eps = torch.finfo(operands[0].dtype).eps
    bias = masking.bias.detach().double().requires_grad_()
    q, k, v = (x.detach().double() for x in operands)
    out, lse = attention(q, k, v, replace(masking, bias=bias), scale=scale)
    error = expected.abs() * eps / 2
    if not lse.requires_grad:  # there are no keys
        return error
    row_sums = eps * (d_out.double() * out.detach()).square().sum(-1).sqrt().mT  # (B, H, Sq)
    return error + torch.autograd.grad(lse, bias, row_sums.to(lse))[0].reshape(expected.shape)
