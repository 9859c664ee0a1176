"""Functions of a rank in the tests of layers under FSDP2, whose kernels are formulas here."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from kernels_dsl.nn.scaled_linear import ScaledLinear
from tests.distributed import linear_ranks
from tests.distributed.bsr_ranks import layer, run_both_ways
from tests.distributed.ranks import Rank
from tests.distributed.sharded_ranks import use_formulas

ROUNDED_ONCE = 2.0**-7
"""Relative error of gradients that ranks round to bf16 before they are summed."""


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    scaled = ScaledLinear(64, 128, dtype=torch.bfloat16)
    return torch.nn.Sequential(scaled, layer(128, 128, "relu"), layer(64, 128))


def fully_sharded(rank: Rank) -> None:
    """Rows of a batch over the ranks, every parameter sharded: output and gradients of one process."""
    mesh = init_device_mesh("cpu", (rank.size,))
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        linear_ranks.use_formulas(monkeypatch)
        single, shared = _model(), _model()
        for module in (*shared, shared):
            fully_shard(module, mesh=mesh)
        x, gradient = torch.randn(8, 64).bfloat16().requires_grad_(), torch.randn(8, 64).bfloat16()
        expected, _ = run_both_ways(single, x, gradient)
        own = x.detach().chunk(rank.size)[rank.rank].clone().requires_grad_()
        found, traffic = run_both_ways(shared, own, gradient.chunk(rank.size)[rank.rank])
        # Scales of rows are those of one process.
        assert torch.equal(found, expected.chunk(rank.size)[rank.rank])
        assert torch.equal(own.grad, x.grad.chunk(rank.size)[rank.rank])
        assert traffic.forward == {"_allgather_base_": len(shared)}, traffic
        assert traffic.backward["_reduce_scatter_base_"] == len(shared), traffic
        assert set(traffic.backward) <= {"_allgather_base_", "_reduce_scatter_base_"}, traffic
        for (name, one), part in zip(single.named_parameters(), shared.parameters(), strict=True):
            assert isinstance(part.grad, DTensor) and part.grad.placements == (Shard(0),), name
            # FSDP averages. The weight of ScaledLinear is scaled by columns of a rank's own rows.
            most = linear_ranks.MOST["row"] if name == "0.weight" else ROUNDED_ONCE
            linear_ranks.close(part.grad.full_tensor() * rank.size, one.grad, most, name)
