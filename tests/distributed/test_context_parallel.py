"""Context-parallel attention on gloo ranks: equal to one process, or an error within the time limit."""

from __future__ import annotations

import os

import pytest

from tests.distributed.ranks import run_ranks

ALL = os.environ.get("TEST_ALL_KERNELS") == "1"
everything = pytest.mark.skipif(not ALL, reason="set TEST_ALL_KERNELS=1")
RANKS = "tests.distributed.attention_ranks:"
TORCH_RANKS = "tests.distributed.torch_ranks:"


def test_two_ranks():
    cases = ("matrix", "disagreeing", "packed", "masked", "refused_masks", "refused", "killed", "slow")
    behind_torch = ("context", "plain")
    run_ranks(*(RANKS + case for case in cases), *(TORCH_RANKS + case for case in behind_torch))


def test_kernels_in_the_emulator():
    run_ranks(RANKS + "emulated")


@everything
def test_four_ranks():
    run_ranks(RANKS + "matrix", RANKS + "packed_matrix", RANKS + "every_masked", size=4)


@everything
@pytest.mark.slow
def test_all_by_kernels_in_the_emulator():
    names = ("emulated_matrix", "emulated_packed", "emulated_masked")
    run_ranks(*(RANKS + name for name in names), timeout=900)
