"""Shared memory of the sums that CTAs of a cluster send each other: plain arithmetic on the host."""

from __future__ import annotations

from kernels_dsl.config.wgmma import WARPGROUP_THREADS
from lowering.records import frozen

MOST_ELEMENTS = 32
"""That a thread sends at once; of WGMMA's N, a multiple of 16, it has a number that 8 divides."""


@frozen
class SumShape:
    """Sums of `elements` float32 a thread of each of `warpgroups` warpgroups, in each of `ctas` CTAs.

    Many are sent in two parts, one after the other through the same memory.
    """

    elements: int
    ctas: int
    warpgroups: int

    @property
    def meeting(self) -> int:
        """Warpgroups whose sums meet in one CTA."""
        return -(-self.warpgroups // self.ctas)

    @property
    def parts(self) -> int:
        """Parts that the sums are sent in."""
        return 2 if self.elements > MOST_ELEMENTS else 1

    @property
    def words(self) -> int:
        """8-byte words of two mbarriers a warpgroup and the sums of the other CTAs; an even number."""
        sums = self.elements // self.parts * WARPGROUP_THREADS // 2
        return 2 * self.warpgroups + self.meeting * (self.ctas - 1) * sums
