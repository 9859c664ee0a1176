"""Shared memory of the sums that CTAs of a cluster send each other: plain arithmetic on the host."""

from __future__ import annotations

from kernels_dsl.config.wgmma import WARPGROUP_THREADS
from lowering.records import frozen

MOST_BESIDE = 32
"""Elements of a thread that have memory beside the ring."""


@frozen
class SumShape:
    """Sums of `elements` float32 a thread of each of `warpgroups` warpgroups, in each of `ctas` CTAs."""

    elements: int
    ctas: int
    warpgroups: int

    @property
    def meeting(self) -> int:
        """Warpgroups whose sums meet in one CTA."""
        return -(-self.warpgroups // self.ctas)

    @property
    def in_ring(self) -> bool:
        """They take the ring's memory when a tile's stages have been multiplied, as it would else be shallow.

        The next tile's stages come after them."""
        return self.elements > MOST_BESIDE

    @property
    def bytes(self) -> int:
        """Of the sums that meet in a CTA."""
        return self.meeting * (self.ctas - 1) * self.elements * WARPGROUP_THREADS * 4

    @property
    def words(self) -> int:
        """8-byte words beside the ring, an even number: mbarriers, and sums that are not in the ring."""
        if self.in_ring:
            return (self.warpgroups + self.ctas + 2) // 2 * 2
        return 2 * self.warpgroups + self.bytes // 8
