"""TMA loads of operand tiles: one descriptor an operand, one closure a work tile.

A TMA load is issued by one thread, moves a whole tile from global to swizzled shared memory, fills
what lies outside of the tensor with zeros, and signals an mbarrier with the bytes that it wrote.
With multicast, each CTA of a cluster loads one slice of the tile into the shared memory of all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

EVICT_FIRST = 0x12F0000000000000
"""Cache policy of loads whose lines L2 gives up before others."""


class TmaCopy(NamedTuple):
    """Loads from a tensor, or stores to it: the descriptor, and the coordinates of the tensor's elements."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class Partition(NamedTuple):
    """One CTA's part of tiles that several share: in shared memory (TMA, stages), in global (TMA, rest…)."""

    shared: cute.Tensor
    tiles: cute.Tensor


def make_load_atom(
    tensor: cute.Tensor,
    smem_layout: cute.Layout | cute.ComposedLayout,
    tile: tuple[int, ...],
    multicast: int = 1,
    whole: bool = False,
) -> TmaCopy:
    """Loads of `tile` from the first modes of `tensor`, such as (MN, K) of (MN, K, L).

    `smem_layout` is staged, (MN, K, stages); `multicast` is the number of CTAs that share the tile. `whole`:
    a multicast of all of it by one CTA.
    """
    alone = multicast == 1 and not whole
    op = cpasync.CopyBulkTensorTileG2SOp() if alone else cpasync.CopyBulkTensorTileG2SMulticastOp()
    one_stage = first_stage(smem_layout)
    # fp32 goes to the tensor cores as tf32. With this type TMA rounds on its way, to nearest even as an H200
    # shows; with its own, WGMMA would drop the low 13 bits: nearly three times the error.
    internal = cutlass.TFloat32 if tensor.element_type is cutlass.Float32 else None
    return TmaCopy(
        *cpasync.make_tiled_tma_atom(
            op, tensor, one_stage, tile, num_multicast=multicast, internal_type=internal
        )
    )


def first_stage(layout: cute.Layout | cute.ComposedLayout) -> cute.Layout | cute.ComposedLayout:
    """The layout of a stage, of one of (..., stages).

    A slice of it with its swizzle would end the compiler's process where tiles have an odd number of 8 rows.
    """
    modes = (None,) * (cute.rank(layout) - 1)
    if not isinstance(layout, cute.ComposedLayout):
        return cute.slice_(layout, (*modes, 0))
    return cute.make_composed_layout(layout.inner, layout.offset, cute.slice_(layout.outer, (*modes, 0)))


def make_store_atom(
    tensor: cute.Tensor, smem_layout: cute.Layout | cute.ComposedLayout, tile: tuple[int, int]
) -> TmaCopy:
    """Stores of `tile` to `tensor` (M, N, L), which write nothing outside of it."""
    one_stage = first_stage(smem_layout)
    return TmaCopy(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, one_stage, tile))


def load_partition(
    atom: cute.CopyAtom,
    g_tiles: cute.Tensor,
    s_tiles: cute.Tensor,
    peers: cute.Layout,
    peer: cutlass.Int32,
    modes: int = 2,
) -> Partition:
    """Splits tiles (tile, tile, rest…) of so many `modes` among the `peers` CTAs that multicast them to each
    other.

    Returns the part of this CTA, number `peer`.
    """
    return Partition(
        *cpasync.tma_partition(
            atom, peer, peers, cute.group_modes(s_tiles, 0, modes), cute.group_modes(g_tiles, 0, modes)
        )
    )


def multicast_masks(
    cluster: tuple[int, int],
    rank: tuple[cutlass.Int32, cutlass.Int32],
    first: cutlass.Int32 | None = None,
) -> tuple[cutlass.Int16 | None, cutlass.Int16 | None]:
    """(mask of A, mask of B): the CTAs of the (M, N) `cluster` that a load of CTA `rank` is for.

    CTAs of one cluster row share A's tile, those of one column B's. None where nobody shares. `first`: the
    number of its first CTA where several clusters are launched as one.
    """
    ranks = cute.make_layout(cluster)

    def mask(mode: int) -> cutlass.Int16 | None:
        if cluster[mode] == 1:
            return None
        found = cute.make_layout_image_mask(ranks, rank, mode=mode)
        return found if first is None else cutlass.Int16(cutlass.Int32(found) << first)

    return mask(1), mask(0)


def cache_policy(evict_first: bool) -> dict[str, Any]:
    """Keywords of a copy whose lines leave L2 first, if so."""
    return {"cache_policy": cutlass.Int64(EVICT_FIRST)} if evict_first else {}


def tile_loader(
    atom: cute.CopyAtom,
    t_g: cute.Tensor,
    t_s: cute.Tensor,
    mask: cutlass.Int16 | None,
    evict_first: bool = False,
) -> Callable[[cutlass.Int32, cutlass.Int32, cute.Pointer], None]:
    """`load(k_tile, stage, barrier)`: issues the copy of global tile `k_tile` into `stage`.

    `t_g` (TMA, restK) and `t_s` (TMA, stages) are partitions; `mask` names the CTAs of a multicast.
    `evict_first`: nobody else reads the tiles.
    """
    extra = cache_policy(evict_first) | ({} if mask is None else {"mcast_mask": mask})

    def load(k_tile: cutlass.Int32, stage: cutlass.Int32, barrier: cute.Pointer) -> None:
        cute.copy(atom, t_g[None, k_tile], t_s[None, stage], tma_bar_ptr=barrier, **extra)

    return load


def both(
    load_a: Callable[[cutlass.Int32, cutlass.Int32, cute.Pointer], None],
    load_b: Callable[[cutlass.Int32, cutlass.Int32, cute.Pointer], None],
) -> Callable[[cutlass.Int32, cutlass.Int32, cute.Pointer], None]:
    """`load(k_tile, stage, barrier)` of two operands, each by a `tile_loader`."""

    def load(k_tile: cutlass.Int32, stage: cutlass.Int32, barrier: cute.Pointer) -> None:
        load_a(k_tile, stage, barrier)
        load_b(k_tile, stage, barrier)

    return load
