"""The epilogue functions, traced into a kernel and run in the emulator, and the order of their operands."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
import torch

import lowering
from kernels_dsl.blocks.epilogue.functions import ACTIVATIONS, LinearEpilogue, identity
from lowering import emulator
from reference.gemm import activation_function

PER_THREAD = 4
THREADS = 8


@cute.kernel
def _apply_kernel(x: cute.Tensor, y: cute.Tensor, function: cutlass.Constexpr):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    mine = (bidx * THREADS + tidx,)
    values = cute.local_tile(x, (PER_THREAD,), mine).load()
    cute.local_tile(y, (PER_THREAD,), mine).store(function(values))


def _apply(x: cute.Tensor, y: cute.Tensor, stream, function: cutlass.Constexpr):
    ctas = cute.size(x) // (PER_THREAD * THREADS)
    _apply_kernel(x, y, function).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)


def _emulated(function, x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, float("nan"))
    with emulator.run(arch="sm_80"):
        lowering.jit(_apply)(x, y, function=function)
    return y


def _inputs() -> torch.Tensor:
    special = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, 1e30, -1e30, float("inf"), -5.5, 0.5, -0.5]
    )
    return torch.cat([special, torch.linspace(-12, 12, 512 - len(special))])


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_good_to_float32(name: str) -> None:
    """Within a few ulp of float64, of the result where it is large and of 1 where it is the tail of one."""
    x = _inputs()
    expected = activation_function(name)(x.double())
    error = (_emulated(ACTIVATIONS[name].traced, x).double() - expected).abs()
    bound = 2.0**-21 * expected.abs() + 2.0**-22
    finite = expected.isfinite()
    assert bool((error <= bound)[finite].all()), (
        x[finite][(error - bound)[finite].argmax()],
        error[finite].max(),
    )
    assert not _emulated(ACTIVATIONS[name].traced, x)[~finite].isfinite().any()


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_nan_stays_nan(name: str) -> None:
    assert _emulated(ACTIVATIONS[name].traced, torch.full((32,), float("nan"))).isnan().all()


def test_operands_follow_in_the_documented_order() -> None:
    """Plain numbers do for the parts without an activation."""
    assert identity(7.0) == 7.0
    everything = LinearEpilogue(alpha=True, beta=True, bias=True, residual=True)
    assert everything.num_operands == 5
    assert everything(7.0, 2.0, 3.0, 11.0, 100.0, 1000.0) == 2 * 7 + 3 * 11 + 100 + 1000
    assert LinearEpilogue(beta=True)(7.0, 3.0, 11.0) == 7 + 33
    assert LinearEpilogue(bias=True)(7.0, 100.0) == 107
    assert LinearEpilogue()(7.0) == 7.0


def test_wrong_numbers_of_operands_and_unknown_activations_are_named() -> None:
    with pytest.raises(TypeError, match="takes 1 operands, got 2"):
        LinearEpilogue(bias=True)(7.0, 1.0, 2.0)
    with pytest.raises(ValueError, match=r"'gelo'.*None or one of gelu"):
        LinearEpilogue(activation="gelo")


def test_equal_epilogues_are_equal() -> None:
    """They are part of the key of a compiled kernel."""
    assert LinearEpilogue(bias=True, activation="relu") == LinearEpilogue(bias=True, activation="relu")
    assert LinearEpilogue(bias=True) != LinearEpilogue(residual=True)
