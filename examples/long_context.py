"""A long document to be summarised: each token sees a window before it, and the document's first tokens."""

from __future__ import annotations

import torch

import kernels_dsl
from examples.place import DEVICE, report, running, size

FIRST = 16
"""Tokens that all see."""


def main() -> None:
    torch.manual_seed(0)
    length, window, heads, dim = size(131072, 160), size(2048, 32), size(8, 1), 64
    q, k, v = (torch.randn(1, length, heads, dim, device=DEVICE).bfloat16() for _ in range(3))
    with running():
        near, near_lse = kernels_dsl.attention(q, k, v, causal=True, window=(window - 1, 0), return_lse=True)
        # The first tokens, for queries from which the window does not reach them: merged exactly.
        far_q = q[:, window + FIRST :]
        first, first_lse = kernels_dsl.attention(far_q, k[:, :FIRST], v[:, :FIRST], return_lse=True)
        parts = torch.stack([near[:, window + FIRST :], first])
        lses = torch.stack([near_lse[..., window + FIRST :], first_lse]).mT.contiguous()
        far, _ = kernels_dsl.merge_states(parts, lses)
    out = torch.cat([near[:, : window + FIRST], far], dim=1)
    starts = torch.arange(0, window + 2 * FIRST, FIRST)  # rows to compare, the last ones too
    rows = torch.cat([starts, torch.arange(length - FIRST, length)]).to(DEVICE)
    j = torch.arange(length, device=DEVICE)
    seen = (j <= rows[:, None]) & (j > rows[:, None] - window)
    seen |= (j < FIRST) & (rows[:, None] >= window + FIRST)
    compared = (x.double().transpose(1, 2) for x in (q[:, rows], k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*compared, attn_mask=seen).transpose(1, 2)
    report("long context", float((out[:, rows] - wanted).abs().max()), 2**-6)


if __name__ == "__main__":
    main()
