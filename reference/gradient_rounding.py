"""Rounding errors of attention's gradients in 16 bits, element by element, which no average hides.

FlashAttention-2 and PyTorch's memory-efficient attention take a row's sum of dO * O from the output that is
stored, rounded; autograd sums products. Where dP is much the same for all keys of a row, or one key has
nearly all the weight, that error is all that is left of P (dP - sum of dO * O).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from reference.attention import Masking, attention

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def row_sum_errors(
    operands: Operands, masking: Masking, d_out: torch.Tensor, *, scale: float | None = None
) -> dict[str, torch.Tensor]:
    """Errors that row sums off by some 3.5 standard deviations make in the gradients of q, k and a bias.

    operands: q, k, v, (B, S, H, D), of a 16-bit dtype; d_out: (B, Sq, H, Dv). The result has the names q, k
    and, where there is a bias, mask.
    """
    q, k, v = (x.detach().double() for x in operands)
    asked = {"q": q.requires_grad_(), "k": k.requires_grad_()}
    if masking.bias is not None:
        asked["mask"] = masking.bias.detach().double().requires_grad_()
        masking = replace(masking, bias=asked["mask"])
    out, lse = attention(q, k, v, masking, scale=scale)
    if not lse.requires_grad:  # there are no keys
        return {name: torch.zeros_like(x) for name, x in asked.items()}
    products = d_out.double() * out.detach()
    row_sums = torch.finfo(operands[0].dtype).eps * products.square().sum(-1).sqrt().mT  # (B, H, Sq)
    # The errors go the way of the log-sum-exp's gradient.
    found = torch.autograd.grad(lse, list(asked.values()), row_sums.to(lse), allow_unused=True)
    return {n: torch.zeros_like(x) if y is None else y.abs() for (n, x), y in zip(asked.items(), found)}


def mask_error(
    expected: torch.Tensor,
    operands: Operands,
    masking: Masking,
    d_out: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """The error, up to some 3.5 standard deviations, of an additive mask's gradient.

    P is rounded, too, as the result of PyTorch's softmax. Autograd of the reference rounds dP instead; an
    element has errors of its own, not a sum's average, so that one algorithm's are no bound for another's.

    expected: the float64 gradient, with as many elements as `masking.bias`. operands: q, k, v, (B, S, H, D),
    of a 16-bit dtype; d_out: (B, Sq, H, Dv).
    """
    assert masking.bias is not None
    error = row_sum_errors(operands, masking, d_out, scale=scale)["mask"].reshape(expected.shape)
    return expected.abs() * torch.finfo(operands[0].dtype).eps / 2 + error
