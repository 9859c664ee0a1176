"""The Hopper GEMM with fp8 operands as compiled, without a GPU: instructions, registers, spills."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue, ScaledEpilogue
from kernels_dsl.blocks.mainloop.scale_ring import BULK_LEAST
from kernels_dsl.config.budget import promoted_columns, two_partial_sets, why_not
from kernels_dsl.config.gemm import MAXIMUM, EntryLayout, Schedule, Sm90GemmConfig
from kernels_dsl.config.problem import H200, GemmProblem
from kernels_dsl.config.promotion import Promotion
from kernels_dsl.ops.gemm.kernels import FUNCTIONS

N = 1024
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONFIGS = [
    Sm90GemmConfig(128, 256, cluster_m=2),
    Sm90GemmConfig(256, 128, cluster_m=2),
    Sm90GemmConfig(128, 192, cluster_m=2, schedule=Schedule.PINGPONG),
    Sm90GemmConfig(64, 16),
]


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _compiled(config, dtypes, scales, modes, promotion=None):
    """Resources and SASS-level facts of a kernel with a bias; `scales` of a and b, in the epilogue or not."""
    a, b, d = _meta(N, N, dtype=dtypes[0]), _meta(N, N, dtype=dtypes[1]).mT, _meta(N, N, dtype=torch.bfloat16)
    args = (a, b, d, (*scales, _meta(N, dtype=torch.bfloat16)), 132)
    inner = LinearEpilogue(bias=True)
    compiled = FUNCTIONS["sm90"].compile(
        *args, arch="sm_90a", config=config, epilogue=ScaledEpilogue(inner) if modes else inner,
        layout=EntryLayout((*modes, "n"), False, promotion),
    )  # fmt: skip
    (entry,) = compiled.resources()
    assert entry.stack_bytes == entry.spill_loads == entry.spill_stores == 0, entry
    assert entry.count("UTMALDG") == 2 and entry.count("UTMASTG") and not entry.count("HGMMA")
    # Addresses and descriptors are computed in uniform registers: else each of them is moved there.
    assert entry.count("R2UR") < 40
    # Whoever asks for a barrier without a loop around must not be kept: its phase may never complete.
    asked = [line for line in compiled.ptx().splitlines() if "mbarrier.try_wait" in line]
    assert asked and all(line.rstrip().endswith(", 10000000;") for line in asked)
    return entry


def _waves(config) -> int:
    return config.tile_m // 64 // (1 if config.schedule is Schedule.PINGPONG or config.tile_m == 64 else 2)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
def test_instructions_and_spills(config) -> None:
    rows = config.cluster_m == 2
    scales = (_meta(N, 1), _meta(1, N)) if rows else (_meta(1), _meta(1))
    dtypes = (E5M2, E4M3) if rows else (E4M3, E4M3)
    entry = _compiled(config, dtypes, scales, ("m1", "1n") if rows else ("1", "1"))
    assert entry.count("QGMMA") == 2 * 4 * _waves(config)  # two K tiles in the code, of 128 in steps of 32
    # Vectors are loaded once a tile, and lanes keep shares of those along columns.
    assert entry.count("LDG") <= 2 * _waves(config) + 2 * 2 * -(-config.tile_n // 64)
    assert entry.count("SHFL")


def test_the_largest_magnitude_costs_no_spill() -> None:
    """In the tile with the most accumulators: one reduction of a warp and one atomic for all of it."""
    a, b, d = _meta(N, N, dtype=E4M3), _meta(N, N, dtype=E4M3).mT, _meta(N, N, dtype=torch.bfloat16)
    compiled = FUNCTIONS["sm90"].compile(
        a, b, d, (_meta(N, 1), _meta(1, N), 1 << 40), 132, arch="sm_90a", config=CONFIGS[2],
        epilogue=ScaledEpilogue(LinearEpilogue(), amax=True), layout=EntryLayout(("m1", "1n", MAXIMUM)),
    )  # fmt: skip
    (entry,) = compiled.resources()
    assert entry.stack_bytes == entry.spill_loads == entry.spill_stores == 0, entry
    assert entry.count("REDUX") <= 2 and entry.count("REDG") == 1


@pytest.mark.parametrize(
    ("config", "rows_b"), [(CONFIGS[2], None), (CONFIGS[1], 128)], ids=["rows", "blocks"]
)
def test_groups_of_rows_cost_no_spill(config, rows_b) -> None:
    """Tiles by TMA, and by the threads where a group ends; one loop over tiles all the same."""
    groups, offs = 8, _meta(8, dtype=torch.int32)
    a, b, d = _meta(N, N, dtype=E4M3), _meta(groups, N, N, dtype=E4M3).mT, _meta(N, N, dtype=torch.bfloat16)
    epilogue, scales, modes = LinearEpilogue(), (_meta(8, N).mT, _meta(groups, 8, 8)), ()
    if rows_b is None:
        epilogue, scales, modes = ScaledEpilogue(epilogue), (_meta(N), _meta(groups, N)), ("m", "ln")
    promotion = None if rows_b is None else Promotion(1, rows_b)
    compiled = FUNCTIONS["sm90"].compile(
        a, b, d, (offs, *scales), 132, arch="sm_90a", config=config, epilogue=epilogue,
        layout=EntryLayout(modes, False, promotion, grouped=True),
    )  # fmt: skip
    (entry,) = compiled.resources()
    assert entry.stack_bytes == entry.spill_loads == entry.spill_stores == 0, entry
    assert entry.count("UTMALDG") == 2 and entry.count("UTMASTG") and entry.count("STG")


PROMOTED = [
    (Sm90GemmConfig(128, 256, cluster_n=2), Promotion()),
    (Sm90GemmConfig(192, 128), Promotion()),
    (Sm90GemmConfig(128, 256, cluster_n=2), Promotion(1, 128)),
    (Sm90GemmConfig(256, 128, cluster_m=2), Promotion(1, 128)),
    (Sm90GemmConfig(192, 128), Promotion(1, 128)),
    (Sm90GemmConfig(128, 128), Promotion(1, 1)),
    (Sm90GemmConfig(64, 32), Promotion(128, 1)),
    (Sm90GemmConfig(128, 128, cluster_m=2), Promotion(1, 128)),
]
DEEP = (Sm90GemmConfig(64, 32), Sm90GemmConfig(128, 128, cluster_m=2))
"""Of these, the tiles of one chunk whose registers hold two sets of partial sums."""


@pytest.mark.parametrize(("config", "promotion"), PROMOTED, ids=range(len(PROMOTED)))
def test_two_sets_of_accumulators_fit(config, promotion) -> None:
    problem = GemmProblem(N, N, N, ab_type="fp8", b_k_major=True, promotion=promotion)
    assert why_not(config, problem, H200) is None
    if promotion.scaled:
        of_a, of_b = (
            _meta(8, 8) if rows > 1 else _meta(8, N) for rows in (promotion.rows_a, promotion.rows_b)
        )
        entry = _compiled(config, (E4M3, E4M3), (of_a.mT, of_b), (), promotion)
    else:
        entry = _compiled(config, (E4M3, E5M2), (_meta(N, 1), _meta(1, N)), ("m1", "1n"), promotion)
    chunks = config.tile_n // promoted_columns(config, promotion)
    waves = 1 if config.tile_m == 192 else _waves(config)
    deep = two_partial_sets(config, promotion)
    assert deep == (config in DEEP)
    # Two sets in turn: one is begun before the loop, two in it, one behind it, and then the next tile's first
    # stage; each wait is written once.
    assert entry.count("QGMMA") == 4 * waves * chunks * (5 if deep else 1)
    # One wait a chunk: ptxas has not put the matrix instructions one after the other.
    assert entry.count("WARPGROUP.DEPBAR") == waves * chunks * (6 if deep else 1)
    # Scales come to shared memory by one warp's copies; the warpgroups load nothing from global memory.
    assert bool(entry.count("LDGSTS")) == promotion.scaled
    # Those of many rows in one bulk copy, if they are neighbours; a tile's first one is written by itself.
    many = (promotion.rows_a, config.tile_m), (promotion.rows_b, config.tile_n)
    assert entry.count("UBLKCP") == 2 * sum(rows == 1 and extent >= BULK_LEAST for rows, extent in many)


def test_tiles_without_room_for_two_sets_are_refused() -> None:
    for tile, rows_b in (((256, 192), 0), ((256, 128), 1)):
        promotion = Promotion(1 if rows_b else 0, rows_b)
        problem = GemmProblem(N, N, N, ab_type="fp8", b_k_major=True, promotion=promotion)
        reason = why_not(Sm90GemmConfig(*tile), problem, H200)
        assert reason is not None and "leave too few for partial sums" in reason
