"""The SM90 attention backward as compiled, without a GPU: instructions, registers, no spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_backward import sm90_backward_config
from kernels_dsl.ops.attention.backward import FUNCTIONS


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


DENSE, CAUSAL = AttentionVariant(), AttentionVariant(right=True)
WINDOW = AttentionVariant(right=True, left=True)
CUT_ENDS = ((8, 8), (8, 8))
"""Heads, and tiles of each, that are cut first and last."""


@pytest.mark.parametrize(
    ("dims", "deterministic", "variant", "packed", "many_tiles"),
    [
        ((128, 128), True, DENSE, False, True),
        ((128, 128), True, DENSE, False, False),
        ((128, 128), False, DENSE, True, False),
        ((128, 128), False, CAUSAL, True, True),
        ((128, 128), True, WINDOW, False, False),
        ((64, 64), True, CAUSAL, True, True),
        ((64, 64), True, DENSE, False, False),
        ((64, 64), False, WINDOW, False, False),
        ((128, 64), True, CAUSAL, False, False),
        ((256, 256), True, WINDOW, True, False),
        ((192, 128), False, CAUSAL, False, False),
        ((64, 256), True, DENSE, True, False),
    ],
)
def test_products_in_flight_and_no_spills(dims, deterministic, variant, packed, many_tiles):
    kept = {} if many_tiles or dims != (128, 128) else {"short_probs": True, "v_registers": 64}
    config = replace(sm90_backward_config(*dims, deterministic), many_tiles=many_tiles, **kept)
    if kept and not deterministic:
        config = replace(config, sums_buffers=0)
    elif dims == (64, 64) and deterministic and not many_tiles:
        config = replace(config, sums_buffers=2)
    lead = (512,) if packed else (2, 256)
    tensors = (_meta(*lead, 4, dim) for dim in (*dims[:1] * 2, dims[1], dims[1], *dims))
    rows, tiles = 4 * 512 + 128, 4 * 10
    sums = (_meta(rows, dtype=torch.float32),) * 2 + (_meta(rows * config.dim, dtype=torch.float32),)
    turns = _meta(4 * tiles, dtype=torch.int32) if deterministic or config.sums_buffers else None
    seqlens = (_meta(3, dtype=torch.int32), _meta(3, dtype=torch.int32), None) if packed else None
    cut = None
    if variant == DENSE and not (packed or many_tiles):
        ends = CUT_ENDS if deterministic and config.tile_q == 64 else None
        cut = (_meta(1024, dtype=torch.float32), _meta(64, dtype=torch.int32), ends, 8, 5)
    queue = (_meta(1, dtype=torch.int32) if many_tiles else None, 132, cut)
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
    if config.cta_keys == 128 and config.tile_q == 64 and not many_tiles:
        assert exponentials_before_arrival(kernel.sass()) >= config.tile_q // 2


def exponentials_before_arrival(code: str) -> int:
    """Exponentials between the first product and the barrier with which the second warpgroup starts: those of
    a thread's scores, so that the two stay half a step apart."""
    _, rest = code.split("HGMMA", 1)
    return rest.split("BAR.ARV", 1)[0].count("MUFU.EX2")
