"""Tiles in shared memory for cp.async and ldmatrix: every element has a place, and no access conflicts."""

from __future__ import annotations

from itertools import product

import cutlass
import pytest

from kernels_dsl.blocks.hw.cp_async import (
    TileLoadPlan,
    contiguous_mode,
    staged_tile_layout,
    swizzle_of,
    vector_alignment,
)
from tests.blocks.tracing import fake, trace

BF16, F32 = cutlass.BFloat16, cutlass.Float32
TILES = [
    (dtype, tile, k_major)
    for dtype in (BF16, F32)
    for tile in ((64, 32), (16, 64), (32, 16))
    for k_major in (True, False)
    if tile[1 if k_major else 0] * dtype.width >= 256
]


def _addresses(dtype, tile, k_major, stages=2) -> dict[tuple[int, int, int], int]:
    """Swizzled byte address of every (mn, k, stage)."""

    def traced():
        layout = staged_tile_layout(dtype, tile, stages, k_major)
        return {c: layout(c) for c in product(range(tile[0]), range(tile[1]), range(stages))}

    offsets = trace(lambda _: traced(), fake((None, 1)))
    bits, base, shift = swizzle_of(dtype, tile, k_major)
    mask = ((1 << bits) - 1) << base
    width = dtype.width // 8
    return {c: (o * width) ^ ((o * width >> shift) & mask) for c, o in offsets.items()}


@pytest.mark.parametrize(("dtype", "tile", "k_major"), TILES)
def test_every_element_has_its_own_place(dtype, tile, k_major) -> None:
    addresses = sorted(_addresses(dtype, tile, k_major).values())
    assert addresses == [i * dtype.width // 8 for i in range(tile[0] * tile[1] * 2)]


@pytest.mark.parametrize(("dtype", "tile", "k_major"), TILES)
def test_vectors_of_16_bytes_stay_together(dtype, tile, k_major) -> None:
    """cp.async writes them as one."""
    addresses = _addresses(dtype, tile, k_major)
    per = 128 // dtype.width
    for (mn, k, stage), address in addresses.items():
        lead = k if k_major else mn
        first = (mn, k - k % per, stage) if k_major else (mn - mn % per, k, stage)
        assert address == addresses[first] + lead % per * dtype.width // 8


@pytest.mark.parametrize(("dtype", "tile", "k_major"), TILES)
def test_fragment_loads_have_no_bank_conflicts(dtype, tile, k_major) -> None:
    """ldmatrix: eight rows of 16 bytes. tf32 with MN contiguous: eight elements along MN of four rows."""
    addresses = _addresses(dtype, tile, k_major)
    if dtype is F32 and not k_major:
        for mn, k in product(range(0, tile[0], 8), range(0, tile[1], 4)):
            banks = {addresses[mn + i, k + j, 0] // 4 % 32 for i, j in product(range(8), range(4))}
            assert len(banks) == 32
        return
    per = 128 // dtype.width
    rows, columns = tile if k_major else tile[::-1]
    for row, column in product(range(0, rows, 8), range(0, columns, per)):
        coords = [(row + i, column) if k_major else (column, row + i) for i in range(8)]
        assert len({addresses[(*c, 1)] // 16 % 8 for c in coords}) == 8


@pytest.mark.parametrize("copy_bytes", [2, 4, 8, 16])
@pytest.mark.parametrize("k_major", [True, False])
def test_threads_cover_a_tile_once(copy_bytes: int, k_major: bool) -> None:
    plan = TileLoadPlan((64, 32), 128, 2, copy_bytes, k_major)

    def traced(_):
        copy = plan.tiled_copy(BF16)
        import cutlass.cute as cute

        cX = cute.make_identity_tensor(plan.tile)
        found = []
        for thread in range(plan.threads):
            part = copy.get_slice(thread).partition_S(cX)
            found += [part[i] for i in range(cute.size(part))]
        return found

    found = trace(traced, fake((None, 1)))
    assert sorted(found) == list(product(range(64), range(32)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((64, 32), 128, 2, 3, True), "copy_bytes is 3"),
        (((64, 32), 128, 4, 2, True), "copy_bytes is 2"),
        (((8, 8), 128, 2, 16, True), "multiple of the 128 threads"),
        (((24, 64), 128, 2, 16, True), "multiple of the 128 threads|do not tile"),
    ],
)
def test_plans_that_cannot_be_are_named(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TileLoadPlan(*arguments)


@pytest.mark.parametrize(
    ("tensor", "mode", "aligned"),
    [
        (fake((None, 1, None)), 1, 16),
        (fake((1, None, None), align=8), 0, 8),
        (fake((None, 1, 0), align=4), 1, 4),
        (fake((None, None, 1)), None, 2),  # contiguous along the batch only: single elements
        (fake((None, 1, None), dtype=F32, align=4), 1, 4),
    ],
)
def test_contiguous_mode_and_alignment(tensor, mode: int | None, aligned: int) -> None:
    assert trace(lambda mX: (contiguous_mode(mX), vector_alignment(mX)), tensor) == (mode, aligned)
