"""The decode loop of a language model: a prompt, then a token at a time, keys and values in pages of a cache.

A tiny random model of one layer. The tokens are those of a model that computes all of its attention anew.
"""

from __future__ import annotations

import torch

import kernels_dsl
from examples.place import DEVICE, report, running, size
from kernels_dsl.flash_attn import flash_attn_with_kvcache

BATCH, PAGE, VOCABULARY = 2, 16, 97
HEADS, KV_HEADS, DIM = size(4, 2), size(2, 1), 64


class Model:
    """One layer of attention between an embedding and a head."""

    def __init__(self) -> None:
        width = HEADS * DIM
        shapes = ((VOCABULARY, width), (width, (HEADS + 2 * KV_HEADS) * DIM), (width, VOCABULARY))
        made = [(torch.randn(shape, device=DEVICE) / shape[0] ** 0.5).bfloat16() for shape in shapes]
        self.embedding, self.qkv, self.head = made

    def heads(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q (B, S, HEADS, DIM), k and v of tokens (B, S)."""
        product = (self.embedding[tokens] @ self.qkv).unflatten(-1, (-1, DIM))
        return product.split([HEADS, KV_HEADS, KV_HEADS], dim=2)

    def next_of(self, attended: torch.Tensor) -> torch.Tensor:
        """The most likely token (B, 1) after the last row of attended (B, S, HEADS, DIM)."""
        logits = attended[:, -1:].flatten(2) @ self.head
        return logits.argmax(-1)


def main() -> None:
    torch.manual_seed(0)
    prompt, steps = size(512, 14), size(64, 2)
    model, pages = Model(), -(-(prompt + steps) // PAGE)
    tokens = torch.randint(VOCABULARY, (BATCH, prompt), device=DEVICE)
    caches = torch.zeros(2, BATCH * pages, PAGE, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    order = torch.randperm(BATCH * pages, device=DEVICE)  # pages of a sequence may lie anywhere
    table = order.to(torch.int32).view(BATCH, pages)
    lengths = torch.zeros(BATCH, dtype=torch.int32, device=DEVICE)
    new, error = tokens, 0.0
    with running():
        for step in range(steps + 1):
            q, k, v = model.heads(new)
            out = flash_attn_with_kvcache(
                q, caches[0], caches[1], k, v, cache_seqlens=lengths, block_table=table, causal=True
            )
            lengths = lengths + new.shape[1]
            whole = kernels_dsl.attention(*model.heads(tokens), causal=True)  # without a cache
            error = max(error, float((out[:, -1] - whole[:, -1]).abs().max()))
            new = model.next_of(out)
            tokens = torch.cat([tokens, new], dim=1)
            print(f"step {step}: {lengths.tolist()} keys, tokens {new.flatten().tolist()}")
    report("decode loop", error, 2**-7)


if __name__ == "__main__":
    main()
