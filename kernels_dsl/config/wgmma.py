"""Limits of warpgroup matrix instructions, of any SM90 kernel."""

from __future__ import annotations

WARPGROUP_THREADS = 128
WGMMA_ROWS = 64
SM90_RESERVED_SMEM = 1024  # mbarriers and scales, in multiples of this: the tiles' alignment behind them
SM_REGISTERS = 65536
# Registers that ptxas wants for a WGMMA beside its accumulators: with fewer it gives up.
WGMMA_REGISTERS = 26


def shared_memory(bytes_alone: int, ctas: int) -> int:
    """Bytes of shared memory of each of `ctas` CTAs of an SM, of which one alone may have `bytes_alone`.

    The SM keeps as much as is reserved for the tiles' alignment for each of them.
    """
    return (bytes_alone + SM90_RESERVED_SMEM) // ctas - SM90_RESERVED_SMEM


def most_wgmma_columns(consumers: int, ctas: int = 1) -> int:
    """The largest N of a WGMMA in a CTA of so many consumer warpgroups and a producer; `ctas`: of an SM.

    ptxas compiles for the registers that every thread starts with, whatever setmaxnreg adds for some.
    """
    registers = SM_REGISTERS // ((consumers + 1) * WARPGROUP_THREADS * ctas) // 8 * 8
    return min(256, 2 * (registers - WGMMA_REGISTERS) // 16 * 16)


def why_not_wgmma_columns(columns: int, consumers: int, ctas: int = 1) -> str | None:
    """Says why ptxas would not compile WGMMAs of N = `columns`; None if it does."""
    most = most_wgmma_columns(consumers, ctas)
    if columns <= most:
        return None
    return (
        f"WGMMAs of N = {columns}, at most {most} have enough registers with {consumers} consumer warpgroups"
    )
