"""Lists of kept blocks in pairs that share columns, for kernels whose CTAs load those once for two rows.

Four kernels on the lists' device, without a wait for it, and the same vector in every run:
`kernels_dsl.kernels.lists.pairs` says how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import lowering
from kernels_dsl.config.bsr import PAIR_COLUMNS, PAIR_ROWS, MatchRule, match_warps, most_columns
from kernels_dsl.ops.bsr.lists import HEADER, HEAVY_LENGTH

if TYPE_CHECKING:
    from kernels_dsl.ops.bsr.pattern import Lists

RULE = MatchRule()
"""A step that a pair shares saves 0.4 of a step that only one of the two has."""
_FILE = "kernels_dsl.kernels.lists.pairs"
FUNCTIONS = {
    name: lowering.jit(f"{_FILE}:{name}", name=name)
    for name in ("pair_weights", "pair_match", "pair_lines", "pair_steps")
}


def check_pairs(count: int, extent: int) -> None:
    """ValueError for more lists than can be paired, or more blocks than they may name."""
    if count > PAIR_ROWS:
        raise ValueError(f"there are {count} lists to pair, must be at most {PAIR_ROWS}")
    if extent > PAIR_COLUMNS:
        raise ValueError(f"lists to pair may name {extent} blocks, must be at most {PAIR_COLUMNS}")


def pack_pairs(lists: Lists) -> torch.Tensor:
    """As `lists.pack`, for kernels whose clusters take a pair of lists, or one list twice.

    `kernels_dsl.blocks.schedule.block_lists.BlockLists` says what is in it. Which lists are a pair is
    a greedy matching by `RULE`. Steps are in the order in which the longer list of a pair is stored.

    ValueError where there are more lists than PAIR_ROWS, or more blocks to name than PAIR_COLUMNS.
    """
    count, device, extent = lists.table.shape[0], lists.kept.device, lists.extent
    check_pairs(count, extent)
    members = min(count, RULE.group)
    warps, most = match_warps(members), most_columns(extent)
    shape = (-(-count // RULE.group), members, -(-members // 8) * 8)
    weights = torch.empty(shape, dtype=torch.int16, device=device)
    mates = torch.empty(count, dtype=torch.int32, device=device)
    words = HEADER + 4 * count + 4 * lists.kept.shape[0]
    packed = torch.empty(words, dtype=torch.int32, device=device)
    FUNCTIONS["pair_weights"](lists.table, lists.across, weights, extent, rule=RULE, most=most)
    FUNCTIONS["pair_match"](lists.table, weights, mates, rule=RULE, warps=warps)
    FUNCTIONS["pair_lines"](lists.table, mates, packed, warps=warps, heavy=HEAVY_LENGTH)
    FUNCTIONS["pair_steps"](lists.table, mates, lists.across, lists.kept, packed, extent, most=most)
    return packed
