"""Attention over a sequence that several GPUs share, against one GPU and PyTorch's own context parallelism.

    torchrun --nproc-per-node 2 -m benchmarks.context_parallel              # S = 131072, causal
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --lengths 524288 --rounds 2

Each row is a length, forward or backward; a time is the slowest rank's. `ours` is the ring in zig-zag order,
`ours_one_gpu` our kernel with the whole sequence on one. Beside the times: the most memory that a rank held
beyond the inputs, and of the ring the time in which a GPU communicates and computes nothing, from a trace.
Operations counted: 4 · D for each pair of query and key forward, 10 · D backward; half of all pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import harness, machine
from benchmarks.attention_calls import causal_pairs
from benchmarks.harness import OURS, Row

ONE_GPU = "ours_one_gpu"
FLASH_ATTENTION_4 = "flash_attn_4"
CHECKED = 4096
"""Rows of the short sequence whose results are compared with one GPU's before a timing."""
TOLERANCE = 2.0**-6
PASSES = ("forward", "backward")
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Shape:
    """Sizes of one causal attention."""

    length: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    def flops(self, named: str) -> float:
        """Operations of a forward or backward pass."""
        products = 4.0 if named == "forward" else 10.0
        return products * self.heads * self.dim * causal_pairs(self.length)


class Wanted(NamedTuple):
    """Contenders: our methods, peers as PyTorch's backend and way of exchange ("cudnn/allgather") or
    `FLASH_ATTENTION_4`, and whether one GPU computes the whole sequence too."""

    methods: Sequence[str]
    peers: Sequence[str]
    one_gpu: bool
    trace: bool = True


class Device(NamedTuple):
    """The device of this rank."""

    name: str
    rank: int

    def synchronize(self) -> None:
        """Waits for all that was launched."""
        if self.name != "cpu":
            import torch

            torch.cuda.synchronize()

    def peak(self) -> int:
        """Bytes that were allocated at most since `restart_peak`."""
        import torch

        return 0 if self.name == "cpu" else torch.cuda.max_memory_allocated()

    def restart_peak(self) -> int:
        """Bytes that are allocated now, from which on the peak counts."""
        import torch

        gc.collect()  # graphs of the call before
        if self.name == "cpu":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def start_group(device: Device) -> None:
    """Starts the group of all ranks; the first one prints how its GPUs are linked."""
    import torch

    if device.name != "cuda":  # the emulator's: shows that the program runs, times nothing
        torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
        return
    torch.cuda.set_device(device.rank)
    place = torch.device("cuda", device.rank)
    torch.distributed.init_process_group("nccl", timeout=TIMEOUT, device_id=place)
    if device.rank == 0:
        subprocess.run(["nvidia-smi", "topo", "-m"], check=False)


class Inputs(NamedTuple):
    """q, k and v as leaves, and the gradient of the output."""

    leaves: tuple[Any, ...]
    d_out: Any

    def to(self, place: str) -> Inputs:
        """The same on another device; the same tensors where they are there already."""
        leaves = tuple(x.detach().to(place).requires_grad_() for x in self.leaves)
        return Inputs(leaves, self.d_out.to(place))


@dataclass(frozen=True)
class Contender:
    """A way to compute the same attention. inputs: anywhere. around: a context for both passes."""

    inputs: Inputs
    forward: Callable[..., Any]
    around: Callable[[], Any] = contextlib.nullcontext


class Once(NamedTuple):
    """Results of one forward and backward pass: seconds by pass."""

    seconds: dict[str, float]
    out: Any
    gradients: tuple[Any, ...]


def whole(shape: Shape, device: Device) -> Inputs:
    """The same tensors on all ranks."""
    import torch

    generator = torch.Generator(device.name).manual_seed(0)

    def new(heads: int) -> Any:
        size = (1, shape.length, heads, shape.dim)
        return torch.randn(size, generator=generator, device=device.name, dtype=torch.bfloat16)

    leaves = tuple(new(n).requires_grad_() for n in (shape.heads, shape.kv_heads, shape.kv_heads))
    return Inputs(leaves, new(shape.heads))


def shard(inputs: Inputs, order: str) -> Inputs:
    """This rank's rows."""
    from kernels_dsl.distributed import shard_sequence

    # clone() lets the whole sequence go where its rows would be a view of it
    leaves = tuple(shard_sequence(x.detach(), order=order).clone().requires_grad_() for x in inputs.leaves)
    return Inputs(leaves, shard_sequence(inputs.d_out, order=order).clone())


class Method(NamedTuple):
    """One of our methods: the contender's name, and the arguments that choose it."""

    contender: str
    method: str
    order: str
    deterministic: bool = True


