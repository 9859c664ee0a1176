"""The operations on caches by PyTorch, one sequence after the other, for `planted`."""

from __future__ import annotations

from typing import Any

import torch

from reference.attention import Masking, attention
from tests.fuzz.serving_pages import E4M3, Cached, Sequences


def decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, dropped: int, **options: Any
) -> Any:
    """`attention_decode`: (output, log-sum-exp), without the last `dropped` keys of each sequence."""
    table, window = options.get("block_table"), options.get("window") or (None, None)
    size = k_cache.shape[1]
    room = size if table is None else table.shape[1]
    sequences = Sequences((), 0 if table is None else size, room, 0, False, False, 0)
    cached = Cached(
        sequences, k_cache, v_cache, options.get("seqused_k"), table, options.get("k_scale"),
        options.get("v_scale"),
    )  # fmt: skip
    right = 0 if options.get("causal", True) else window[1]
    rules = Masking(window[0], right, softcap=options["softcap"], sinks=options["sinks"])
    q = q.resolve_neg()
    found = []
    for b, length in enumerate(cached.lengths()):
        k, v = (x[None, : max(length - dropped, 0)] for x in cached.exact(b, length))
        out, _ = attention(q[b : b + 1], k, v, rules, scale=options["scale"], dtype=q.dtype)
        found.append((out, attention(q[b : b + 1], k, v, rules, scale=options["scale"])[1]))
    if not found:
        return torch.zeros_like(q), q.new_zeros((0, q.shape[2], q.shape[1]), dtype=torch.float32)
    return tuple(torch.cat(part) for part in zip(*found))


def append(new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> None:
    """`append_kv` of keys, or of values."""
    values, size = new.resolve_neg().flatten(0, -3), max(cache.shape[1], 1)
    if cache.dtype == E4M3:
        values = values.float() if scale is None else values.float() / scale.reshape(-1, 1)
        values = values.clamp(-448.0, 448.0).to(E4M3)
    kept = slots >= 0
    cache[slots[kept] // size, slots[kept] % size] = values[kept]


def slots_of(cache: torch.Tensor, tokens: tuple[int, ...], **places: Any) -> torch.Tensor:
    """The slot of each token, -1 for none."""
    pages, size = cache.shape[:2]
    if places.get("slot_mapping") is not None:
        slots = places["slot_mapping"].flatten().long()
        return torch.where((slots >= 0) & (slots < pages * size), slots, -1)
    positions = places["cache_seqlens"].long()[:, None] + torch.arange(tokens[1])
    table = places.get("block_table")
    table = torch.arange(tokens[0])[:, None] if table is None else table.long()
    entries = positions // max(size, 1)
    inside = (places["cache_seqlens"][:, None] >= 0) & (entries < table.shape[1])
    padded = torch.nn.functional.pad(table, (0, 1), value=-1)
    page = padded.gather(1, torch.where(inside, entries, table.shape[1]))
    inside &= (page >= 0) & (page < pages)
    return torch.where(inside, page * size + positions % max(size, 1), -1).flatten()
