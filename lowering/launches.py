"""What is known of a compiled kernel's launches without the compiler."""

from __future__ import annotations

from lowering.records import frozen

# The name of the function in every exported object.
ENTRY = "kernel"


@frozen
class LaunchFacts:
    """What the host function's launch of one kernel holds as constants; None where it is computed."""

    entry: str
    block: tuple[int | None, ...]
    dynamic_smem: int | None
