"""`scaled_linear` of DTensors: each rank multiplies its shards, scaled by what it has.

With the recipe "tensor" the largest magnitude is taken over all ranks that have shards of a tensor, so that
they all scale as one process would. The scales of rows and of blocks are those of a rank's own part: where
ranks share a row, it has more scales than in one process. Nothing in fp8 goes from rank to rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from kernels_dsl.nn.scaled_linear import Options, Shared, product

WHOLE, PARTIAL = Replicate(), Partial()


class Share(NamedTuple):
    """The work of the ranks along one dimension of the mesh: what they have of each tensor, and of the
    gradients that they compute."""

    x: Placement
    weight: Placement
    bias: Placement
    output: Placement
    d_x: Placement
    d_weight: Placement
    d_bias: Placement


def share_of(x: Placement, weight: Placement, last: int) -> Share:
    """The share that these placements ask for, `last` being x's mode of features.

    A weight's shards stay where they are, and x goes to them; x that is a partial sum is summed first.
    ValueError for a weight that is one.
    """
    if isinstance(weight, Partial):
        raise ValueError("weight is a partial sum, must be whole or sharded")
    if isinstance(weight, Shard) and weight.dim == 0:
        return Share(WHOLE, weight, weight, Shard(last), PARTIAL, weight, weight)
    features = Shard(last)
    if isinstance(weight, Shard) or x == features:
        columns = Shard(1)
        return Share(features, columns, WHOLE, PARTIAL, features, columns, PARTIAL)
    if isinstance(x, Shard):
        return Share(x, WHOLE, WHOLE, x, x, PARTIAL, PARTIAL)
    return Share(*(WHOLE,) * 7)


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> DTensor:
    """`kernels_dsl.scaled_linear` of DTensors on one mesh, which were checked as those of one process are.

    Rows of x, or rows or columns of the weight, can be sharded along each dimension of the mesh. TypeError or
    ValueError, before any communication, for another tensor than a DTensor, another mesh, or groups.
    """
    operands = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, tensor in operands.items():
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be a DTensor as others are")
    assert isinstance(x, DTensor) and isinstance(weight, DTensor)
    mesh = weight.device_mesh
    for name, tensor in operands.items():
        if tensor.device_mesh != mesh:  # type: ignore[attr-defined]
            raise ValueError(f"{name} is on another mesh than weight, must be on the same")
    if weight.dim() == 3:
        raise ValueError("weight is a DTensor of groups, must have 2 modes: call it with to_local()")
    shares = [share_of(a, b, x.dim() - 1) for a, b in zip(x.placements, weight.placements)]
    rows = x.redistribute(mesh, [s.x for s in shares]).to_local(grad_placements=[s.d_x for s in shares])
    columns = weight.redistribute(mesh, [s.weight for s in shares]).to_local(
        grad_placements=[s.d_weight for s in shares]
    )
    made = product(rows, columns, _own_bias(bias, mesh, shares), options, _groups(mesh, shares))
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    strides = tuple(math.prod(shape[mode + 1 :]) for mode in range(len(shape)))
    placements = [s.output for s in shares]
    return DTensor.from_local(made, mesh, placements, run_check=False, shape=shape, stride=strides)


def _own_bias(bias: Any, mesh: Any, shares: list[Share]) -> torch.Tensor | None:
    """This rank's part of the bias: zeros where another rank adds it to a sum over ranks."""
    if bias is None:
        return None
    own: torch.Tensor = bias.redistribute(mesh, [s.bias for s in shares]).to_local(
        grad_placements=[s.d_bias for s in shares]
    )
    place = mesh.get_coordinate()
    adds = all(n == 0 for n, s in zip(place, shares) if isinstance(s.output, Partial))
    # Every rank computes a gradient: those that add nothing one of zeros, as sums of it wait for all.
    return own if adds else torch.where(torch.zeros_like(own, dtype=torch.bool), own, 0)


def _groups(mesh: Any, shares: list[Share]) -> Shared:
    def of(name: str) -> tuple[Any, ...]:
        dims = [n for n, s in enumerate(shares) if isinstance(getattr(s, name), Shard)]
        return tuple(mesh.get_group(n) for n in dims)

    return Shared(of("x"), of("weight"), of("output"))
