"""Training on several GPUs: a tiny language model, tensor and context parallelism, beside one GPU's curve.

    python -m examples.train_tiny --nproc 4 --tp 2 --linear fp8 --plot curve.svg

The program runs itself under torchrun twice, with one rank and with `--nproc`, and compares the two loss
curves. Ranks form a mesh of (context, tensor): `context_parallel_attention` shares the sequence along the
first dimension, along which FSDP2 also shards parameters and averages gradients; `parallelize_module` shares
heads and features along the second. With as many GPUs as ranks they talk through NCCL; otherwise they are
CPU processes with gloo, and kernels run in the emulator at toy size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kernels_dsl
from examples.place import size
from kernels_dsl.distributed import (
    BsrColwiseParallel,
    BsrRowwiseParallel,
    context_parallel_attention,
    shard_sequence,
)

VOCABULARY = 61
BATCHES = size(64, 1)
LINEAR = ("dense", "fp8", "sparse")
AGREE = 0.02
"""Relative difference of the two curves: bf16 sums in another order, fp8 scales of a rank's own columns. Of a
loss that is nearly gone, to a twentieth of the first one."""


class Sizes(NamedTuple):
    """Extents of the model and of a step."""

    batch: int = size(2, 1)
    length: int = size(4096, 32)
    width: int = size(1024, 64)
    hidden: int = size(4096, 128)
    heads: int = size(8, 4)
    layers: int = size(4, 1)


class Block(torch.nn.Module):
    """A transformer's layer: causal attention over the shared sequence, then a gated pair of products."""

    def __init__(self, sizes: Sizes, linear: str, context: DeviceMesh) -> None:
        super().__init__()
        width, self.context, self.head_dim = sizes.width, context, sizes.width // sizes.heads
        self.attention_norm, self.mlp_norm = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        make = _maker(linear)
        self.gate, self.up = make(width, sizes.hidden), make(width, sizes.hidden)
        self.down = make(sizes.hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))
        seen = context_parallel_attention(q, k, v, self.context, order="zigzag", causal=True)
        x = x + self.o(seen.flatten(-2))
        normed = self.mlp_norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


class Model(torch.nn.Module):
    """Tokens and their positions, layers, and the logits of the next tokens."""

    def __init__(self, sizes: Sizes, linear: str, context: DeviceMesh) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, sizes.width)
        self.positions = torch.nn.Embedding(sizes.length, sizes.width)
        self.layers = torch.nn.ModuleList(Block(sizes, linear, context) for _ in range(sizes.layers))
        self.norm = torch.nn.RMSNorm(sizes.width)
        self.logits = torch.nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))


