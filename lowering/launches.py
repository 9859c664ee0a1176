"""Facts of a compiled kernel's launches, known without the compiler."""

from __future__ import annotations

from lowering.records import frozen

# The name of the function in every exported object.
ENTRY = "kernel"


@frozen
class LaunchFacts:
    """Constants of the host function's launch of one kernel; None where a value is computed."""

    entry: str
    block: tuple[int | None, ...]
    dynamic_smem: int | None
