"""The SM90 kernel of dQ by tiles of queries as compiled, without a GPU: instructions and no spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_dq import sm90_dq_config
from kernels_dsl.ops.attention.backward import DQ


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _compiled(config, variant, packed=False):
    lead = (512,) if packed else (2, 256)
    dims = (config.dim, config.dim, config.dim_v, config.dim_v, config.dim)
    tensors = (_meta(*lead, 4, dim) for dim in dims)
    rows = (_meta(4 * 512 + 128, dtype=torch.float32),) * 2
    whole = tuple(_meta(2, 4, 8, *last, dtype=torch.int32) for last in ((), (8,)))
    starts = _meta(3, dtype=torch.int32)
    return DQ.compile(
        *tensors, *rows, *(1.0, 0.0, 0, 0), (starts, starts, None) if packed else None, 256,
        (None, None, *whole) if variant.lists else None, None, None, arch="sm_90a",
        layout="thd" if packed else "bshd", config=config, variant=variant, row_tile=64,
    )  # fmt: skip


DENSE, CAUSAL = AttentionVariant(), AttentionVariant(right=True)
WINDOW, LISTS = AttentionVariant(right=True, left=True), AttentionVariant(lists=(1, 1))


@pytest.mark.parametrize(
    ("dims", "block", "variant", "packed"),
    [
        ((128, 128), (128, 128), LISTS, True),
        ((128, 128), (64, 64), LISTS, False),
        ((128, 128), (128, 128), AttentionVariant(softcap=True), False),
        ((256, 256), (128, 128), WINDOW, True),
        ((256, 256), (128, 128), CAUSAL, False),
        ((192, 128), (128, 128), DENSE, False),
    ],
)
def test_products_in_flight_and_no_spills(dims, block, variant, packed):
    config = sm90_dq_config(*dims, block, variant.by_elements)
    (found,) = _compiled(config, variant, packed).resources()
    assert found.stack_bytes == found.spill_loads == found.spill_stores == 0
    products = sum(n for name, n in found.instructions.items() if name.startswith("HGMMA"))
    assert products and any(name.startswith("UTMALDG") for name in found.instructions)
    # A compiler that cannot keep products in flight puts an arrive and a wait around each of them.
    assert found.instructions["WARPGROUP.ARRIVE"] < products / 2


def test_one_stage_of_keys_would_wait_for_itself():
    config = replace(sm90_dq_config(128, 128), k_stages=1)
    with pytest.raises(Exception, match="k_stages must be 2 or more"):
        _compiled(config, DENSE)