def ours(inputs: Inputs, method: Method) -> Contender:
    """One of our methods, on this rank's rows."""
    from kernels_dsl.distributed import context_parallel_attention

    _, name, order, deterministic = method
    forward = partial(
        context_parallel_attention, method=name, order=order, causal=True, deterministic=deterministic
    )
    return Contender(inputs, forward)


def one_gpu(inputs: Inputs) -> Contender:
    """Our kernel with the whole sequence, on each rank alone. Between its calls that waits in the host's
    memory: beside others' it would be a quarter of a GPU's."""
    import kernels_dsl

    return Contender(inputs.to("cpu"), partial(kernels_dsl.attention, causal=True))


def torchs(inputs: Inputs, shape: Shape, backend: str, rotation: str, device: Device) -> Contender:
    """PyTorch's ring on this rank's rows in zig-zag order, with one backend. K and V: for all heads."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(device.name, (torch.distributed.get_world_size(),))
    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        set_rotate_method(rotation)
        rows = torch.zeros(shape.length, device=device.name)  # makes the context see the length
        with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0]), sdpa_kernel(chosen):
            yield

    def forward(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        views = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True)
        return out.transpose(1, 2)

    return Contender(inputs, forward, around)


def flash_attention_4(inputs: Inputs) -> Contender:
    """flash-attn-4 under a ring of its own, on this rank's rows in zig-zag order."""
    from benchmarks.ring_peer import RingAttention, flash_attention_4

    kernels = flash_attention_4()

    def forward(q: Any, k: Any, v: Any) -> Any:
        return RingAttention.apply(q, k, v, kernels)

    return Contender(inputs, forward)


METHODS = {
    "ring": Method(OURS, "ring", "zigzag"),
    "ring_free": Method("ours_free", "ring", "zigzag", deterministic=False),
    "all_gather": Method("ours_all_gather", "all_gather", "zigzag"),
    "ulysses": Method("ours_ulysses", "ulysses", "contiguous"),
}
"""Our methods by name. FlashAttention-4's ring is as free in the order of dQ's sums as "ring_free"."""


def contenders(inputs: Inputs, shape: Shape, wanted: Wanted, device: Device) -> dict[str, Contender]:
    """All by name. Those with the same rows share tensors."""
    methods = [METHODS[key] for key in METHODS if key in wanted.methods]
    orders = {method.order for method in methods} | ({"zigzag"} if wanted.peers else set())
    rows = {order: shard(inputs, order) for order in orders}
    made = {method.contender: ours(rows[method.order], method) for method in methods}
    if wanted.one_gpu:
        made[ONE_GPU] = one_gpu(inputs)
    for peer in wanted.peers:
        if peer == FLASH_ATTENTION_4:
            with contextlib.suppress(ImportError):
                made[f"{peer}_ring"] = flash_attention_4(rows["zigzag"])
            continue
        backend, _, rotation = peer.partition("/")
        made[f"torch_{backend}/{rotation}"] = torchs(rows["zigzag"], shape, backend, rotation, device)
    return made


def once(contender: Contender, device: Device, ready: Inputs | None = None) -> Once:
    """Runs both passes, on inputs that are `ready` on the device; all ranks start each at once."""
    import torch

    seconds: dict[str, float] = {}
    found: dict[str, Any] = {}

    def timed(named: str, call: Callable[[], Any]) -> None:
        device.synchronize()
        torch.distributed.barrier()
        device.synchronize()
        start = time.perf_counter()
        found[named] = call()
        device.synchronize()
        seconds[named] = time.perf_counter() - start

    leaves, d_out = ready or contender.inputs.to(device.name)
    with contender.around():
        timed("forward", lambda: contender.forward(*leaves))
        timed("backward", lambda: torch.autograd.grad(found["forward"], leaves, d_out))
    return Once(seconds, found["forward"].detach(), found["backward"])


def slowest(seconds: dict[str, float], device: Device) -> dict[str, float]:
    """The same of the slowest rank, on all ranks."""
    import torch

    both = torch.tensor([seconds[named] for named in PASSES], device=device.name, dtype=torch.float64)
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
    return dict(zip(PASSES, both.tolist()))


def verify(shape: Shape, device: Device) -> None:
    """Compares our methods with one GPU on a short sequence. AssertionError where they differ."""
    from kernels_dsl.distributed import unshard_sequence

    inputs = whole(shape, device)
    expected = once(one_gpu(inputs), device)
    for key, method in METHODS.items():
        found = once(ours(shard(inputs, method.order), method), device)
        pairs = zip((found.out, *found.gradients), (expected.out, *expected.gradients))
        for name, (mine, reference) in zip(("out", "dq", "dk", "dv"), pairs):
            mine = unshard_sequence(mine, order=method.order).float()
            error = float((mine - reference.float()).abs().max() / reference.float().abs().max())
            assert error < TOLERANCE, f"{key}: {name} has an error of {error}"


