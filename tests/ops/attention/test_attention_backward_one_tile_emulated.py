"""Gradients of attention where a CTA has one tile of keys or a piece of one, in the emulator, against float64
autograd.

TEST_ALL_KERNELS=1 takes more shapes.
"""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.ops.attention import backward, cut_tiles, gradient
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.gradient_cases import check_gradients, check_packed, leaves
from tests.samples import ALL


@pytest.fixture(autouse=True)
def long_walks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backward, "takes_many_tiles", lambda call, config: False)
    for plans in ("_PLANS", "_CALLS"):
        monkeypatch.setattr(gradient, plans, {})
    with emulator.run(arch="sm_90a"):
        yield


@pytest.mark.parametrize(
    ("dim", "deterministic"), [(64, True), (128, False), *([(64, False), (128, True)] if ALL else [])]
)
def test_pieces_of_tiles(dim, deterministic, seed, monkeypatch):
    """Two tiles, of which each has three pieces of the queries of two heads."""
    monkeypatch.setattr(cut_tiles, "best_pieces", lambda tiles, steps, sms: 3)
    found = check_gradients(
        leaves((2, 1), (300, 200), (dim, dim), seed), Masking(), deterministic=deterministic
    )
    assert all(torch.isfinite(x).all() for x in found)


def test_pieces_at_both_ends(seed, monkeypatch):
    """Of each of two heads' four tiles: the first head's first in two pieces, the last one's last in three.
    Two CTAs at a time: a tile must not wait for one that starts after it."""
    monkeypatch.setattr(cut_tiles, "ROUNDS", 4)
    with emulator.run(arch="sm_90a", sms=2, resident=2):
        check_gradients(leaves((4, 2), (200, 500), (128, 128), seed), Masking())


@pytest.mark.parametrize("deterministic", [True, False])
def test_causal(deterministic, seed):
    """No query sees the first tile of keys."""
    masking = Masking(left=50, right=0)
    tensors = leaves((1, 1), (70, 260), (128, 128), seed)
    check_gradients(tensors, masking, causal=True, window=(50, 0), deterministic=deterministic)


@pytest.mark.parametrize(("dim", "deterministic"), [(64, True), (128, False)])
def test_packed(dim, deterministic, seed):
    check_packed((70, 5, 5), (200, 5, 5), (150, 5, 5), (dim, dim), seed, deterministic)


def test_float16_in_any_order(seed):
    """Warpgroups add to the sums of dQ, over more query blocks than there are stages."""
    tensors = leaves((1, 1), (270, 140), (128, 128), seed, torch.float16)
    check_gradients(tensors, Masking(right=0), causal=True, deterministic=False)
