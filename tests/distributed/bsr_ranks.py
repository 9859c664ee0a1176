"""Functions of a rank in the tests of block-sparse layers that ranks share, whose kernels are formulas."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from kernels_dsl.distributed import BsrColwiseParallel, BsrRowwiseParallel, shard_bsr
from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.sparse.tensor import BsrTensor
from tests.distributed.ranks import Rank
from tests.distributed.sharded_ranks import use_formulas

BLOCK = (16, 32)


class Traffic(NamedTuple):
    """The collectives of a forward and of a backward pass."""

    forward: dict[str, int]
    backward: dict[str, int]


def whole_numbers(*shape: int) -> torch.Tensor:
    """bf16 whole numbers, so small that sums are exact in bf16."""
    return torch.randint(-1, 2, shape).bfloat16()


def layer(rows: int, columns: int, activation: str | None = None, bias: bool = True) -> BsrLinear:
    """A layer that keeps two thirds of its blocks; the first block row and column are empty in part."""
    mask = torch.rand(rows // BLOCK[0], columns // BLOCK[1]) < 0.66
    mask[0, 0] = False
    weight = BsrTensor.from_dense(whole_numbers(rows, columns), mask, BLOCK)
    return BsrLinear(weight, whole_numbers(rows) if bias else None, activation)


def model(seed: int = 0) -> torch.nn.Sequential:
    """A block of a transformer's size ratios: up with an activation, down without."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(layer(128, 64, "relu"), layer(64, 128))


def _counted(traffic: CommDebugMode) -> dict[str, int]:
    return {str(key).split(".")[-1]: n for key, n in traffic.get_comm_counts().items()}


def run_both_ways(
    module: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, Traffic]:
    """The output, with gradients left in the leaves, and what was communicated."""
    with CommDebugMode() as forward:
        y = module(x)
    with CommDebugMode() as backward:
        y.backward(gradient)
    return y.detach(), Traffic(_counted(forward), _counted(backward))


def _expect(found: Any, expected: Any, label: str) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, label
    assert torch.equal(found, expected), f"{label}: {(found - expected).abs().max()}"


def part_of(matrix: BsrTensor, values: torch.Tensor, dim: int, rank: Rank) -> torch.Tensor:
    """A rank's part of the values of a matrix."""
    return shard_bsr(matrix.with_values(values), rank.rank, rank.size, dim).values


def pair(rank: Rank) -> None:
    """Column-wise, then row-wise: an all-reduce each way; gradients are those of one process."""
    mesh = init_device_mesh("cpu", (rank.size,))
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        single, shared = model(), model(seed=rank.rank)  # the styles bring rank 0's
        x = whole_numbers(3, 8, 64).requires_grad_() if rank.rank == 0 else torch.empty(3, 8, 64).bfloat16()
        x = _from_first(x, mesh).requires_grad_()
        gradient = _from_first(whole_numbers(3, 8, 64), mesh)
        own = x.detach().clone().requires_grad_()
        expected, _ = run_both_ways(single, x, gradient)
        parallelize_module(shared, mesh, {"0": BsrColwiseParallel(), "1": BsrRowwiseParallel()})
        found, traffic = run_both_ways(shared, own, gradient)
        assert traffic == Traffic({"all_reduce": 1}, {"all_reduce": 1}), traffic
        _expect(found, expected, "output")
        _expect(own.grad, x.grad, "gradient of the input")
        for n, (one, part) in enumerate(zip(single, shared)):
            values = part_of(one.weight, one.values.grad, n, rank)
            _expect(part.values.grad, values, f"gradient of the values of layer {n}")
            assert part.values.shape[0] < one.values.shape[0]
        bias = single[0].bias.grad.chunk(rank.size)[rank.rank]
        _expect(shared[0].bias.grad, bias, "gradient of the bias, column-wise")
        _expect(shared[1].bias.grad, single[1].bias.grad, "gradient of the bias, row-wise")


def _from_first(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(x.detach(), mesh, [Replicate()]).to_local().clone()


def layouts(rank: Rank) -> None:
    """Sequence parallelism: rows are gathered before the pair and scattered after it; also as DTensors."""
    mesh = init_device_mesh("cpu", (rank.size,))
    rows: Placement = Shard(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        single = model()
        shared = copy.deepcopy(single)
        x, gradient = whole_numbers(8, 64).requires_grad_(), whole_numbers(8, 64)
        expected, _ = run_both_ways(single, x, gradient)
        styles = {
            "0": BsrColwiseParallel(input_layouts=rows),
            "1": BsrRowwiseParallel(output_layouts=rows, use_local_output=False),
        }
        parallelize_module(shared, mesh, styles)
        own = distribute_tensor(x.detach(), mesh, [rows]).requires_grad_()
        found, traffic = run_both_ways(shared, own, distribute_tensor(gradient, mesh, [rows]))
        assert traffic.forward == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}, traffic
        assert traffic.backward == {
            "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 1
        }, traffic  # fmt: skip
        assert isinstance(found, DTensor) and found.placements == (rows,)
        _expect(found.full_tensor(), expected, "output")
        _expect(own.grad.full_tensor(), x.grad, "gradient of the input")
        _expect(shared[1].bias.grad, single[1].bias.grad, "gradient of the bias, row-wise")


def columns(rank: Rank) -> None:
    """A row-wise layer whose output is sharded along its features."""
    mesh = init_device_mesh("cpu", (rank.size,))
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        torch.manual_seed(1)
        single = layer(64, 128)
        shared = parallelize_module(copy.deepcopy(single), mesh, BsrRowwiseParallel(output_layouts=Shard(-1)))
        x, gradient = whole_numbers(8, 128), whole_numbers(8, 64)
        expected, _ = run_both_ways(single, x, gradient)
        found, traffic = run_both_ways(
            shared, x.chunk(rank.size, -1)[rank.rank], gradient.chunk(rank.size, -1)[rank.rank]
        )
        assert traffic.forward == {"reduce_scatter_tensor": 1}, traffic
        _expect(found, expected.chunk(rank.size, -1)[rank.rank], "output")
        _expect(shared.values.grad, part_of(single.weight, single.values.grad, 1, rank), "values")
        _expect(shared.bias.grad, single.bias.grad, "bias")


def refusals(rank: Rank) -> None:
    """Layers that cannot be shared are refused before any communication, with the reason."""
    mesh = init_device_mesh("cpu", (rank.size,))
    cases = [
        (layer(128, 64, "relu"), BsrRowwiseParallel(), ValueError, "activation is 'relu', must be None"),
        (
            layer(128, 96),
            BsrRowwiseParallel(),
            ValueError,
            "weight has 3 block columns, must have a",
        ),
        (layer(48, 64), BsrColwiseParallel(), ValueError, "weight has 3 block rows, must have a multiple"),
        (torch.nn.Linear(8, 8), BsrColwiseParallel(), TypeError, "module is a Linear, must be a BsrLinear"),
    ]
    for module, style, error, text in cases:
        with CommDebugMode() as traffic, pytest.raises(error, match=text):
            parallelize_module(module, mesh, style)
        assert traffic.get_total_counts() == 0, text
