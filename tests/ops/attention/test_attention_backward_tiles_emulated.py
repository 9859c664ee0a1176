"""Gradients of attention where a CTA takes several tiles of keys, in the emulator, against float64 autograd.

TEST_ALL_KERNELS=1 takes more shapes.
"""

from __future__ import annotations

import os

import pytest
import torch

from kernels_dsl.ops.attention.backward import BackwardPlan
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.gradient_cases import check_gradients, check_packed, leaves

ALL = os.environ.get("TEST_ALL_KERNELS") == "1"


@pytest.fixture(autouse=True)
def few_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = BackwardPlan.queue
    monkeypatch.setattr(BackwardPlan, "queue", lambda plan, device: (queue(plan, device)[0], 2, None))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dim", [128, 64] if ALL else [128])
def test_causal(dim, deterministic, seed):
    """Six tiles of two heads: dQ of a tile's last block is computed beside the first of another tile."""
    with emulator.run(arch="sm_90a"):
        tensors = leaves((2, 2), (260, 260), (dim, dim), seed)
        check_gradients(tensors, Masking(right=0), causal=True, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [True, False])
def test_more_tiles_without_a_query_than_the_queue_holds(deterministic, seed):
    """First or last, as tiles start from the last key in a fixed order; 40 queries see the last 110 keys."""
    with emulator.run(arch="sm_90a"):
        tensors = leaves((1, 1), (40, 1500), (64, 64), seed)
        masking = Masking(left=70, right=0)
        check_gradients(tensors, masking, causal=True, window=(70, 0), deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [True, False])
def test_queries_that_see_no_key(deterministic, seed):
    """Nobody stores a first share of their dQ, for which memory is not cleared."""
    empty = torch.empty
    with emulator.run(arch="sm_90a"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: _with_nan(empty(*a, **k)))
        tensors = leaves((1, 1), (200, 70), (64, 64), seed)
        check_gradients(tensors, Masking(right=0), causal=True, deterministic=deterministic)


def _with_nan(made: torch.Tensor) -> torch.Tensor:
    return made.fill_(float("nan")) if made.dtype == torch.float32 else made


def test_more_tiles_that_do_not_exist_than_the_queue_holds(seed):
    """Packed sequences: there is room for as many tiles of each as the longest has."""
    short = (5,) * 11
    with emulator.run(arch="sm_90a"):
        check_packed((70, *short), (300, *short), (300, *short), (64, 64), seed)
