"""Functions of a rank in the tests of layers on DTensors, whose kernels are formulas here."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kernels_dsl
from kernels_dsl.nn import scaled_linear as layers
from reference.quantize import group_amax, scale_of
from tests.distributed.ranks import Rank
from tests.distributed.sharded_ranks import FORMULAS

WHOLE = Replicate()


def use_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas in place of the layers' kernels."""

    def quantize(x: torch.Tensor, dtype: torch.dtype, **options: Any) -> Any:
        return FORMULAS["quantize"](SimpleNamespace(x=x, dtype=dtype, **options))

    def scaled_gemm(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        made = (a.double() * scale_a) @ (b.double() * scale_b)
        return (made if options["bias"] is None else made + options["bias"]).to(options["out_dtype"])

    monkeypatch.setattr(layers, "quantize", quantize)
    monkeypatch.setattr(layers, "scaled_gemm", scaled_gemm)


def _mesh(rank: Rank) -> DeviceMesh:
    return init_device_mesh("cpu", (rank.size,))


def _new(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _full(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(found: Any, expected: torch.Tensor, most: float, label: str) -> None:
    """AssertionError where a tensor, or the whole of a DTensor, has a larger relative error."""
    found, expected = _full(found).detach(), expected.detach()
    assert found.shape == expected.shape and found.dtype == expected.dtype, label
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error <= most, f"{label}: relative error {error}"


MOST = {"tensor": 2.0**-7, "row": 2.0**-4}
"""Errors by recipe: of the order of sums, and of scales of a rank's own part of rows."""


def placements(rank: Rank) -> None:
    """Every placement of x and of the weight: output and gradients are those of one process."""
    mesh = _mesh(rank)
    torch.manual_seed(1)
    x, weight, bias, gradient = _new(2, 4, 32), _new(16, 32), _new(16), _new(2, 4, 16)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        for recipe, x_place, w_place in itertools.product(
            MOST, (WHOLE, Shard(0), Shard(1), Shard(2), Partial()), (WHOLE, Shard(0), Shard(1))
        ):
            leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
            expected = kernels_dsl.scaled_linear(*leaves, recipe=recipe)
            expected.backward(gradient)
            mine = [
                _placed(t, mesh, place).requires_grad_()
                for t, place in ((x, x_place), (weight, w_place), (bias, WHOLE))
            ]
            found = kernels_dsl.scaled_linear(*mine, recipe=recipe)
            found.backward(distribute_tensor(gradient, mesh, [WHOLE]))
            label = f"{recipe} {x_place} {w_place}"
            close(found, expected, MOST[recipe], f"{label}: output")
            for name, a, b in zip(("x", "weight", "bias"), mine, leaves):
                assert a.grad is not None and b.grad is not None
                close(a.grad, b.grad, MOST[recipe], f"{label}: gradient of {name}")


def _placed(x: torch.Tensor, mesh: DeviceMesh, place: Placement) -> DTensor:
    if isinstance(place, Partial):
        return DTensor.from_local(x / mesh.size(), mesh, [place], run_check=False)
    return distribute_tensor(x, mesh, [place], src_data_rank=None)


COLLECTIVES = {"row": 1, "tensor": 4}
"""All-reduces of a column-wise and a row-wise layer: the sum, and the largest magnitude of three tensors."""


def tensor_parallel(rank: Rank) -> None:
    """`parallelize_module` of two layers: output, gradients and collectives."""
    mesh = _mesh(rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        for recipe, all_reduces in COLLECTIVES.items():
            torch.manual_seed(2)
            whole, x, gradient = _model(recipe), _new(6, 32), _new(6, 32)
            shared = _model(recipe)
            shared.load_state_dict(whole.state_dict())
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(shared, mesh, plan, src_data_rank=None)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected = whole(a)
            expected.backward(gradient)
            with CommDebugMode() as traffic:
                found = shared(b)
            counts = {str(key).split(".")[-1]: n for key, n in traffic.get_comm_counts().items()}
            assert counts == {"all_reduce": all_reduces}, (recipe, counts)
            found.backward(gradient)
            close(found, expected, MOST[recipe], f"{recipe}: output")
            assert a.grad is not None
            close(b.grad, a.grad, MOST[recipe], f"{recipe}: gradient of x")
            for (name, p), (_, q) in zip(shared.named_parameters(), whole.named_parameters()):
                assert q.grad is not None
                close(p.grad, q.grad, MOST[recipe], f"{recipe}: gradient of {name}")


def _model(recipe: str) -> torch.nn.Module:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "recipe": recipe}
    first = kernels_dsl.ScaledLinear(32, 64, **options)
    return torch.nn.Sequential(first, torch.nn.ReLU(), kernels_dsl.ScaledLinear(64, 32, **options))


def scales(rank: Rank) -> None:
    """The scale that ranks share is that of the whole tensor to the bit; what cannot be shared is refused."""
    mesh = _mesh(rank)
    torch.manual_seed(3)
    for case in ("normal", "zeros", "infinite"):
        x = torch.zeros(4, 8) if case == "zeros" else torch.randn(4, 8)
        x[0, 0] = torch.inf if case == "infinite" else x[0, 0]
        own = x.chunk(rank.size)[rank.rank]
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            found = layers._common_scale(own, dtype, (mesh.get_group(0),))
            assert torch.equal(found, scale_of(group_amax(x, "tensor"), dtype)), case
    x, weight = distribute_tensor(_new(4, 8), mesh, [WHOLE]), distribute_tensor(_new(8, 8), mesh, [WHOLE])
    groups = distribute_tensor(_new(2, 8, 8), mesh, [WHOLE])
    with CommDebugMode() as traffic:
        with pytest.raises(TypeError, match=r"x is a Tensor, must be a DTensor as others are"):
            kernels_dsl.scaled_linear(x.to_local(), weight)
        with pytest.raises(ValueError, match="weight is a partial sum, must be whole or sharded"):
            kernels_dsl.scaled_linear(x, DTensor.from_local(weight.to_local(), mesh, [Partial()]))
        with pytest.raises(ValueError, match="weight is a DTensor of groups, must have 2 modes"):
            kernels_dsl.scaled_linear(groups, groups)
    assert traffic.get_total_counts() == 0
