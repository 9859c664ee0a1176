"""Tiles of keys of Hopper's attention backward whose walks are cut: SMs start one after another, and end
together.

Tiles of equal walks go to the SMs in rounds. In the last round there may be few, and in the first one those
of a head wait for one another's turn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels_dsl.config.attention_backward import CUT_WARPS, FIRST_PIECES, Sm90BackwardConfig
from kernels_dsl.ops.attention.arguments import AttentionCall

ROUNDS = 15
"""Rounds of tiles from which on the first ones are cut in a fixed order, too, as measured on an H200."""
HEADS_OF_AN_END = 8
"""Heads whose first tiles are cut, at most, and as many whose last ones are."""
BYTES_OF_AN_END = 1 << 26
"""Bytes of Q, dO and the sums of dQ of those heads: with twice as many half of the gain was lost to L2."""
MOST_PIECES = 16
MOST_ON_AN_SM = 4
"""Pieces of all tiles for each SM: they are memory, 66 MiB at most on an H200."""
BESIDE = 8
"""Steps that a piece costs beside its own, for its K, V, dK and dV: an estimate."""
LEAST_GAIN = 64
"""Pieces must save a 64th of all steps: a 96th was none as measured on an H200, a 50th was."""

End = tuple[int, int]
Cut = tuple[torch.Tensor, torch.Tensor, tuple[End, End] | None, int, int]
"""Arguments of the kernel: float32 sums, int32 counts, heads and tiles of each that are cut first and last
(None where none are first), tiles that are cut last and pieces of each of them."""


class CutTiles(NamedTuple):
    """Heads, and tiles of each, that are cut at the start, in two pieces, and at the end, in `pieces`;
    elements of one piece's dK and dV. Where none is cut at the start, `last` is 1 and tiles of any head."""

    first: tuple[int, int]
    last: tuple[int, int]
    pieces: int
    elements: int

    def memory(self, device: torch.device) -> Cut:
        """New memory for a launch."""
        first, last = (heads * tiles for heads, tiles in (self.first, self.last))
        size = (FIRST_PIECES * first + self.pieces * last) * self.elements
        sums = torch.empty(size, dtype=torch.float32, device=device)
        counts = torch.zeros((first + last) * CUT_WARPS, dtype=torch.int32, device=device)
        ends = (self.first, self.last) if first else None
        return sums, counts, ends, last, self.pieces


def may_cut(call: AttentionCall, config: Sm90BackwardConfig) -> bool:
    """Says whether walks may be cut: all are equal, and each CTA has one tile of 128 keys."""
    variant = call.variant
    equal = not (call.packed or variant.left or variant.right or call.block is not None)
    return equal and config.gives_kv and config.cta_keys == 128 and not config.many_tiles


def best_pieces(tiles: int, steps: int, sms: int) -> int:
    """Pieces of each tile after the full rounds of `tiles`, of so many `steps`, with which they end first."""
    last = tiles % sms

    def cost(pieces: int) -> int:
        return -(-last * pieces // sms) * (-(-steps // pieces) + BESIDE)

    most = min(MOST_PIECES, MOST_ON_AN_SM * sms // max(1, last))
    best = min(range(1, most + 1), key=cost)
    rounds = -(-tiles // sms)
    return best if (cost(1) - cost(best)) * LEAST_GAIN >= rounds * (steps + BESIDE) else 1


def pieces_of_walk(steps: int) -> int:
    """Pieces of each of the last tiles, where the first ones are cut, too."""
    return min(5, max(3, steps // 20))


def cut_tiles(call: AttentionCall, config: Sm90BackwardConfig, sms: int) -> CutTiles | None:
    """The tiles of a call that are cut; None where none is."""
    if not may_cut(call, config):
        return None
    heads, tiles = call.batch * call.kv_heads, -(-call.k_len // config.tile_k)
    steps = -(-call.q_len // config.tile_q) * (call.heads // max(1, call.kv_heads))
    elements = config.tile_k * (config.dim + config.dim_v)
    if config.deterministic and config.tile_q == 64 and heads > 1 and heads * tiles >= ROUNDS * sms:
        bytes_of_head = steps * config.tile_q * 8 * config.dim
        each = min(HEADS_OF_AN_END, max(1, BYTES_OF_AN_END // bytes_of_head), heads // 2)
        ends = each, min(tiles, sms // 2 // each)
        return CutTiles(ends, ends, pieces_of_walk(steps), elements)
    pieces = best_pieces(heads * tiles, steps, sms)
    if pieces == 1:
        return None
    return CutTiles((0, 0), (1, heads * tiles % sms), pieces, elements)
