"""The families of kernels as rows of a table: what a family can do and needs, whichever operation it serves.

A new family is a row here, a configuration class that refers to it, and its kernels.
"""

from __future__ import annotations

from lowering.records import frozen


@frozen
class Family:
    """A family of kernels."""

    name: str
    needs: str
    """The compute capability, for messages."""
    uses_tma: bool
    """Matrices are loaded by TMA and multiplied by WGMMA: addresses and strides are multiples of 16 bytes,
    and tf32 is read along K only. Else by cp.async, of any alignment, and mma.sync."""
    is_persistent: bool
    """A CTA takes one tile after the other, so that launches say how many CTAs there may be."""
    launches_early: bool
    """A kernel may start before the one before it has ended (programmatic dependent launch)."""
    least_rows: int
    """Rows of a matrix instruction's M."""


FAMILIES = {
    "sm90": Family(
        "sm90", "9.0 (TMA and WGMMA)", uses_tma=True, is_persistent=True, launches_early=True, least_rows=64
    ),
    "sm80": Family(
        "sm80", "8.0 or later", uses_tma=False, is_persistent=False, launches_early=False, least_rows=16
    ),
}