def union_us(spans: Iterable[Sequence[float]]) -> list[list[float]]:
    """Spans of time [start, end] that do not overlap, from any."""
    found: list[list[float]] = []
    for start, end in sorted(map(tuple, spans)):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def exposed_us(events: Iterable[dict[str, Any]]) -> float:
    """The time in which kernels of NCCL run and no other: of a Chrome trace's events."""
    spans: dict[bool, list[list[float]]] = {True: [], False: []}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            start = float(event["ts"])
            spans["nccl" in event["name"].lower()].append([start, start + float(event["dur"])])
    busy, compute = (union_us(x) for x in (spans[True] + spans[False], spans[False]))
    return sum(end - start for start, end in busy) - sum(end - start for start, end in compute)


def traced(contender: Contender, device: Device) -> dict[str, float]:
    """Milliseconds of exposed communication and of all NCCL kernels in one forward and backward pass."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        once(contender, device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    own = [x for x in events if "sendrecv" in str(x.get("name", "")).lower() and x.get("cat") == "kernel"]
    others = [x for x in events if "nccl" not in str(x.get("name", "")).lower()]
    return {
        "exposed_ms": exposed_us([*own, *others]) / 1e3,
        "communication_ms": sum(float(x["dur"]) for x in own) / 1e3,
    }


def measure(shape: Shape, wanted: Wanted, rounds: int, device: Device) -> list[Row]:
    """A row for each pass. A peer that does not run is left out, with its reason."""
    running = contenders(whole(shape, device), shape, wanted, device)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    notes: list[str] = []
    for number in range(rounds + 1):  # the first is not counted
        for name in list(running):
            ready = running[name].inputs.to(device.name)
            before = device.restart_peak()
            try:
                found = once(running[name], device, ready)
            except Exception as error:
                if name.startswith(OURS):
                    raise
                notes.append(f"{name} does not run: {str(error).splitlines()[0][:100]}")
                del running[name], times[name]
                continue
            seconds = slowest(found.seconds, device)
            del found, ready
            if number == 0:
                notes.append(f"{name} {(device.peak() - before) / 2**30:.2f} GiB")
            else:
                times[name].append(seconds)
    if wanted.trace and device.name != "cpu" and OURS in running:
        trace = traced(running[OURS], device)
        notes.append("ring: " + ", ".join(f"{name} {value:.2f}" for name, value in trace.items()))
    rows = []
    for named in PASSES:
        ms = {name: median(x[named] for x in found) * 1e3 for name, found in times.items()}
        title = f"{shape.length}, H {shape.heads}/{shape.kv_heads}, D {shape.dim}, causal, {named}"
        rows.append(
            Row(title, shape.flops(named), ms, "wall clock, slowest rank", "warm", notes="; ".join(notes))
        )
    return rows


def say(row: Row) -> None:
    """Prints a row: time, rate of all GPUs together, and the ratio to one GPU."""
    print(row.title)
    for name, ms in row.ms.items():
        ratio = f"  x{row.ms[ONE_GPU] / ms:.3f} of one GPU" if ONE_GPU in row.ms else ""
        print(f"  {name:24} {ms:9.2f} ms {row.tflops(name):8.1f} TFLOPS{ratio}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line, for each rank that torchrun starts; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 2 -m benchmarks.context_parallel",
        description="Context-parallel attention against one GPU and PyTorch's own.",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[131072])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each (default %(default)s)")
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["flash/allgather", "flash/alltoall", "cudnn/allgather", "cudnn/alltoall", FLASH_ATTENTION_4],
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="of ours (all)")
    parser.add_argument("--no-one-gpu", action="store_true", help="without the whole sequence on one GPU")
    parser.add_argument("--no-trace", action="store_true", help="without the exposed communication")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON files")
    args = parser.parse_args(argv)
    import torch

    device = Device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ.get("LOCAL_RANK", 0)))
    start_group(device)
    first = torch.distributed.get_rank() == 0
    sizes = {"heads": args.heads, "kv_heads": args.kv_heads, "dim": args.dim}
    verify(Shape(min(CHECKED, *args.lengths), **sizes), device)
    wanted = Wanted(args.methods, args.peers, not args.no_one_gpu, not args.no_trace)
    rows: list[Row] = []
    for length in args.lengths:
        rows += measure(Shape(length, **sizes), wanted, args.rounds, device)
        if first:
            for row in rows[-2:]:
                say(row)
            print(rows[-1].notes.replace("; ", "\n"), flush=True)
            if device.name == "cuda":
                harness.write(
                    "context_parallel", machine.header(), [asdict(row) for row in rows], args.results
                )
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
