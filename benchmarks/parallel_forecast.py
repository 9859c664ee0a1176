"""Computed, not measured: bytes, operations and times of the ways to share attention and a layer among GPUs.

    python -m benchmarks.parallel_forecast          # prints docs/reference/parallel_forecast.md
    python -m benchmarks.parallel_forecast --write

Rates of kernels are those that one H200 was measured at (benchmarks/results/h200); those of links are their
makers' figures, in one direction, of which programs get 70 to 90 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import RESULTS, read

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "parallel_forecast.md"
NVLINK, NETWORK = 450e9, 50e9
"""Bytes a second that a GPU sends: to others of its host, and to those of other hosts (400 Gbit/s)."""
A_HOST = 8
BYTES = 2  # of an element
SIZES = (8, 64, 256, 1024)


@dataclass(frozen=True)
class Shape:
    """Attention of one sequence: rows, heads of queries and of keys, head dimension."""

    rows: int = 1 << 20
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    def operations(self, backward: bool) -> float:
        """Causal: half of 4 · S² · H · D forward, 2.5 times as many backward."""
        return 2.0 * self.rows**2 * self.heads * self.dim * (2.5 if backward else 1.0)

    @property
    def kv_bytes(self) -> float:
        """K and V of the whole sequence."""
        return 2.0 * BYTES * self.rows * self.kv_heads * self.dim


@dataclass(frozen=True)
class Layer:
    """A layer of a Llama of 70 billion parameters."""

    hidden: int = 8192
    kv_width: int = 1024
    inner: int = 28672

    @property
    def parameters(self) -> int:
        """Weights of its seven products."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_width + 3 * self.inner)


def link(ranks: int) -> float:
    """Bytes a second of the slowest link among so many GPUs."""
    return NVLINK if ranks <= A_HOST else NETWORK


def rate(suite: str, case: str) -> float:
    """Operations a second of a measured case."""
    _, rows = read(RESULTS / "h200" / f"{suite}.json")
    row = next(row for row in rows if row.name == case)
    return float(row.flops / row.ms["ours"] * 1e3)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f} {unit}"
    return f"{value * 1e6:.0f} µs"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.3g} GB"


def attention_table(shape: Shape) -> str:
    """Context parallelism, forward and backward."""
    forward = shape.operations(False) / rate("attention_forward", "1,16,16384,128 bf16 causal")
    backward = shape.operations(True) / rate("attention_backward", "1,16,16384,128 causal")
    rows = []
    for n in SIZES:
        others = (n - 1) / n
        # Forward K and V; backward both again, and their gradients back. Of the two chunks of a rank another
        # one's queries see one and a half on average.
        ring = 0.75 * 3 * shape.kv_bytes * others
        ulysses = 2 * others / n * shape.rows * BYTES * shape.dim * 2 * (shape.heads + max(shape.kv_heads, n))
        can = n <= shape.heads and shape.heads % n == 0
        rows.append([
            str(n), f"{shape.rows // n:,}", _seconds((forward + backward) / n), _bytes(ring),
            _seconds(ring / link(n)), _seconds(ulysses / link(n)) if can else f"no: {shape.heads} heads",
            f"{_bytes(3 * shape.kv_bytes / n)}, {_bytes(shape.kv_bytes)}",
        ])  # fmt: skip
    head = ("GPUs", "rows of a rank", "computing", "a rank sends in a ring", "sending, ring",
            "sending, Ulysses", "K and V of a rank: ring, all-gather")  # fmt: skip
    return _table(head, rows)


def tensor_table(layer: Layer, tokens: int) -> str:
    """Tensor parallelism of a layer within a host."""
    gemm = rate("gemm_bf16", "8192x8192x8192")
    rows = []
    for n in (2, 4, 8):
        # Two all-reduces of the hidden state forward, two backward.
        sent = 4 * 2 * (n - 1) / n * tokens * layer.hidden * BYTES
        computing = 6.0 * layer.parameters * tokens / n / gemm
        rows.append([str(n), _seconds(computing), _bytes(sent), _seconds(sent / NVLINK),
                     f"{sent / NVLINK / computing:.0%}"])  # fmt: skip
    head = ("GPUs", "computing", "a rank sends", "sending", "sending, of computing")
    return _table(head, rows)


def fsdp_table(layer: Layer) -> str:
    """FSDP2: tokens of a GPU from which on computing takes longer than gathering weights."""
    gemm = rate("gemm_bf16", "8192x8192x8192")
    rows = []
    for n in SIZES:
        # Weights are gathered forward and backward, gradients are scattered.
        sent = 3 * (n - 1) / n * layer.parameters * BYTES
        tokens = sent / link(n) * gemm / (6.0 * layer.parameters)
        rows.append([str(n), _bytes(sent), _seconds(sent / link(n)), f"{tokens:,.0f}"])
    head = ("GPUs", "a rank sends", "sending", "tokens of a GPU that hide it")
    return _table(head, rows)


def page() -> str:
    """The page of the documentation."""
    shape, layer, tokens = Shape(), Layer(), 8192
    hosts, network = f"{NVLINK / 1e9:.0f} GB/s", f"{NETWORK / 1e9:.0f} GB/s"
    return f"""# Several GPUs: a forecast

**Computed, not measured**, by `python -m benchmarks.parallel_forecast`: operations at the rates of one H200
in [our results](../performance.md), bytes at {hosts} between GPUs of a host of {A_HOST} and {network} a GPU
between hosts, which are the makers' figures. Where sending takes less time than computing, a ring can hide
it. How to call what is compared here: [several GPUs](../distributed.md).

## Attention of a sequence that ranks share

Forward and backward, causal, {shape.rows:,} rows, {shape.heads} heads on {shape.kv_heads}, D {shape.dim},
bf16, zig-zag order.

{attention_table(shape)}

- **Ring** up to the size at which sending takes as long as computing. From there on more ranks bring nothing:
  share the batch or the heads.
- **Ulysses** sends less the more ranks there are, but cannot hide it, and needs a multiple of them as heads.
- **All-gather** sends a third more than a ring and keeps all K and V: for sequences of a few thousand rows,
  whose steps are too short to hide anything.

## Tensor parallelism of a layer

A layer of a Llama of 70 billion parameters ({layer.parameters / 1e6:.0f} million), forward and backward,
{tokens:,} tokens, all-reduces of bf16 within a host.

{tensor_table(layer, tokens)}

Between hosts sending takes {NVLINK / NETWORK:.0f} times as long: do not.

## FSDP2 of the same layer

Weights and gradients in bf16, all ranks one group.

{fsdp_table(layer)}

So: FSDP2 first; tensor parallelism within a host where a GPU has fewer tokens than the last column; context
parallelism where one sequence is more than a GPU can hold.
"""


def write() -> str:
    """Write the page of the documentation; says which."""
    PAGE.write_text(page())
    return f"wrote {PAGE}"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page of the documentation")
    if parser.parse_args().write:
        print(write())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
