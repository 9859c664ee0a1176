"""Options of the kernels that match lists of kept blocks in pairs."""

from __future__ import annotations

from kernels_dsl.config.bsr import PAIR_COLUMNS
from lowering.records import frozen

KEYS = 1024
"""Lists of a group, at most: an edge has ten bits for its place among equal ones."""
TILE = 32
"""Lists, on either side, of which a CTA counts what they share."""
TILE_WARPS = 4
_MOST = (2048, PAIR_COLUMNS)
_WARPS = (4, 32)


@frozen
class MatchRule:
    """The choice of lists that are pairs.

    `group`: neighbours in the order of their lengths, KEYS at most, among which pairs are looked for. A pair
    is worth `gain` times the blocks that both lists have, less `cost` times the difference of their lengths,
    and has to be worth 0.
    """

    group: int = KEYS
    gain: int = 2
    cost: int = 5


def most_columns(extent: int) -> int:
    """Blocks that shared memory is set aside for where a list may name `extent`, PAIR_COLUMNS at most."""
    return next(most for most in _MOST if extent <= most)


def match_warps(lists: int) -> int:
    """Warps of a CTA that looks for pairs among so many lists: each list has a thread."""
    return next((warps for warps in _WARPS if lists <= 8 * warps), _WARPS[-1])
