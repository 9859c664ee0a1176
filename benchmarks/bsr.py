"""Block-sparse GEMM against torch's two BSR products, dense cuBLAS, and cuBLAS over gathered tiles.

    python -m benchmarks.bsr                        # everything
    python -m benchmarks.bsr --suite rows           # the six rows and (512 x 112) alone

Suites: `rows` (8192 x 8192 x 8192 with random kept blocks), `density` (time against density for each block
size, and where dense cuBLAS becomes faster), `patterns` (power law against uniform; one full row among short
ones by few columns, with and without cutting it into pieces), `backward` (gradients of the values and of the
dense factor), `fp8` (e4m3 factors with a scale a block, against the same pattern in bf16 and against dense
products of both types), `host` (host time of an eager call).
Operations counted: 2 · kept blocks · rows · columns of a block · N, the useful ones, for dense cuBLAS too. B
is (K, N) with N contiguous. `bmm`: cuBLAS over tiles gathered for each row, in one batch, gathering included;
it needs rows of equal length.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, machine
from benchmarks.harness import OURS, Case
from kernels_dsl.config.bsr import BsrProblem, choose
from kernels_dsl.measure import Call, host_us, interleaved

DEVICE = "cuda"
SIZE = 8192
ROWS = (
    ((128, 128), 16),
    ((64, 64), 32),
    ((32, 32), 64),
    ((16, 16), 128),
    ((128, 128), 6),
    ((64, 64), 13),
)
WIDE_BLOCK = ((512, 112), 16)
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
BLOCKS = (16, 32, 64, 128)
HEAVY_N = 512
WHOLE = "ours_whole"
"""Ours without cutting lists into pieces."""
PEERS = ("torch", "addmm", "dense", "bmm", "sm80")
SUITES = ("rows", "density", "patterns", "backward", "fp8", "host")


@dataclass(frozen=True)
class Shape:
    """One product: a grid of blocks, `kept` of them in each row (on average, for other patterns), and N."""

    block: tuple[int, int]
    kept: int
    grid: tuple[int, int]
    n: int = SIZE
    pattern: str = "uniform"

    @property
    def name(self) -> str:
        """Block, kept of all, the pattern where it is not the uniform one, and N where it is another."""
        kind = "" if self.pattern == "uniform" else f" {self.pattern.replace('_', ' ')}"
        columns = "" if self.n == SIZE else f", N {self.n}"
        return f"{self.block[0]}x{self.block[1]}, {self.kept} of {self.grid[1]}{kind}{columns}"

    @property
    def flops(self) -> float:
        """Of the kept blocks."""
        more = self.grid[1] - self.kept if self.pattern == "one_heavy_row" else 0
        return 2.0 * (self.kept * self.grid[0] + more) * self.block[0] * self.block[1] * self.n


def square(block: tuple[int, int], kept: int, pattern: str = "uniform") -> Shape:
    """8192 x 8192 x 8192, or the nearest number of whole blocks below."""
    return Shape(block, kept, (SIZE // block[0], SIZE // block[1]), SIZE, pattern)


def operands(shape: Shape, seed: int = 0) -> tuple[Any, Any]:
    """The sparse matrix as a `BsrTensor` and b (K, N), bf16, N(0, 1)."""
    import torch

    from kernels_dsl import BsrTensor
    from reference.bsr import PATTERNS

    generator = torch.Generator().manual_seed(seed)
    mask = PATTERNS[shape.pattern](*shape.grid, shape.kept, generator).to(DEVICE)
    on_gpu = torch.Generator(DEVICE).manual_seed(seed)
    crow = torch.zeros(shape.grid[0] + 1, dtype=torch.int32, device=DEVICE)
    crow[1:] = mask.sum(1).cumsum(0)
    col = mask.nonzero(as_tuple=True)[1].to(torch.int32)
    values = torch.randn(len(col), *shape.block, generator=on_gpu, device=DEVICE, dtype=torch.bfloat16)
    m, k = shape.grid[0] * shape.block[0], shape.grid[1] * shape.block[1]
    b = torch.randn(k, shape.n, generator=on_gpu, device=DEVICE, dtype=torch.bfloat16)
    return BsrTensor(crow, col, values, (m, k)), b


def peer_calls(shape: Shape, sparse: Any, b: Any) -> dict[str, Call]:
    """torch's BSR products, dense cuBLAS, and cuBLAS over gathered tiles."""
    import torch
    from torch.sparse._triton_ops import bsr_dense_addmm

    bsr, dense = sparse.to_torch(), sparse.to_dense()
    out = torch.empty(sparse.shape[0], shape.n, dtype=b.dtype, device=DEVICE)
    calls: dict[str, Call] = {
        "torch": lambda i: bsr @ b,
        "addmm": lambda i: bsr_dense_addmm(out, bsr, b, beta=0),
        "dense": lambda i: torch.mm(dense, b, out=out),
    }
    if shape.pattern == "uniform":
        (bm, bk), kept = shape.block, shape.kept
        rows = shape.grid[0]
        left = sparse.values.view(rows, kept, bm, bk).transpose(1, 2).reshape(rows, bm, kept * bk)
        at = sparse.col_indices.long()
        panels = b.view(-1, bk, shape.n)
        # All rows' panels at once are `density` times rows times B: as many rows at a time as 4 GB hold.
        step = max(1, min(rows, (1 << 32) // (kept * bk * shape.n * 2)))

        def bmm(i: int) -> None:
            for first in range(0, rows, step):
                some = slice(first, min(first + step, rows))
                gathered = panels[at[some.start * kept : some.stop * kept]].view(-1, kept * bk, shape.n)
                torch.bmm(left[some], gathered, out=out.view(rows, bm, shape.n)[some])

        calls["bmm"] = bmm
    return calls


def verify(sparse: Any, b: Any, result: Any) -> None:
    """Raises where the product differs from that of the dense matrix by more than rounding."""
    import torch

    expected = torch.mm(sparse.to_dense(), b, out_dtype=torch.float32)
    error = (result.float() - expected).abs().max().item()
    if not error <= 0.01 * expected.abs().max().item():
        raise AssertionError(f"the result is off by {error}")


def case(shape: Shape, peers: Sequence[str]) -> Case:
    """One row: ours, our SM80-class kernel ("sm80") and the peers, on the same operands."""
    import torch

    from kernels_dsl import bsr_gemm

    sparse, b = operands(shape)
    out = torch.empty(sparse.shape[0], shape.n, dtype=b.dtype, device=DEVICE)
    calls: dict[str, Call] = {OURS: lambda i: bsr_gemm(sparse, b, out=out)}
    others = peer_calls(shape, sparse, b)
    others["sm80"] = lambda i: bsr_gemm(sparse, b, out=out, family="sm80")
    if WHOLE in peers:
        config = whole_lists(shape, sparse)
        others[WHOLE] = lambda i: bsr_gemm(sparse, b, out=out, config=config)
    calls.update({name: others[name] for name in peers if name in others})

    def check() -> None:
        for name in {OURS, "sm80", WHOLE} & calls.keys():
            out.fill_(float("nan"))
            calls[name](0)
            verify(sparse, b, out)

    return Case(shape.name, shape.flops, calls, verify=check)


def one_heavy_row(extent: int) -> Shape:
    """One full block row among rows of 256 elements of K, by few columns: what pieces of lists are for."""
    return Shape((extent, extent), 256 // extent, (SIZE // extent, SIZE // extent), HEAVY_N, "one_heavy_row")


def whole_lists(shape: Shape, sparse: Any) -> Any:
    """The configuration on Hopper, without pieces of lists; None elsewhere, where there are none."""
    from kernels_dsl.ops.target import target_of

    (m, k), (bm, bk) = (extent * block for extent, block in zip(shape.grid, shape.block)), shape.block
    hopper = "sm90" in target_of(sparse.values).families(None)
    return choose(BsrProblem(m, shape.n, k, sparse.nnz, bm, bk)) if hopper else None


def fp8_case(shape: Shape) -> Case:
    """One row: e4m3 factors, a scale a kept block; bf16 factors of the same pattern; dense products."""
    import torch

    from kernels_dsl import bsr_gemm, bsr_scaled_gemm, quantize

    sparse, b = operands(shape)
    values, scales = quantize(sparse.values, scaling="matrix")
    b8, b_scale = quantize(b.mT, scaling="tensor")  # (N, K): fp8 instructions read along K
    small, small_b = sparse.with_values(values), b8.mT
    dense = sparse.to_dense()
    dense8, dense_scale = quantize(dense, scaling="tensor")
    out = torch.empty(sparse.shape[0], shape.n, dtype=b.dtype, device=DEVICE)

    def scaled_mm(i: int) -> object:
        return torch._scaled_mm(dense8, small_b, dense_scale, b_scale, out_dtype=b.dtype, use_fast_accum=True)

    calls: dict[str, Call] = {
        OURS: lambda i: bsr_scaled_gemm(small, small_b, scales, b_scale, out=out),
        "bf16": lambda i: bsr_gemm(sparse, b, out=out),
        "dense": lambda i: torch.mm(dense, b, out=out),
        "dense_fp8": scaled_mm,
    }

    def check() -> None:
        out.fill_(float("nan"))
        calls[OURS](0)
        # What is left is the tensor cores' sum of 128 of K and the output's rounding.
        exact = sparse.with_values((values.float() * scales).to(torch.bfloat16))
        verify(exact, (b8.float() * b_scale).mT.to(torch.bfloat16), out)

    return Case(shape.name, shape.flops, calls, verify=check)


def cases(shapes: Sequence[Shape], peers: Sequence[str]) -> Iterator[Case]:
    """One by one, so that only one's tensors are alive."""
    import torch

    for shape in shapes:
        yield case(shape, peers)
        torch.cuda.empty_cache()


def density_rows(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds against density, ours by block size and dense cuBLAS, taken in turns."""
    import torch

    from kernels_dsl import bsr_gemm

    rows = []
    for density in DENSITIES:
        calls: dict[str, Call] = {}
        for extent in BLOCKS:
            columns = SIZE // extent
            shape = square((extent, extent), max(1, round(density * columns)))
            sparse, b = operands(shape)
            out = torch.empty(SIZE, SIZE, dtype=b.dtype, device=DEVICE)
            calls[str(extent)] = lambda i, s=sparse, b=b, out=out: bsr_gemm(s, b, out=out)  # type: ignore[misc]
        dense = torch.randn(SIZE, SIZE, dtype=b.dtype, device=DEVICE)
        calls["dense"] = lambda i, x=dense, b=b, out=out: torch.mm(x, b, out=out)  # type: ignore[misc]
        timings = interleaved(calls, rounds=rounds)
        row: dict[str, Any] = {"name": f"{density:.0%}"}
        row.update({f"{name}_ms": timing.ms for name, timing in timings.items()})
        rows.append(row)
        print("  ".join(f"{key} {value:.4f}" if key != "name" else value for key, value in row.items()))
    rows.append({"name": "crossover", **crossovers(rows)})
    print(rows[-1])
    return rows


def crossovers(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Density in per cent at which each block size takes as long as dense cuBLAS, between measured points."""
    found: dict[str, Any] = {}
    for extent in BLOCKS:
        name = f"{extent}_ms"
        points = [(float(row["name"].rstrip("%")), row[name] / row["dense_ms"]) for row in rows]
        found[name] = None
        for (low, fast), (high, slow) in itertools.pairwise(points):
            if fast < 1 <= slow:
                found[name] = low + (high - low) * (1 - fast) / (slow - fast)
                break
    return {**found, "dense_ms": None}


def _ignoring(function: Any, first: Any, second: Any, *rest: Any) -> object:
    """function(first, second, ...) for a call that gets the number of an input set last."""
    return function(first, second, *rest[:-1])


def backward_rows(rounds: int) -> list[dict[str, Any]]:
    """TFLOPS of forward, gradient of the values and gradient of the dense factor: equal work each."""
    import torch

    from kernels_dsl import bsr_gemm, bsr_sddmm

    rows = []
    for block, kept in ROWS[:4]:
        shape = square(block, kept)
        sparse, b = operands(shape)
        g = torch.randn(sparse.shape[0], shape.n, dtype=b.dtype, device=DEVICE)
        pair = (sparse.t(), b.t())  # views are made beforehand: they are the caller's host time
        calls: dict[str, Call] = {
            "forward": partial(_ignoring, bsr_gemm, sparse, b),
            "values": partial(_ignoring, bsr_sddmm, g, pair[1], sparse),
            "dense": partial(_ignoring, bsr_gemm, pair[0], g),
        }
        timings = interleaved(calls, rounds=rounds)
        rates = {name: shape.flops / timing.ms / 1e9 for name, timing in timings.items()}
        both = 2 / (1 / rates["values"] + 1 / rates["dense"])
        row = {"name": shape.name, **rates, "backward_by_forward": both / rates["forward"]}
        rows.append(row)
        print("  ".join(f"{key} {value:.2f}" if key != "name" else str(value) for key, value in row.items()))
    return rows


def host_rows() -> list[dict[str, Any]]:
    """Host microseconds of an eager call at a size where the GPU outruns the host."""
    import torch

    from kernels_dsl import bsr_gemm, bsr_scaled_gemm, quantize

    shape = Shape((64, 64), 2, (4, 8), 256)
    sparse, b = operands(shape)
    out = torch.empty(sparse.shape[0], shape.n, dtype=b.dtype, device=DEVICE)
    bsr = sparse.to_torch()
    values, scales = quantize(sparse.values, scaling="matrix")
    b8, b_scale = quantize(b.mT, scaling="tensor")
    fp8, b8 = sparse.with_values(values), b8.mT
    timed = {
        "bsr_gemm(BsrTensor, b, out=)": lambda: bsr_gemm(sparse, b, out=out),
        "bsr_gemm(BsrTensor, b)": lambda: bsr_gemm(sparse, b),
        "bsr_gemm(torch.sparse_bsr, b)": lambda: bsr_gemm(bsr, b),
        "bsr_scaled_gemm(BsrTensor, b, …, out=)": lambda: bsr_scaled_gemm(fp8, b8, scales, b_scale, out=out),
        "bsr_scaled_gemm(BsrTensor, b, …)": lambda: bsr_scaled_gemm(fp8, b8, scales, b_scale),
        "torch: sparse_bsr @ b": lambda: bsr @ b,
    }
    rows = []
    for name, call in timed.items():
        rows.append({"name": name, "host_us": host_us(call)})
        print(f"{name:>40}  {rows[-1]['host_us']:6.2f} us a call on the host")
    return rows


def run(suites: Sequence[str], rounds: int, results: Path) -> None:
    """Run the chosen suites one after the other; each writes its own file."""
    if "rows" in suites:
        wide = Shape(WIDE_BLOCK[0], WIDE_BLOCK[1], (16, SIZE // 112))
        shapes = [square(block, kept) for block, kept in ROWS] + [wide]
        harness.run_suite("bsr_rows", cases(shapes, PEERS), rounds=rounds, results=results)
    if "patterns" in suites:
        shapes = [square(b, kept, p) for b, kept in ROWS[:4] for p in ("uniform", "power_law")]
        heavy = [one_heavy_row(extent) for extent in BLOCKS[::-1]]
        rows = itertools.chain(cases(shapes, ("torch",)), cases(heavy, ("torch", WHOLE)))
        harness.run_suite("bsr_patterns", rows, rounds=rounds, results=results)
    if "density" in suites:
        harness.write("bsr_density", machine.header(), density_rows(rounds), results)
    if "fp8" in suites:
        shapes = [square(block, kept) for block, kept in (*ROWS, ((128, 128), 32))]
        harness.run_suite("bsr_fp8", map(fp8_case, shapes), rounds=rounds, results=results)
    if "backward" in suites:
        harness.write("bsr_backward", machine.header(), backward_rows(rounds), results)
    if "host" in suites:
        harness.write("bsr_host", machine.header(), host_rows(), results)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.bsr`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bsr", description="Block-sparse GEMM.")
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each (default %(default)s)")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON files")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    run(args.suite or SUITES, args.rounds, args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
