"""The SM90 attention backward as compiled, without a GPU: instructions, registers, no spills."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_backward import sm90_backward_config
from kernels_dsl.ops.attention.backward import FUNCTIONS


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


DENSE, CAUSAL = AttentionVariant(), AttentionVariant(right=True)
WINDOW = AttentionVariant(right=True, left=True)


@pytest.mark.parametrize(
    ("dims", "deterministic", "variant", "packed"),
    [
        ((128, 128), True, DENSE, False),
        ((128, 128), False, CAUSAL, True),
        ((128, 128), True, WINDOW, False),
        ((64, 64), True, CAUSAL, True),
        ((64, 64), False, WINDOW, False),
        ((128, 64), True, CAUSAL, False),
        ((256, 256), True, WINDOW, True),
        ((192, 128), False, CAUSAL, False),
        ((64, 256), True, DENSE, True),
    ],
)
def test_products_in_flight_and_no_spills(dims, deterministic, variant, packed):
    config = sm90_backward_config(*dims, deterministic)
    lead = (512,) if packed else (2, 256)
    tensors = (_meta(*lead, 4, dim) for dim in (*dims[:1] * 2, dims[1], dims[1], *dims))
    rows, tiles = 4 * 512 + 128, 4 * 10
    sums = (_meta(rows, dtype=torch.float32),) * 2 + (_meta(rows * config.dim, dtype=torch.float32),)
    turns = _meta(4 * tiles, dtype=torch.int32) if deterministic or config.sums_buffers else None
    seqlens = (_meta(3, dtype=torch.int32), _meta(3, dtype=torch.int32), None) if packed else None
    queue = (_meta(1, dtype=torch.int32) if config.takes_tiles else None, 132)
    kernel = FUNCTIONS["sm90"].compile(
        *tensors, *sums, turns, *(1.0, 0.0, 0, 0), seqlens, 256, *[None] * 4, *queue, arch="sm_90a",
        layout="thd" if packed else "bshd", config=config, variant=variant,
    )  # fmt: skip
    (found,) = kernel.resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0
    products = sum(n for name, n in found.instructions.items() if name.startswith("HGMMA"))
    assert products and any(name.startswith("UTMALDG") for name in found.instructions)
    # A compiler that cannot keep products in flight puts an arrive and a wait around each of them.
    assert found.instructions["WARPGROUP.ARRIVE"] < products / 2
