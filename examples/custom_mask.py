"""A mask and a bias of your own: a prefix that all see, causal text after it, scores that fade."""

from __future__ import annotations

import cutlass
import torch

import kernels_dsl
from examples.place import DEVICE, report, running, size


def prefix_or_causal(b, h, i, j, prefix):
    """True where query i sees key j: `prefix` has the length of each sequence's prefix."""
    return (j < prefix[b]) | (j <= i)


def fade(score, b, h, i, j, prefix):
    """Takes a tenth away for each eight keys of distance, on either side."""
    distance = cutlass.select_(i >= j, i - j, j - i)
    return score - 0.1 * (distance // 8)


def main() -> None:
    torch.manual_seed(0)
    batch, length, heads, dim = 2, size(4096, 48), size(4, 1), 64
    q, k, v = (torch.randn(batch, length, heads, dim, device=DEVICE).bfloat16() for _ in range(3))
    prefix = torch.tensor([length // 4, 8], dtype=torch.int32, device=DEVICE)
    with running():
        out = kernels_dsl.attention(q, k, v, mask_mod=prefix_or_causal, score_mod=fade, aux=(prefix,))
    place = torch.arange(length, device=DEVICE)
    seen = (place < prefix[:, None, None]) | (place <= place[:, None])
    bias = -0.1 * ((place[:, None] - place).abs() // 8)
    mask = torch.where(seen, bias.double(), -torch.inf)[:, None]
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)
    report("custom mask", float((out - wanted).abs().max()), 2**-6)


if __name__ == "__main__":
    main()
