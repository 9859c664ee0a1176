"""fp8 attention that keeps no running maximum, written out block by block: the error that it must have.

The weights of a row are taken against a reference, a power of two above the largest score of one of its
blocks of keys, and rounded to e4m3; the reference moves only where weights no longer fit. What rounding costs
depends on where the weights lie between powers of two, so a model that rounds against the row's maximum has
other errors, and its largest weight none. Slow and obvious; torch only.
docs/how_attention_fp8_works.md explains it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from reference.attention import Masking, masked_scores
from reference.quantize import from_fp8, to_fp8

LARGEST = 448.0
"""The largest e4m3. Where the sum of a quarter of a row's weights in a block passes it, a reference moves."""
ROOM = 7
"""Powers of two that such a sum has at most in the block that the reference is from."""
LEAST = 4
"""Powers of two from the largest score of a block in which some key is hidden to a reference from it."""
ROWS = 16
"""Rows whose references move together."""
MEAN = 0.0571
"""log2 of (1 + f) / 2^f in the mean over f from 0 to 1."""


@dataclass(frozen=True)
class Walk:
    """Tiles of `queries` visit blocks of `keys`, from the last that any of their rows sees to the first.

    `rising`: but before them, from left to right, those behind the last block in which nothing is hidden.
    With `edge_last` only the first of these is before them, and the others come last.
    Where `linear` is not 0, one of so many exponentials is linear between powers of two, in blocks after the
    first in which nothing is hidden.
    """

    queries: int
    keys: int
    linear: int = 0
    rising: bool = True
    edge_last: bool = False


def attention_fp8_watched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masking: Masking,
    walk: Walk,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """The output of `reference.attention.attention` in float64, with such weights. Without sinks."""
    repeat, q_len = q.shape[2] // k.shape[2], q.shape[1]
    values = v.double().transpose(1, 2).repeat_interleave(repeat, dim=1)
    scores = masked_scores(q, k, masking, scale) / math.log(2.0)  # weights are powers of two
    out = torch.zeros(*scores.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for start in range(0, q_len, walk.queries):
        rows = slice(start, min(start + walk.queries, q_len))
        out[:, :, rows] = _tile(scores[:, :, rows], values, walk, masking.right is not None)
    return out.transpose(1, 2)


def _tile(scores: torch.Tensor, values: torch.Tensor, walk: Walk, edge: bool) -> torch.Tensor:
    """The rows of one tile: scores (B, H, rows, Sk) in powers of two, values (B, H, Sk, Dv). `edge`: the mask
    has a right edge, near which a rising walk begins."""
    rows, length = scores.shape[2:]
    scores = torch.nn.functional.pad(scores, (0, 0, 0, -rows % ROWS))
    seen = (scores[:, :, :rows] > -math.inf).any(2).any(0).any(0).nonzero()
    first, last = (int(seen[0]), int(seen[-1])) if len(seen) else (0, 0)
    reference = scores.new_full((*scores.shape[:3], 1), -math.inf)
    out, total = scores.new_zeros(()), scores.new_zeros(())
    blocks = list(range(first // walk.keys, last // walk.keys + 1))
    scores = torch.nn.functional.pad(scores, (0, -length % walk.keys), value=-math.inf)
    seen_whole = (scores[:, :, :rows] > -math.inf).all(2).all(0).all(0).unflatten(0, (-1, walk.keys)).all(1)
    cut = len(list(itertools.takewhile(lambda block: not seen_whole[block], reversed(blocks))))
    end = len(blocks) - cut if walk.rising else len(blocks)
    behind = end + 1 if walk.edge_last else len(blocks)
    for number, block in enumerate(blocks[end:behind] + blocks[:end][::-1] + blocks[behind:]):
        keys = slice(block * walk.keys, min((block + 1) * walk.keys, length))
        x, hidden = scores[..., block * walk.keys : (block + 1) * walk.keys], not bool(seen_whole[block])
        weights = _weights(x, reference, 0 if hidden else walk.linear)
        fits = (_quarters(weights) <= LARGEST).all(-1, keepdim=True)  # without a reference: infinite or NaN
        fits = fits.unflatten(2, (-1, ROWS)).all(3, keepdim=True).expand(-1, -1, -1, ROWS, 1).flatten(2, 3)
        moved = torch.where(fits, reference, torch.maximum(reference, _reference(x, hidden)))
        if number == 0 and walk.rising and edge:
            moved = x.amax(-1, keepdim=True) + LEAST
        weights = torch.where(fits, weights, _weights(x, _finite(moved), 0))
        older = torch.where(reference == -math.inf, 0.0, reference - moved)
        total = total * torch.exp2(older) + weights.sum(-1, keepdim=True)
        rounded = from_fp8(to_fp8(weights, torch.float8_e4m3fn))[..., : keys.stop - keys.start]
        out = out * torch.exp2(older) + rounded @ values[:, :, keys]
        reference = moved
    return (out / torch.where(total == 0, 1.0, total))[:, :, :rows]


def _reference(x: torch.Tensor, hidden: bool) -> torch.Tensor:
    """Maxima that a block's scores (…, rows, keys) suggest: -inf where a row sees none of its keys."""
    top = x.amax(-1, keepdim=True)
    powers = _quarters(torch.exp2(x - _finite(top))).amax(-1, keepdim=True).log2().ceil()
    return top + (powers.clamp(min=LEAST) if hidden else powers)


def _weights(x: torch.Tensor, reference: torch.Tensor, linear: int) -> torch.Tensor:
    """exp2(x - reference) · 2^ROOM. Of the keys of a quarter, numbered through, every `linear`-th is on a
    straight line between powers of two; in the lower half of ROWS it is the one before."""
    x = x - reference + ROOM
    if linear == 0:
        return torch.exp2(x)
    row, key = (torch.arange(n, device=x.device) for n in x.shape[-2:])
    number = (key // 8 * 2 + key % 2) + (row % ROWS // (ROWS // 2))[:, None]
    lower = torch.floor(x - MEAN)
    lines = torch.exp2(lower) * (1 + (x - MEAN - lower))
    return torch.where(number % linear == linear - 1, lines, torch.exp2(x))


def _quarters(weights: torch.Tensor) -> torch.Tensor:
    """Sums over the quarters of a block's keys, (…, 4): of every eight, 2 c and 2 c + 1 are of quarter c."""
    return weights.unflatten(-1, (-1, 4, 2)).sum((-3, -1))


def _finite(reference: torch.Tensor) -> torch.Tensor:
    """0 for -inf: what no key is seen with may be anything."""
    return torch.where(reference == -math.inf, 0.0, reference)
