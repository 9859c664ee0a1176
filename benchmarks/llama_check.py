"""A Llama block on several ranks against the same block on one, by the tolerance rule.

Compared are the output, the loss of each token, the loss, and the gradient of each parameter. With E the
error of PyTorch's layers of the same dtypes, shared in the same way, against float64, a result must be within
2 E and an ulp of float64, and within as much of one GPU's result (`reference.tolerance`). Maxima are those of
tiles of 256 × 256: errors of fp8 products have long tails, and maxima of smaller tiles differ by chance. E of
the loss is the root mean square of its tokens' errors, as their mean may be right by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.llama_layer import ROW_WISE, Block, Sizes, make_block, share, spread_mask
from kernels_dsl import BsrLinear, BsrTensor
from reference import tolerance

PEER = {"fp8": "torch_fp8", "sparse": "torch_sparse"}
"""Kind of ours -> the kind whose errors it may have twice."""
EXACT = {"fp8": "torch", "sparse": "torch_sparse"}
"""Kind of ours -> the kind that is its reference, in float64."""
TILE = (256, 256)
Results = dict[str, torch.Tensor]
"""Whole tensors by name, the same on all ranks: output, losses, loss and dense gradients."""
Plant = Callable[[Block], None]


class Task(NamedTuple):
    """Inputs and targets (B, S, width) of all ranks, and the weights."""

    sizes: Sizes
    weights: dict[str, torch.Tensor]
    x: torch.Tensor
    target: torch.Tensor


def draw_task(sizes: Sizes, weights: dict[str, torch.Tensor]) -> Task:
    """The same on all ranks."""
    device = next(iter(weights.values())).device
    generator = torch.Generator(device).manual_seed(1)
    shape = (2, sizes.batch, sizes.length, sizes.width)
    x, target = torch.randn(shape, generator=generator, device=device).bfloat16()
    return Task(sizes, weights, x, target)


class Rows(NamedTuple):
    """Inputs and targets of a rank."""

    x: torch.Tensor
    target: torch.Tensor


def rows_of(task: Task, parallelism: str, mesh: DeviceMesh) -> Rows:
    """Some of the sequences under FSDP, else all."""
    if parallelism != "fsdp":
        return Rows(task.x, task.target)
    rank, size = mesh.get_local_rank(), mesh.size()
    return Rows(task.x.chunk(size)[rank], task.target.chunk(size)[rank])


class Passed(NamedTuple):
    """Output and losses (B, S) of the tokens."""

    out: torch.Tensor
    losses: torch.Tensor


def forward_backward(block: Block, rows: Rows) -> Passed:
    """Both passes; gradients are left in the parameters. Losses are mean squares."""
    out = block(rows.x)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    losses = (out.to(wide) - rows.target).square().mean(-1)
    losses.mean().backward()
    return Passed(out.detach(), losses.detach())


def results(kind: str, parallelism: str, mesh: DeviceMesh, task: Task, block: Block) -> Results:
    """Runs a block that is shared so."""
    rows = rows_of(task, parallelism, mesh)
    out, losses = forward_backward(block, rows._replace(x=rows.x.to(block.mlp_norm.weight.dtype)))
    if parallelism == "fsdp":
        out, losses = (_gathered(part, 0, mesh) for part in (out, losses))
    found = {"out": out, "losses": losses, "loss": losses.mean()}
    for name, parameter in block.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        owner, _, last = name.rpartition(".")
        layer_name = owner.rpartition(".")[2]
        if last == "values":
            whole = _dense(block.get_submodule(owner), whole)
            if parallelism == "tp":
                whole = _gathered(whole, 1 if layer_name in ROW_WISE else 0, mesh)
        elif kind == "torch_sparse" and "norm" not in name:
            whole = whole * spread_mask(task.sizes, layer_name).to(whole)
        found[f"gradient of {owner}"] = whole
    return found


def _gathered(part: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False).full_tensor()


def _dense(layer: Any, values: torch.Tensor) -> torch.Tensor:
    """The gradient of a block-sparse layer's weight, zero where no block is kept."""
    assert isinstance(layer, BsrLinear)
    shape = (layer.out_features, layer.in_features)
    return BsrTensor(layer.crow_indices, layer.col_indices, values, shape).to_dense()


class Expected(NamedTuple):
    """Results of one rank: of ours, and of the reference in float64."""

    one: Results
    exact: Results


def computed(
    kind: str,
    parallelism: str,
    mesh: DeviceMesh,
    task: Task,
    *,
    dtype: torch.dtype = torch.bfloat16,
    plant: Plant | None = None,
) -> Results:
    """Results of a new block. plant: changes it, shared, before it runs."""
    block = make_block(kind, task.sizes, task.weights, dtype)
    share(block, kind, parallelism, mesh)
    if plant is not None:
        plant(block)
    return results(kind, parallelism, mesh, task, block)


def expectations(kind: str, mesh: DeviceMesh, task: Task) -> Expected:
    """On each rank by itself."""
    exact = computed(EXACT[kind], "one", mesh, task, dtype=torch.float64)
    return Expected(computed(kind, "one", mesh, task), exact)


def check(
    kind: str, parallelism: str, mesh: DeviceMesh, task: Task, expected: Expected, plant: Plant | None = None
) -> float:
    """`compare` of ours under a parallelism, on every rank."""
    peer = computed(PEER[kind], parallelism, mesh, task)
    found = computed(kind, parallelism, mesh, task, plant=plant)
    return compare(found, peer, expected, f"{kind}, {parallelism}")


def compare(found: Results, peer: Results, expected: Expected, case: str) -> float:
    """Returns the largest difference from one GPU, as a share of its bound.

    ToleranceError beyond a bound, with a line for each result that is.
    """
    one, exact = expected
    assert set(found) == set(peer) == set(one) == set(exact), case
    worst, faults = 0.0, _faults_of_loss(found, peer, expected, case)
    for name in set(found) - {"loss"}:
        error = peer[name].double() - exact[name]
        for against, base in (("float64", exact[name]), ("one GPU", one[name].double())):
            try:
                report = tolerance.check(found[name], base, base + error, tile=TILE)
            except tolerance.ToleranceError as fault:
                faults.append(f"{case}: {name}, against {against}: {fault}")
                continue
            if against == "one GPU":
                worst = max(worst, report.error / report.bound)
    if faults:
        raise tolerance.ToleranceError("\n".join(sorted(faults)))
    return worst


def _faults_of_loss(found: Results, peer: Results, expected: Expected, case: str) -> list[str]:
    errors = peer["losses"].double() - expected.exact["losses"]
    loss, exact = float(found["loss"]), float(expected.exact["loss"])
    limit = 2 * float(errors.square().mean().sqrt()) + 2.0**-23 * exact
    return [
        f"{case}: loss, against {against}: {loss}, must be within {limit:.3g} of {wanted}"
        for against, wanted in (("float64", exact), ("one GPU", float(expected.one["loss"])))
        if not abs(loss - wanted) <= limit
    ]
