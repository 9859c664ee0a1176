"""Functions of a rank in the tests of a Llama block that ranks share, at toy size, its kernels emulated."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.llama_check import check, draw_task, expectations
from benchmarks.llama_layer import TOY, draw_weights
from reference.tolerance import ToleranceError
from tests.distributed.ranks import Rank


def fp8(rank: Rank) -> None:
    """Both forms of `ScaledLinear`."""
    _both_forms("fp8", rank)


def sparse(rank: Rank) -> None:
    """Both forms of `BsrLinear`; a rank's wrong weights are found under each."""
    mesh, task, expected = _both_forms("sparse", rank)
    for parallelism in ("tp", "fsdp"):
        with pytest.raises(ToleranceError, match=f"sparse, {parallelism}: .*, against"):
            check("sparse", parallelism, mesh, task, expected, plant=_wrong_down)


def _both_forms(kind: str, rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (rank.size,))
    task = draw_task(TOY, draw_weights(TOY, "cpu"))
    expected = expectations(kind, mesh, task)
    with warnings.catch_warnings():  # a layer that returns a view, which FSDP2 warns of
        warnings.filterwarnings("error", message=".*returned a view")
        for parallelism in ("tp", "fsdp"):
            assert check(kind, parallelism, mesh, task, expected) <= 1
    return mesh, task, expected


def _wrong_down(block: Any) -> None:
    """The second rank's part of a weight is a tenth too large."""
    if dist.get_rank() == 1:
        part = block.mlp.down.values
        with torch.no_grad():
            (part.to_local() if isinstance(part, DTensor) else part).mul_(1.1)
