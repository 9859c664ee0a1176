"""The Hopper GEMM with fp8 operands as compiled, without a GPU: instructions, registers, spills."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.blocks.epilogue_fns import LinearEpilogue, ScaledEpilogue
from kernels_dsl.config.gemm import EntryLayout, Schedule, Sm90GemmConfig
from kernels_dsl.ops.gemm_kernels import FUNCTIONS

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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
@pytest.mark.parametrize(("dtypes", "rows"), [((E4M3, E4M3), False), ((E5M2, E4M3), True)], ids=str)
def test_instructions_and_spills(config, dtypes, rows) -> None:
    a, b, d = _meta(N, N, dtype=dtypes[0]), _meta(N, N, dtype=dtypes[1]).mT, _meta(N, N, dtype=torch.bfloat16)
    scales = (_meta(N, 1), _meta(1, N)) if rows else (_meta(1), _meta(1))
    layout = EntryLayout((*(("m1", "1n") if rows else ("1", "1")), "n"))
    args = (a, b, d, (*scales, _meta(N, dtype=torch.bfloat16)), 132)
    epilogue = ScaledEpilogue(LinearEpilogue(bias=True))
    compiled = FUNCTIONS["sm90"].compile(
        *args, arch="sm_90a", config=config, epilogue=epilogue, layout=layout
    )
    (entry,) = compiled.resources()
    assert entry.stack_bytes == entry.spill_loads == entry.spill_stores == 0, entry
    waves = config.tile_m // 64 // (1 if config.schedule is Schedule.PINGPONG or config.tile_m == 64 else 2)
    assert entry.count("QGMMA") == 2 * 4 * waves  # two K tiles in the code, of 128 in steps of 32
    assert entry.count("UTMALDG") == 2 and entry.count("UTMASTG") and not entry.count("HGMMA")
