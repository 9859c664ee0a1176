"""One protocol for all that hands out work tiles: a stride, groups of rows, a queue, a list of chunks.

A source is a frozen dataclass of trace-time facts and registers: a loop may call its methods, and carries its
positions, which are numbers or records of registers.
"""

from typing import Any, NamedTuple, Protocol

from cutlass import Boolean, Int32
from cutlass.pipeline import PipelineState


class KRange(NamedTuple):
    """K tiles from `first` on, up to `end`, which is not one of them."""

    first: Int32
    end: Int32


class TileSource(Protocol):
    """The work tiles of a CTA, one after the other. All lanes of a warp call its methods together."""

    looks_ahead: bool
    """Consumers call `next` before a tile's main loop and know by its end if there is another tile."""

    def first(self) -> Any:
        """The position of the first tile."""

    def size(self) -> Any:
        """The number of tiles in all, which `more` is given; None where nobody knows it."""

    def more(self, position: Any, size: Any) -> Boolean:
        """True where there is a tile at `position`."""

    def decode(self, position: Any) -> tuple[Any, Any]:
        """The tile at `position`, and the position with all that was learnt about the tiles after it."""

    def k_range(self, tile: Any) -> KRange:
        """K tiles of it that this CTA works on, each of them a stage of the ring."""

    def next(self, position: Any) -> Any:
        """The next position."""


class TurnSource(TileSource, Protocol):
    """A source for two warpgroups of a CTA that take turns with a tile each."""

    def leave_first(self, position: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """Leaves the first tile, at `position`, to the other warpgroup: the next position, and `state` past
        the tile's stages."""

    def leave_other(self, tile: Any, position: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """The same of the other warpgroup's tile after `tile`; `position` is what `next` returned."""
