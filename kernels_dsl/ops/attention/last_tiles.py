"""The last tiles of keys of Hopper's attention backward, whose walks are cut so that all SMs end together.

Tiles of equal walks go to the SMs in rounds, and in the last round there may be few.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels_dsl.config.attention_backward import CUT_WARPS, Sm90BackwardConfig
from kernels_dsl.ops.attention.arguments import AttentionCall

MOST_PIECES = 16
MOST_ON_AN_SM = 4
"""Pieces of all tiles for each SM: they are memory, 66 MiB at most on an H200."""
BESIDE = 8
"""Steps that a piece costs beside its own, for its K, V, dK and dV: an estimate."""
LEAST_GAIN = 64
"""Pieces must save a 64th of all steps: a 96th was none as measured on an H200, a 50th was."""

Cut = tuple[torch.Tensor, torch.Tensor, int]
"""Arguments of the kernel: float32 sums, int32 counts, pieces."""


class LastTiles(NamedTuple):
    """Tiles whose walks are cut, pieces of each, and elements of one piece's dK and dV."""

    tiles: int
    pieces: int
    elements: int

    def memory(self, device: torch.device) -> Cut:
        """New memory for a launch."""
        sums = torch.empty(self.tiles * self.pieces * self.elements, dtype=torch.float32, device=device)
        return sums, torch.zeros(self.tiles * CUT_WARPS, dtype=torch.int32, device=device), self.pieces


def cuts_last(call: AttentionCall, config: Sm90BackwardConfig) -> bool:
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


def last_tiles(call: AttentionCall, config: Sm90BackwardConfig, sms: int) -> LastTiles | None:
    """The last tiles of a call; None where none is cut."""
    if not cuts_last(call, config):
        return None
    tiles = call.batch * call.kv_heads * -(-call.k_len // config.tile_k)
    steps = -(-call.q_len // config.tile_q) * (call.heads // max(1, call.kv_heads))
    pieces = best_pieces(tiles, steps, sms)
    if pieces == 1:
        return None
    return LastTiles(tiles % sms, pieces, config.tile_k * (config.dim + config.dim_v))
