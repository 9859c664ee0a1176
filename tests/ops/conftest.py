"""Fixtures of the op tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels_dsl.config.problem import H200, L40S, Device


@pytest.fixture
def model_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Calls on CPU tensors go to `ModelKernels`, as if they were on an H200."""
    yield from _with_device(monkeypatch, H200)


@pytest.fixture
def model_kernels_sm89(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """The same on a device without TMA and WGMMA."""
    yield from _with_device(monkeypatch, L40S)


def _with_device(monkeypatch: pytest.MonkeyPatch, device: Device) -> Iterator:
    from kernels_dsl import autotune
    from kernels_dsl.ops import operation
    from kernels_dsl.ops.gemm import gemm as gemm_module
    from kernels_dsl.ops.gemm import kernels as gemm_kernels
    from kernels_dsl.ops.target import Target
    from tests.ops.gemm.model_kernels import ModelKernels

    model = ModelKernels()
    monkeypatch.setattr(gemm_kernels, "launcher", model.launcher)
    for module in (operation, autotune):
        monkeypatch.setattr(module, "target_of", lambda *_: Target(device, -1))
    gemm_module.clear_plans()
    yield model
    gemm_module.clear_plans()
