"""Attention forward against cuDNN, FlashAttention-2 (both by PyTorch's SDPA), FlashAttention-3, flash-attn-4.

    python -m benchmarks.attention                          # everything, some minutes
    python -m benchmarks.attention --suite forward          # may be repeated

Suites, one file of results each: `forward` (dense and causal shapes, packed sequences), `sparse` (windows
and random block lists up to S = 524288), `memory`, `density` (where lists beat dense attention), `builders`
(time of making lists), `small` (CUDA graphs), `host` (host time of an eager call), `error` (against float64),
`sm80` (the SM80-class kernel). Operations counted: 4 · D for each pair of query and key that a mask leaves;
half of all pairs for causal.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import attention_sparse, attention_tables, flash3, harness, machine
from benchmarks.attention_calls import (
    DEVICE,
    Shape,
    causal_pairs,
    compare,
    flash4,
    ours,
    sdpa,
    tensors,
    verifier,
)
from benchmarks.harness import OURS, Case
from kernels_dsl.measure import Call
from reference.attention import Masking

SHAPES = (
    Shape(16, 16, 1024, 128),
    Shape(4, 16, 4096, 128),
    Shape(1, 16, 16384, 128),
    Shape(4, 32, 4096, 64),
    Shape(1, 32, 16384, 64),
    Shape(4, 8, 4096, 256),
    Shape(4, 16, 4096, 96),
    Shape(4, 16, 4096, 192),
    Shape(1, 8, 1024, 64),
    Shape(1, 8, 16384, 64),
)
SMALL = (
    Shape(1, 96, 512, 64, "fp16"),
    Shape(1, 32, 512, 64, "fp16"),
    Shape(1, 8, 512, 64, "fp16"),
    Shape(16, 96, 512, 64, "fp16"),
    Shape(1, 8, 1024, 64),
)
SM80_SHAPES = (
    Shape(4, 16, 4096, 128),
    Shape(4, 32, 4096, 64),
    Shape(1, 16, 16384, 128),
    Shape(4, 16, 4096, 96),
    Shape(4, 16, 4096, 192),
    Shape(4, 8, 4096, 256),
    Shape(16, 16, 1024, 128),
    Shape(1, 8, 16384, 64),
    Shape(1, 8, 1024, 64),
)
PACKED_LENGTHS = (500, 8192, 1024, 3000, 6000, 2048, 7000, 4500)
PEERS = ("cudnn", "fa2", "fa3", "fa4")


@dataclass(frozen=True)
class Options:
    """Settings of a measurement, and the place of its results."""

    rounds: int
    seconds: float
    results: Path


def dense_case(shape: Shape, causal: bool, peers: Sequence[str] = PEERS, **forced: Any) -> Case:
    """Ours and `peers` on one shape; `forced`: further arguments of `kernels_dsl.attention`."""
    q, k, v = tensors(shape)
    calls = {OURS: ours(q, k, v, causal=causal, **forced)}
    for peer in peers:
        calls[peer] = _peer(peer, q, k, v, causal)
    pairs = causal_pairs(shape.length) if causal else float(shape.length) ** 2
    masking = Masking(right=0 if causal else None)
    name = f"{shape} {shape.dtype}" + " causal" * causal
    return Case(name, shape.flops(pairs), calls, verify=verifier(calls[OURS], q, k, v, masking))


def _peer(name: str, q: Any, k: Any, v: Any, causal: bool) -> Call:
    if name == "fa4":
        return flash4(q, k, v, causal=causal)
    return flash3.dense(q, k, v, causal) if name == "fa3" else sdpa(q, k, v, name, causal)


PACKED_NAME = "packed 8 of 500–8192, H 32/8, D 128, causal"
PACKED_FLOPS = sum(4.0 * 32 * 128 * causal_pairs(length) for length in PACKED_LENGTHS)


def packed_inputs() -> tuple[Any, ...]:
    """q, k, v (T, H, 128), 32 query heads on 8 of keys, and where the sequences of PACKED_LENGTHS start."""
    import torch

    total = sum(PACKED_LENGTHS)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(total, heads, 128, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        for heads in (32, 8, 8)
    )
    return q, k, v, torch.tensor([0, *PACKED_LENGTHS]).cumsum(0).int().to(DEVICE)


def packed_case() -> Case:
    """Packed causal sequences."""
    import kernels_dsl

    q, k, v, starts = packed_inputs()
    longest = max(PACKED_LENGTHS)

    def ours_packed(_set: int) -> Any:
        return kernels_dsl.attention_varlen(q, k, v, starts, starts, longest, longest, causal=True)

    def fa4_packed(_set: int) -> Any:
        from flash_attn.cute import flash_attn_varlen_func

        cu = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        return flash_attn_varlen_func(q, k, v, **cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True)

    def verify() -> None:
        out = ours_packed(0)
        for first, length in zip(starts.tolist(), PACKED_LENGTHS):
            rows = slice(first, first + min(length, 512))
            part = (q[None, rows, :4], k[None, rows, :1], v[None, rows, :1])
            compare(out[None, rows, :4], part, Masking(right=0))

    fa3 = flash3.packed(q, k, v, starts, longest, causal=True)
    calls = {OURS: ours_packed, "fa3": fa3, "fa4": fa4_packed}
    return Case(PACKED_NAME, PACKED_FLOPS, calls, verify=verify)


def forward_cases() -> Iterator[Case]:
    """Every shape, dense and causal, and the packed sequences."""
    for shape in SHAPES:
        for causal in (False, True):
            yield from _alone(lambda: dense_case(shape, causal))  # noqa: B023  (called at once)
    yield from _alone(packed_case)


def small_cases() -> Iterator[Case]:
    """Launches of some microseconds, all timed as CUDA graphs."""
    for shape in SMALL:
        for causal in (False, True):
            yield from _alone(lambda: replace(dense_case(shape, causal), graph=True))  # noqa: B023


def sm80_cases() -> Iterator[Case]:
    """The kernel for SM80-class GPUs on this GPU, against FlashAttention-2, which is of that class too."""
    for shape in SM80_SHAPES:
        for causal in (False, True):
            yield from _alone(lambda: dense_case(shape, causal, ("fa2",), family="sm80"))  # noqa: B023


def _alone(make: Callable[[], Case]) -> Iterator[Case]:
    """One case, whose tensors are gone before the next one is made."""
    import torch

    yield make()
    torch.cuda.empty_cache()


RATED = {
    "forward": forward_cases,
    "sparse": attention_sparse.sparse_cases,
    "density": attention_sparse.density_cases,
    "small": small_cases,
    "sm80": sm80_cases,
}
LISTED = {
    "memory": attention_sparse.memory_rows,
    "builders": attention_sparse.builder_rows,
    "host": attention_tables.host_rows,
    "error": attention_tables.error_rows,
}
SUITES = (*RATED, *LISTED)


def run(suites: Sequence[str], options: Options) -> list[str]:
    """Run the chosen suites one after the other; each writes its own file. Returns those that failed."""
    failed = []
    for suite in suites:
        print(f"-- {suite}", flush=True)
        start = time.perf_counter()
        try:
            _run_one(suite, options)
        except Exception:
            traceback.print_exc()
            failed.append(suite)
        print(f"-- {suite} took {time.perf_counter() - start:.0f} s", flush=True)
    return failed


def _run_one(suite: str, options: Options) -> None:
    import torch

    if suite in RATED:
        cases = RATED[suite]()
        harness.run_suite(
            f"attention_{suite}",
            cases,
            rounds=options.rounds,
            seconds=options.seconds,
            results=options.results,
        )
    else:
        rows = harness.as_they_come(LISTED[suite])
        harness.write(f"attention_{suite}", machine.header(), rows, options.results)
    torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.attention`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description="Attention forward against its peers."
    )
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="time each case for at least so long (%(default)s)"
    )
    parser.add_argument("--fa3", type=Path, help=flash3.HELP)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON files")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, must be at least 1")
    import torch

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    flash3.load(args.fa3)
    return 1 if run(args.suite or SUITES, Options(args.rounds, args.seconds, args.results)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
