"""Records that the roles of the SM90 forward kernel share: shared memory, rings, operands."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, pipeline

from kernels_dsl.blocks.attention.tile_queue import TileQueue
from kernels_dsl.blocks.hw.tma import TmaCopy


class Loads(NamedTuple):
    """TMA loads of the operands."""

    q: TmaCopy
    """Coordinates (Sq, D, H, B)."""
    k: TmaCopy
    """Coordinates (Sk, D, Hk, B)."""
    v: TmaCopy
    """Coordinates (Dv, Sk, Hk, B), or (Sk, Dv, Hk, B) where the kernel transposes V."""


class Output(NamedTuple):
    """O (Sq, Dv, (H, B)), and its TMA store where it has one."""

    atom: cute.CopyAtom | None
    coordinates: cute.Tensor
    """Those of the TMA store, or O itself."""
    tensor: cute.Tensor


class Mmas(NamedTuple):
    """WGMMA of one warpgroup."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    out: cute.TiledMma
    """As an output subtile is spread over threads."""


class SegmentLayouts(NamedTuple):
    """Shared-memory layouts of segments of V whose transpose is deferred."""

    raw: cute.ComposedLayout
    """(keys, Dv, warps)."""
    transposed: cute.ComposedLayout
    """(Dv, keys, warps)."""


class Layouts(NamedTuple):
    """Shared-memory layouts of the tensors of `SharedTiles`; `o` is that of one warpgroup."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    o: cute.ComposedLayout
    raw_v: cute.ComposedLayout | None
    segments: SegmentLayouts | None


class Segments(NamedTuple):
    """Buffers in shared memory for V whose transpose is deferred, one a warp."""

    raw: cute.Tensor
    """(keys, Dv, warps)."""
    transposed: cute.Tensor
    """(Dv, keys, warps)."""


class SharedTiles(NamedTuple):
    """Tensors in shared memory."""

    q: cute.Tensor
    """(M, D, stages)."""
    k: cute.Tensor
    """(N, D, stages)."""
    v: cute.Tensor
    """(Dv, N, stages)."""
    o: cute.Tensor
    """(64, epi_n, stages, consumers): staging of each consumer warpgroup's output."""
    raw_v: cute.Tensor | None
    """(N, Dv, stages): V before the kernel transposes it."""
    segments: Segments | None


class Rings(NamedTuple):
    """Rings of the tensors of `SharedTiles`, each None where its tensor is."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    raw_v: pipeline.PipelineTmaAsync | None
    segments: pipeline.PipelineTmaAsync | None
    """A stage a warp, which is both sides of it."""

    @property
    def loaded_v(self) -> pipeline.PipelineTmaAsync:
        """The ring of V that TMA fills."""
        return self.v if self.raw_v is None else self.raw_v


class Shared(NamedTuple):
    """All that the roles of a CTA share."""

    rings: Rings
    tiles: SharedTiles
    queue: TileQueue | None
    """None: a static schedule."""


class KvState(NamedTuple):
    """A role's positions in the rings of Q, K and V, and what a consumer's step leaves to the next one."""

    q: pipeline.PipelineState
    k: pipeline.PipelineState
    v: pipeline.PipelineState
    rescale: Boolean | None = None
    """The output is still to be multiplied by `Fragments.correction`."""
    k_full: Boolean | None = None
    """The next stage of K is known to be full."""
    v_full: Boolean | None = None
    """The same for V."""
