"""Tensors that operators make: as `torch.empty_strided` makes them, whichever way they are made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels_dsl.checks.layout import padded_strides
from kernels_dsl.ops import allocate

CASES = [
    ((), None, torch.float32),
    ((3, 5), None, torch.bfloat16),
    (torch.Size((2, 0, 4)), None, torch.float8_e4m3fn),
    ((128, 2), (1, 128), torch.float32),
]


def _check(shape, strides, dtype, device):
    made = allocate.maker(shape, dtype, device, strides)()
    wanted = torch.empty(shape) if strides is None else torch.empty_strided(shape, strides)
    assert (made.shape, made.stride()) == (wanted.shape, wanted.stride())
    assert (made.dtype, made.device.type) == (dtype, device.type)


@pytest.mark.parametrize(("shape", "strides", "dtype"), CASES)
def test_on_the_cpu(shape, strides, dtype):
    _check(shape, strides, dtype, torch.device("cpu"))


@pytest.mark.parametrize("contiguous", ["row", "column"])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 7), (2, 3, 5), (4, 1, 1)])
def test_pitched_memory_has_the_last_gap(shape, contiguous):
    strides = padded_strides(shape, contiguous, 2)
    made = allocate.pitched_maker(shape, strides, torch.bfloat16, torch.device("cpu"))()
    assert (made.shape, made.stride()) == (shape, strides)
    pitch = strides[-2] if contiguous == "row" else strides[-1]
    lines = shape[-2] if contiguous == "row" else shape[-1]
    batch = shape[0] if len(shape) == 3 else 1
    assert made.untyped_storage().nbytes() == 2 * pitch * lines * batch


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "strides", "dtype"), CASES)
def test_on_the_gpu(shape, strides, dtype):
    _check(shape, strides, dtype, torch.device("cuda", torch.cuda.current_device()))
    assert allocate._on_current_gpu() is not None


@pytest.mark.parametrize("found", [None, lambda *_: torch.empty(0), lambda: None])
def test_without_the_short_way(found, monkeypatch):
    """A PyTorch that has no such function, or another one of that name."""
    monkeypatch.setattr(torch._C._dynamo, "guards", SimpleNamespace(_empty_strided_cuda=found))
    allocate._on_current_gpu.cache_clear()
    try:
        assert allocate._on_current_gpu() is None
    finally:
        allocate._on_current_gpu.cache_clear()


def test_a_scale_is_not_taken_for_another():
    base = torch.arange(3.0)
    for x in (
        base[1],
        base[1:2].squeeze(),
        torch.ones(2)[:1].squeeze(),
        torch.ones(1).view(()),
        torch.ones(()),
    ):
        given = allocate.with_a_mode(x)
        assert (given.shape, given.data_ptr(), given.item()) == ((1,), x.data_ptr(), x.item())
    bits = torch.ones(1).view(torch.int32).view(())
    assert allocate.with_a_mode(bits).dtype == torch.int32