def _maker(linear: str) -> Callable[[int, int], torch.nn.Module]:
    """Makes the MLP's layers of this kind from (in features, out features)."""
    if linear == "fp8":
        return lambda rows, columns: kernels_dsl.ScaledLinear(rows, columns, bias=False, recipe="row")
    if linear == "dense":
        return lambda rows, columns: torch.nn.Linear(rows, columns, bias=False)
    block = size(64, 16), size(64, 16)

    def sparse(rows: int, columns: int) -> torch.nn.Module:
        """Half of the blocks of each block row and column, as a checkerboard: ranks have equal shares."""
        i, j = (torch.arange(n // side) for n, side in zip((columns, rows), block))
        dense = torch.nn.Linear(rows, columns, bias=False, dtype=torch.bfloat16)
        return kernels_dsl.BsrLinear.from_linear(dense, block, mask=(i[:, None] + j) % 2 == 0)

    return sparse


def parallel(model: Model, mesh: DeviceMesh, linear: str) -> None:
    """Shares the model's parameters: heads and features along "tensor", what is left along "context"."""
    column: Any = BsrColwiseParallel() if linear == "sparse" else ColwiseParallel()
    row: Any = BsrRowwiseParallel() if linear == "sparse" else RowwiseParallel()
    heads = dict.fromkeys(("q", "k", "v"), ColwiseParallel())
    plan = {**heads, "o": RowwiseParallel(), "gate": column, "up": column, "down": row}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if mesh["tensor"].size() > 1:
            parallelize_module(layer, mesh["tensor"], plan)
        # Block-sparse values are bf16 for the optimizer too, and FSDP shards one dtype at a time.
        alone = (layer.gate, layer.up, layer.down) if linear == "sparse" else ()
        for module in (*alone, layer):
            fully_shard(module, mesh=mesh["context"], mp_policy=policy)
    fully_shard(model, mesh=mesh["context"], mp_policy=policy)


def train(options: argparse.Namespace) -> list[float]:
    """The loss of each step, in a rank of the group."""
    on_gpu = _gpus_suffice(dist.get_world_size())
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    tp = min(options.tp, dist.get_world_size())
    mesh = init_device_mesh(
        device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=("context", "tensor")
    )
    torch.manual_seed(0)  # the same parameters on all ranks
    sizes = Sizes()
    with device:
        model = Model(sizes, options.linear, mesh["context"])
    parallel(model, mesh, options.linear)
    # Parameters are DTensors on meshes of one and of two dimensions, which `foreach` would put in one list.
    optimizer = torch.optim.AdamW(model.parameters(), lr=size(3, 30) * 1e-4, foreach=False)
    losses, start = [], time.perf_counter()
    for step in range(options.steps):
        tokens = _batch(sizes, step % BATCHES)
        place: dict[str, Any] = {"group": mesh["context"], "dim": 1, "order": "zigzag"}
        inputs, targets = (shard_sequence(x, **place).to(device) for x in (tokens[:, :-1], tokens[:, 1:]))
        positions = shard_sequence(torch.arange(sizes.length)[None], **place).to(device)
        logits = model(inputs, positions).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # equal numbers of tokens on all ranks
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            rate = (step + 1) * sizes.batch * sizes.length / (time.perf_counter() - start)
            done = f"step {step + 1} of {options.steps}"
            print(f"{done}: loss {losses[-1]:.4f}, {rate:,.0f} tokens/s", flush=True)
    return losses


def _batch(sizes: Sizes, seed: int) -> torch.Tensor:
    """Tokens that follow a rule: each is three times the one before, plus the sequence's own constant."""
    draw = torch.Generator().manual_seed(seed)
    token, constant = torch.randint(VOCABULARY, (2, sizes.batch), generator=draw)
    rows = [token]
    for _ in range(sizes.length):
        rows.append((3 * rows[-1] + constant % 4) % VOCABULARY)
    return torch.stack(rows, 1)


def _gpus_suffice(ranks: int) -> bool:
    return torch.cuda.device_count() >= ranks


def _rank(options: argparse.Namespace) -> None:
    """Trains in a process of torchrun, and leaves the losses where the parent reads them."""
    ranks = int(os.environ["WORLD_SIZE"])
    if _gpus_suffice(ranks):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if _gpus_suffice(ranks) else "gloo")
    losses = train(options)
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(losses))
    dist.destroy_process_group()


def curve(ranks: int, options: argparse.Namespace) -> list[float]:
    """The losses of a run of its own with so many ranks."""
    print(f"{ranks} rank{'s' * (ranks > 1)}: {'GPUs' if _gpus_suffice(ranks) else 'CPU processes, emulated'}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not _gpus_suffice(ranks):
        environment["KERNELS_DSL_EMULATE"] = "sm_89"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "losses.json")
        own = ["--result", str(result), "--tp", str(options.tp), "--steps", str(options.steps)]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "-m", "examples.train_tiny", *own, "--linear", options.linear,
        ]  # fmt: skip
        subprocess.run(command, env=environment, check=True)
        return json.loads(result.read_text())


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Draws the curves into an SVG, PNG or PDF file."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 3.5), layout="constrained")).subplots()
    for style, (name, losses) in zip(("-", "--"), curves.items()):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"plotted in {path}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="ranks, of which tp · cp")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share heads and features")
    parser.add_argument("--linear", choices=LINEAR, default="dense", help="the MLP's layers")
    parser.add_argument("--steps", type=int, default=size(200, 2))
    parser.add_argument("--plot", metavar="FILE", help="draw both curves (.svg, .png)")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.nproc % options.tp:
        parser.error(f"--tp is {options.tp}, must divide --nproc, {options.nproc}")
    if options.result:
        _rank(options)
        return
    single, shared = (curve(ranks, options) for ranks in (1, options.nproc))
    if options.plot:
        plot({"1 rank": single, f"{options.nproc} ranks, tp {options.tp}": shared}, options.plot)
    worst = max(abs(a - b) / max(a, single[0] / 20) for a, b in zip(single, shared))
    print(f"loss {shared[0]:.4f} -> {shared[-1]:.4f}; the curves differ by at most {worst:.2%}")
    assert worst <= AGREE and math.isfinite(worst), "the ranks' curve is not the one rank's"
    assert shared[-1] < shared[0], "the loss must fall"


if __name__ == "__main__":
    main(sys.argv[1:])
