"""Attention of a video model: each block of queries sees the blocks of keys that its mean scores highest.

`attend` takes and gives (B, S, H, D), as an attention backend of diffusers does.
"""

from __future__ import annotations

import torch

import kernels_dsl
from examples.place import DEVICE, report, running, size
from kernels_dsl.ops.attention.blocks import topk_blocks

BLOCK = 128


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: int) -> torch.Tensor:
    """Attention of q to the `kept` best blocks of keys of each head and block of queries."""
    scores = _block_scores(q, k)
    return kernels_dsl.attention(q, k, v, blocks=topk_blocks(scores, kept))


def _block_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(B, H, query blocks, key blocks): scores of the blocks' means."""
    means = [x.float().unflatten(1, (-1, BLOCK)).mean(2) for x in (q, k)]
    return torch.einsum("bihd,bjhd->bhij", *means)


def main() -> None:
    torch.manual_seed(0)
    frames, tokens, heads, dim = size(16, 3), size(2048, BLOCK), size(24, 1), 64
    kept = size(32, 2)
    q, k, v = (torch.randn(1, frames * tokens, heads, dim, device=DEVICE).bfloat16() for _ in range(3))
    with running():
        out = attend(q, k, v, kept)
    scores = _block_scores(q, k)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(kept).indices, True)
    rows = slice(0, BLOCK)  # the first block of queries
    seen = best[:, :, :1].repeat_interleave(BLOCK, 3).expand(-1, -1, BLOCK, -1)
    compared = (x.double().transpose(1, 2) for x in (q[:, rows], k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*compared, attn_mask=seen).transpose(1, 2)
    report("video blocks", float((out[:, rows] - wanted).abs().max()), 2**-6)


if __name__ == "__main__":
    main()
