"""Products beside their communication, against PyTorch's plain and asynchronous ways, on several GPUs.

    torchrun --nproc-per-node 2 -m benchmarks.overlapped_products

A row is a layer of a Llama of 70 billion parameters under tensor and sequence parallelism: an all-gather
before the column-wise products, a reduce-scatter after the row-wise ones. A time is the slowest rank's,
forward alone.
`ours` and `torch_plain` are one collective and one product; `ours_overlap_8` has a product for each rank
and leaves 8 SMs; `torch_symmetric` is what asynchronous tensor parallelism of torch.compile runs;
`product` is our GEMM without any communication.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness, machine
from benchmarks.context_parallel import Device, start_group
from benchmarks.harness import OURS, Row

MARGINS = (0, 8, 16)
CALLS = 8
"""Made one after the other for a timing, so that the host is ahead of the GPUs, as in a model."""
TOLERANCE = 2.0**-5


class Layer(NamedTuple):
    """A product whose ranks share rows of x and columns, or rows, of the weight."""

    name: str
    m: int
    n: int
    k: int
    scatters: bool

    @property
    def flops(self) -> float:
        """Operations of all ranks."""
        return 2.0 * self.m * self.n * self.k


LAYERS = (
    Layer("q, k, v", 8192, 10240, 8192, False), Layer("gate and up", 8192, 57344, 8192, False),
    Layer("output", 8192, 8192, 8192, True), Layer("down", 8192, 8192, 28672, True),
)  # fmt: skip
TOY_LAYERS = (Layer("gather", 32, 64, 32, False), Layer("scatter", 32, 32, 64, True))
"""For the emulator, which shows that the program runs and times nothing."""


class Operands(NamedTuple):
    """This rank's part of x and of the weight, the latter as a linear layer keeps it."""

    x: Any
    weight: Any


def operands(layer: Layer, size: int, device: Device) -> Operands:
    """Random ones."""
    import torch

    def new(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, device=device.name, dtype=torch.bfloat16)

    if layer.scatters:
        return Operands(new(layer.m, layer.k // size), new(layer.n, layer.k // size))
    return Operands(new(layer.m // size, layer.k), new(layer.n // size, layer.k))


def contenders(layer: Layer, given: Operands, size: int) -> dict[str, Callable[[], Any]]:
    """Ways to compute this rank's part of the result, by name."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory  # registers its operators

    import kernels_dsl
    from kernels_dsl.distributed import all_gather_gemm, gemm_reduce_scatter

    x, weight = given.x, given.weight.mT
    assert dist.group.WORLD is not None
    name, symmetric = dist.group.WORLD.group_name, torch.ops.symm_mem
    call = partial(all_gather_gemm, x, weight)
    if layer.scatters:
        call = partial(gemm_reduce_scatter, x, weight, partial_dtype=torch.bfloat16)
    made: dict[str, Callable[[], Any]] = {OURS: call}
    for margin in MARGINS:
        options = {"overlap": True, "sm_margin": margin}
        made[f"{OURS}_overlap_{margin}"] = partial(call, **options)
    rows, whole = x.new_empty(layer.m // size, layer.n), x.new_empty(layer.m, layer.k)

    def reduce_scatter() -> Any:
        dist.reduce_scatter_tensor(rows, torch.mm(x, weight))
        return rows

    def all_gather() -> Any:
        dist.all_gather_into_tensor(whole, x)
        return torch.mm(whole, weight)

    made["torch_plain"] = reduce_scatter if layer.scatters else all_gather
    if layer.scatters:
        made["torch_symmetric"] = lambda: symmetric.fused_matmul_reduce_scatter(x, weight, "sum", 0, name)
    else:
        made["torch_symmetric"] = lambda: symmetric.fused_all_gather_matmul(x, [weight], 0, name)[1][0]
    alone = x if layer.scatters else x.repeat(size, 1)
    made["product"] = lambda: kernels_dsl.gemm(alone, weight)
    return made


def seconds_of(call: Callable[[], Any], device: Device) -> float:
    """The slowest rank's time of a call, of `CALLS` that all ranks start at once."""
    import torch

    device.synchronize()
    torch.distributed.barrier()
    device.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    device.synchronize()
    seconds = (time.perf_counter() - start) / CALLS
    spent = torch.tensor(seconds, device=device.name, dtype=torch.float64)
    torch.distributed.all_reduce(spent, torch.distributed.ReduceOp.MAX)
    return spent.item()


def runnable(running: dict[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Those whose results are PyTorch's, and why a peer is not among them. AssertionError for ours."""
    expected, notes, found = running["torch_plain"]().float(), [], dict(running)
    for name, call in running.items():
        if name in ("torch_plain", "product"):
            continue
        try:
            result = call().float()
        except Exception as reason:
            if name.startswith(OURS):
                raise
            notes.append(f"{name} does not run: {str(reason).splitlines()[0][:100]}")
            del found[name]
            continue
        error = float((result - expected).abs().max() / expected.abs().max())
        assert error < TOLERANCE, f"{name} has an error of {error}"
    return found, notes


def measure(layer: Layer, rounds: int, device: Device) -> Row:
    """All ways in turns."""
    import torch

    size = torch.distributed.get_world_size()
    running, notes = runnable(contenders(layer, operands(layer, size, device), size))
    times: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds + 1):  # the first is not counted
        for name, call in running.items():
            spent = seconds_of(call, device)
            if number:
                times[name].append(spent)
    ms = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    title = f"{layer.name}: {layer.m}x{layer.n}x{layer.k}, {size} ranks"
    return Row(title, layer.flops, ms, "wall clock, slowest rank", "warm", notes="; ".join(notes))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line, for each rank that torchrun starts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 2 -m benchmarks.overlapped_products",
        description="Products beside all-gather and reduce-scatter against PyTorch's ways.",
    )
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each (default %(default)s)")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON file")
    args = parser.parse_args(argv)
    import torch

    device = Device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ.get("LOCAL_RANK", 0)))
    start_group(device)
    layers = LAYERS if device.name == "cuda" else TOY_LAYERS
    rows = []
    for layer in layers:
        rows.append(measure(layer, args.rounds, device))
        if torch.distributed.get_rank() == 0:
            print(rows[-1].title)
            for name, ms in rows[-1].ms.items():
                print(f"  {name:24} {ms:9.3f} ms {rows[-1].tflops(name):8.1f} TFLOPS", flush=True)
            print(rows[-1].notes, flush=True)
    if torch.distributed.get_rank() == 0 and device.name == "cuda":
        harness.write("overlapped_products", machine.header(), [asdict(row) for row in rows], args.results)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
