"""Memory of a launch: it goes as CTAs end, without a garbage collection."""

from __future__ import annotations

import gc

import torch

import kernels_dsl
from lowering import emulator
from lowering.emulator.shadow import Shadow


def _shadows() -> int:
    return sum(isinstance(x, Shadow) for x in gc.get_objects())


def test_nothing_large_waits_for_a_collection(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(128, 128, generator=generator).bfloat16() for _ in range(2))
    gc.collect()
    before = _shadows()
    gc.disable()
    try:
        with emulator.run(arch="sm_90a"):
            kernels_dsl.gemm(a, b)
        assert _shadows() == before
    finally:
        gc.enable()
