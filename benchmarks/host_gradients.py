"""Host time of calls that want gradients, and of training steps that the host bounds.

    python -m benchmarks.host_gradients          # half a minute

Sizes are small enough for the GPU to outrun the host. A row of a call has the host's microseconds of the
forward pass under autograd and of the backward pass, in the median; `torch` is PyTorch's own call of the same
run. A training step is forward and backward of eight layers of 512×512 on 256 rows, in milliseconds until the
GPU is done; `nn.Linear` in the same run is what it is held against. So is that of one large layer, which the
GPU bounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kernels_dsl
from benchmarks import harness, machine

DEVICE = "cuda"
CALLS = 60
ROUNDS = 7
FEATURES, ROWS = 512, 256


class Step(NamedTuple):
    """Layers of a model and the rows of its input."""

    layers: int
    features: tuple[int, int]
    """in, out."""
    rows: int


STEPS = {
    "8 layers 512×512, 256 rows": Step(8, (FEATURES, FEATURES), ROWS),
    "a layer 4096→11008, 16384 rows": Step(1, (4096, 11008), 16384),
}


class Differentiable(NamedTuple):
    """A call whose result is differentiated by `inputs`."""

    call: Callable[[], torch.Tensor]
    inputs: tuple[torch.Tensor, ...]


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()


def bsr_layer(features: tuple[int, int] = (FEATURES, FEATURES)) -> Any:
    """A layer that keeps a quarter of blocks of 64×64."""
    dense = torch.nn.Linear(*features, device=DEVICE, dtype=torch.bfloat16)
    return kernels_dsl.BsrLinear.from_linear(dense, (64, 64), density=0.25)


def calls() -> dict[str, tuple[Differentiable, Differentiable]]:
    """By name: ours and PyTorch's nearest."""
    x, weight = _leaf(ROWS, FEATURES), _leaf(FEATURES, FEATURES)
    mm = Differentiable(lambda: torch.mm(x, weight), (x, weight))
    linear = Differentiable(lambda: torch.nn.functional.linear(x, weight), (x, weight))
    q, k, v = (_leaf(1, 128, 4, 64) for _ in range(3))
    sdpa = Differentiable(
        lambda: torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))),
        (q, k, v),
    )
    sparse: Any = bsr_layer()
    scaled: Any = kernels_dsl.ScaledLinear(
        FEATURES, FEATURES, bias=False, device=DEVICE, dtype=torch.bfloat16
    )
    return {
        "gemm": (Differentiable(lambda: kernels_dsl.gemm(x, weight), (x, weight)), mm),
        "attention": (Differentiable(lambda: kernels_dsl.attention(q, k, v), (q, k, v)), sdpa),
        "BsrLinear": (Differentiable(lambda: sparse(x), (x, *sparse.parameters())), linear),
        "ScaledLinear": (Differentiable(lambda: scaled(x), (x, *scaled.parameters())), linear),
    }


def host_us(timed: Differentiable) -> tuple[float, float]:
    """Forward and backward, microseconds of the host a call, in the median of rounds."""
    gradient = torch.randn_like(timed.call())
    forward, backward = [], []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        results = [timed.call() for _ in range(CALLS)]
        between = time.perf_counter()
        torch.cuda.synchronize()
        again = time.perf_counter()
        for result in results:
            torch.autograd.grad(result, timed.inputs, gradient)
        end = time.perf_counter()
        forward.append((between - start) / CALLS * 1e6)
        backward.append((end - again) / CALLS * 1e6)
    return statistics.median(forward[1:]), statistics.median(backward[1:])


def models(step: Step) -> dict[str, torch.nn.Module]:
    """Models of such layers, by their kind."""
    options: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    layers: dict[str, Callable[[], Any]] = {
        "nn.Linear": lambda: torch.nn.Linear(*step.features, **options),
        "ScaledLinear": lambda: kernels_dsl.ScaledLinear(*step.features, **options),
        "BsrLinear": lambda: bsr_layer(step.features),
    }
    return {name: torch.nn.Sequential(*(make() for _ in range(step.layers))) for name, make in layers.items()}


def step_ms(step: Step) -> dict[str, float]:
    """Milliseconds of a training step of each kind, in turns. The input of a single layer needs a gradient,
    too, as inside of a model."""
    kinds = models(step)
    x, gradient = (
        torch.randn(step.rows, size, device=DEVICE, dtype=torch.bfloat16) for size in step.features
    )
    x.requires_grad_(step.layers == 1)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(CALLS):
        for name, model in kinds.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(x).backward(gradient)
            torch.cuda.synchronize()
            if number >= CALLS // 6:
                found[name].append((time.perf_counter() - start) * 1e3)
            model.zero_grad(set_to_none=True)
            x.grad = None
    return {name: statistics.median(times) for name, times in found.items()}


def rows() -> Iterator[dict[str, Any]]:
    """One row a call, then one a step and kind of layer."""
    for name, (ours, peer) in calls().items():
        forward, backward = host_us(ours)
        forward_torch, backward_torch = host_us(peer)
        yield {
            "name": name,
            "forward_us": forward,
            "backward_us": backward,
            "torch_forward_us": forward_torch,
            "torch_backward_us": backward_torch,
        }
    for what, step in STEPS.items():
        times = step_ms(step)
        for name, ms in times.items():
            yield {"name": f"{what}: {name}", "step_ms": ms, "x_dense": ms / times["nn.Linear"]}


def main() -> None:
    """Runs it all and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    args = parser.parse_args()
    found = harness.as_they_come(rows)
    names = dict.fromkeys(key for row in found for key in row)
    filled = [{name: row.get(name) for name in names} for row in found]
    harness.write("host_gradients", machine.header(), filled, args.results)


if __name__ == "__main__":
    main()
