"""Functions of a rank in the tests of layers under FSDP2, whose kernels are formulas here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kernels_dsl.distributed import BsrColwiseParallel, BsrRowwiseParallel
from kernels_dsl.nn.scaled_linear import ScaledLinear
from tests.distributed import linear_ranks
from tests.distributed.bsr_ranks import layer, part_of, run_both_ways, whole_numbers
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


def _wide_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "recipe": "tensor"}
    scaled = ScaledLinear(64, 128, **options), ScaledLinear(128, 128, **options)
    # An activation would turn errors of rounding into others where it is cut off.
    return torch.nn.Sequential(*scaled, layer(128, 128), layer(64, 128))


def two_dimensional(rank: Rank) -> None:
    """Tensor parallelism in rows of a mesh, parameters sharded along its columns: as one process."""
    mesh = init_device_mesh("cpu", (2, rank.size // 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "0": ColwiseParallel(), "1": RowwiseParallel(), "2": BsrColwiseParallel(), "3": BsrRowwiseParallel()
    }  # fmt: skip
    place = mesh["dp"].get_local_rank()
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        linear_ranks.use_formulas(monkeypatch)
        single, shared = _wide_model(), _wide_model()
        parallelize_module(shared, mesh["tp"], plan, src_data_rank=None)
        for module in (*shared, shared):
            fully_shard(module, mesh=mesh["dp"])
        # Gradients whose sums are exact, so that ranks round the same numbers to fp8.
        x, gradient = torch.randn(2, 8, 64).bfloat16(), whole_numbers(2, 8, 64)
        # One process with the rows of each, as the largest magnitudes of rows are those of a rank's own.
        leaves = [own.clone().requires_grad_() for own in x]
        expected = [run_both_ways(single, *pair)[0] for pair in zip(leaves, gradient)]
        own = x[place].clone().requires_grad_()
        found, traffic = run_both_ways(shared, own, gradient[place])
        assert traffic.forward == {"_allgather_base_": 4, "all_reduce": 5}, traffic  # of which 3 for scales
        assert traffic.backward == {"_allgather_base_": 4, "_reduce_scatter_base_": 4, "all_reduce": 4}, (
            traffic
        )
        linear_ranks.close(found, expected[place], ROUNDED_ONCE, "output")
        linear_ranks.close(own.grad, leaves[place].grad, ROUNDED_ONCE, "gradient of the input")
        tensor_rank = Rank(mesh["tp"].get_local_rank(), mesh["tp"].size())
        for n, (whole, part) in enumerate(zip(single, shared)):
            grads = {name: p.grad.full_tensor() * 2 for name, p in part.named_parameters()}  # FSDP averages
            one = {name: p.grad for name, p in whole.named_parameters()}
            if n >= 2:  # block rows, then block columns, which are parameters of the rank's own
                one["values"] = part_of(whole.weight, one["values"], n - 2, tensor_rank)
            if n == 2:
                one["bias"] = one["bias"].chunk(tensor_rank.size)[tensor_rank.rank]
            for name, gradient_of in one.items():
                linear_ranks.close(grads[name], gradient_of, ROUNDED_ONCE, f"gradient of {n}.{name}")
