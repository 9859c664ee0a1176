"""Training steps of one Llama block on several GPUs: fp8 and block-sparse layers beside torch's own.

    torchrun --nproc-per-node 2 -m benchmarks.llama_block --json llama_block.json

The block has the sizes of Llama 3 8B (width 4096, H 32/8, D 128, hidden 14336). Layers are torch.nn.Linear
with SDPA, or with our attention `ScaledLinear` (fp8) or `BsrLinear` (a quarter of the blocks). One GPU
computes all tokens; under "tp" ranks share heads and features, under "fsdp" parameters and sequences (FSDP2).
First output, loss and gradients are compared with one GPU's (`benchmarks.llama_check`), on shorter sequences;
then forward and backward pass are timed in turns. A time is the slowest rank's, and tokens are those of all
ranks. Without a GPU, CPU processes run toy sizes in the emulator, which times nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import llama_check, machine
from benchmarks.context_parallel import Device, start_group
from benchmarks.llama_check import Task
from benchmarks.llama_layer import KINDS, OURS, SHARED, TOY, Sizes, draw_weights, make_block, share
from reference.tolerance import ToleranceError

CHECKED_LENGTH = 1024
ONE, TORCH = "one", KINDS[0]


class Contender(NamedTuple):
    """Layers of a kind, in a form of one or several ranks."""

    kind: str
    parallelism: str


CONTENDERS = [Contender(kind, form) for form in (ONE, *SHARED) for kind in KINDS]


class Row(NamedTuple):
    """Milliseconds of a forward and backward pass: median, fastest and slowest of the rounds."""

    kind: str
    parallelism: str
    tokens: int
    ms: float
    low_ms: float
    high_ms: float
    rounds: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.ms * 1e3


def verify(task: Task, mesh: DeviceMesh, echo: Callable[[str], None]) -> dict[str, float | str]:
    """Compares ours with one GPU's; of each contender the largest difference as a share of its bound, or what
    is beyond one."""
    found: dict[str, float | str] = {}
    for kind in OURS:
        expected = llama_check.expectations(kind, mesh, task)
        for parallelism in SHARED:
            name = f"{kind}, {parallelism}"
            try:
                share_of_bound = llama_check.check(kind, parallelism, mesh, task, expected)
            except ToleranceError as fault:
                found[name] = str(fault)
                echo(f"WRONG: {fault}")
                continue
            found[name] = share_of_bound
            echo(f"checked {name}: differs from one GPU by at most {share_of_bound:.2f} of what it may")
    return found


def prepared(task: Task, mesh: DeviceMesh) -> dict[Contender, Callable[[], object]]:
    """A step of each contender, for this rank: nothing where one GPU works alone and this is another."""
    calls: dict[Contender, Callable[[], object]] = {}
    for contender in CONTENDERS:
        kind, parallelism = contender
        if parallelism == ONE and mesh.get_local_rank():
            calls[contender] = lambda: None
            continue
        block = make_block(kind, task.sizes, task.weights)
        share(block, kind, parallelism, mesh)
        rows = llama_check.rows_of(task, parallelism, mesh)

        def step(block: Any = block, rows: Any = rows) -> None:
            block.zero_grad()
            llama_check.forward_backward(block, rows)

        calls[contender] = step
    return calls


def seconds_of(call: Callable[[], object], device: Device) -> float:
    """The slowest rank's time of a call that all ranks start at once."""
    device.synchronize()
    torch.distributed.barrier()
    device.synchronize()
    start = time.perf_counter()
    call()
    device.synchronize()
    spent = torch.tensor(time.perf_counter() - start, device=device.name, dtype=torch.float64)
    torch.distributed.all_reduce(spent, torch.distributed.ReduceOp.MAX)
    return spent.item()


def measure(
    calls: Mapping[Contender, Callable[[], object]], tokens: int, rounds: int, device: Device
) -> list[Row]:
    """All contenders in turns. Two rounds before are not counted, where there is a GPU to warm."""
    found: dict[Contender, list[float]] = {contender: [] for contender in calls}
    for number in range(-2 if device.name == "cuda" else 0, rounds):
        for contender, call in calls.items():
            spent = seconds_of(call, device) * 1e3
            if number >= 0:
                found[contender].append(spent)
    return [
        Row(*contender, tokens, statistics.median(ms), min(ms), max(ms), len(ms))
        for contender, ms in found.items()
    ]


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each contender: tokens/s, beside torch in the same form and beside the kind on one GPU."""
    rates = {(row.kind, row.parallelism): row.rate for row in rows}
    lines = [f"{'layers':8} {'form':6} {'tokens/s':>12} {'of torch':>9} {'of one':>7}   ms (from, to)"]
    for row in rows:
        ratio = row.rate / rates[TORCH, row.parallelism]
        gain = row.rate / rates[row.kind, ONE]
        spread = f"{row.ms:.2f} ({row.low_ms:.2f}, {row.high_ms:.2f})"
        lines.append(
            f"{row.kind:8} {row.parallelism:6} {row.rate:12,.0f} {ratio:8.2f}x {gain:6.2f}x   {spread}"
        )
    return lines


def header(device: Device) -> dict[str, Any]:
    """Facts about the machine; without a GPU the little that there is."""
    if device.name == "cuda":
        return {**machine.header(), "gpus": torch.distributed.get_world_size()}
    return {"gpu": "none, emulated", "versions": {"torch": torch.__version__}, "commit": machine.commit()}


def write(path: Path, facts: dict[str, Any], checked: Mapping[str, float | str], rows: Sequence[Row]) -> None:
    """Keeps all as JSON: {"suite", "header", "checked", "rows"}."""
    kept = [{**row._asdict(), "tokens_per_s": row.rate} for row in rows]
    stored = {"suite": "llama_block", "header": facts, "checked": dict(checked), "rows": kept}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=1) + "\n")


def silent(text: str) -> None:
    """In place of `print` on other ranks than the first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line, for each rank that torchrun starts; returns the exit code: 1 where a check failed."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 2 -m benchmarks.llama_block",
        description="A Llama block under tensor parallelism and FSDP2: checked, then tokens a second.",
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--toy", action="store_true", help="toy sizes, as without a GPU")
    args = parser.parse_args(argv)
    device = Device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ.get("LOCAL_RANK", 0)))
    if device.name == "cpu":
        os.environ.setdefault("KERNELS_DSL_EMULATE", "sm_90a")
    start_group(device)
    mesh = init_device_mesh(device.name, (torch.distributed.get_world_size(),))
    echo = partial(print, flush=True) if torch.distributed.get_rank() == 0 else silent
    sizes = TOY if args.toy or device.name == "cpu" else Sizes()
    weights = draw_weights(sizes, device.name)
    short = sizes._replace(length=min(sizes.length, CHECKED_LENGTH))
    checked = verify(llama_check.draw_task(short, weights), mesh, echo)
    rows = measure(prepared(llama_check.draw_task(sizes, weights), mesh), sizes.tokens, args.rounds, device)
    facts = header(device)
    echo(f"{facts['gpu']}, {mesh.size()} ranks, {sizes.batch} sequences of {sizes.length} tokens")
    for line in table(rows):
        echo(line)
    if args.json is not None and torch.distributed.get_rank() == 0:
        write(args.json, facts, checked, rows)
    torch.distributed.destroy_process_group()
    return int(any(isinstance(found, str) for found in checked.values()))


if __name__ == "__main__":
    raise SystemExit(main())
