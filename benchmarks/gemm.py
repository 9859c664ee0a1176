"""Dense GEMM against cuBLAS (torch.mm) and quack.

    python -m benchmarks.gemm                          # everything
    python -m benchmarks.gemm --suite shapes           # the six shapes alone
    python -m benchmarks.gemm --suite ragged --dtype fp16

Suites: `shapes` (six large shapes, best of quack's four configurations), `ragged` (sizes that fit no tile),
`host` (host time of an eager call), `first-call` (cold and warm, each in its own process).
A is (M, K) and B is (N, K) in memory, both with K contiguous, as a linear layer has them.
Operations counted: 2·M·N·K.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import first_call, harness, machine
from benchmarks.harness import DTYPES, OURS, Case
from kernels_dsl.measure import Call, host_us
from reference import tolerance
from reference.gemm import gemm as reference_gemm
from reference.gemm import gemm_same_dtype

SHAPES = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (8192, 8192, 1024),
    (16384, 1024, 4096),
    (64, 8192, 8192),
)
RAGGED = (
    (1000, 2056, 4104),
    (4095, 4097, 511),
    (17, 8192, 8192),
    (1, 4096, 4096),
    (3, 11008, 4096),
    (127, 129, 131),
    (333, 4096, 4096),
    (1024, 1000, 1024),
    (1536, 1528, 1544),
    (2000, 2000, 2000),
    (2049, 2049, 2049),
    (3000, 3000, 64),
    (3072, 5120, 1280),
    (4000, 4000, 1000),
    (4104, 4104, 4104),
    (5000, 5000, 5000),
    (6000, 200, 8192),
    (200, 6000, 8192),
    (7168, 2304, 1152),
    (8191, 1023, 2047),
    (8200, 520, 1032),
    (10000, 1000, 3000),
    (12288, 96, 4096),
    (32768, 384, 384),
)
QUACK_CONFIGS = {
    "128x192 pp 2x1": ((128, 192, 2, 1), True),
    "128x256 coop 2x1": ((128, 256, 2, 1), False),
    "256x128 coop 2x1": ((256, 128, 2, 1), False),
    "128x128 pp 2x1": ((128, 128, 2, 1), True),
}
DEVICE = "cuda"
PEERS = ("cublas", "quack")
SUITES = ("shapes", "ragged", "host", "first-call")


@dataclass(frozen=True)
class Options:
    """Settings of a measurement. cold: rotate through input sets that are larger than L2 in sum."""

    rounds: int
    results: Path
    cold: bool


def operands(shape: tuple[int, int, int], dtype: str, seed: int = 0) -> tuple[Any, Any]:
    """a (M, K) and b (N, K) on `DEVICE`, N(0, 1): zeros would be timed at clocks that no data reaches."""
    import torch

    m, n, k = shape
    generator = torch.Generator(DEVICE).manual_seed(seed)
    kind = getattr(torch, DTYPES[dtype])
    a, b = (torch.randn(rows, k, generator=generator, device=DEVICE, dtype=kind) for rows in (m, n))
    return a, b


def sets_for_cold_l2(shape: tuple[int, int, int], element_bytes: int, l2_bytes: int) -> int:
    """Number of input sets with which no call finds its operands in L2: twice its size, at most 64 sets."""
    m, n, k = shape
    return min(64, 1 + -(-2 * l2_bytes // ((m * k + n * k + m * n) * element_bytes)))


def quack_calls(sets: Sequence[tuple[Any, Any]], out: Any) -> dict[str, Call]:
    """quack's configurations as calls; none where quack is not installed."""
    try:
        from quack.gemm import gemm as quack_gemm
    except ImportError:
        return {}

    def make(tile: tuple[int, int, int, int], pingpong: bool) -> Call:
        return lambda i: quack_gemm(*sets[i], out, None, None, *tile, pingpong=pingpong)

    return {f"quack/{name}": make(tile, pingpong) for name, (tile, pingpong) in QUACK_CONFIGS.items()}


def case(shape: tuple[int, int, int], dtype: str, peers: Sequence[str], cold: bool = False) -> Case:
    """One shape: ours, cuBLAS and quack on the same operands, each into an output of its own."""
    import torch

    import kernels_dsl

    m, n, k = shape
    first = operands(shape, dtype)
    count = 1
    if cold:
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        count = sets_for_cold_l2(shape, first[0].element_size(), l2_bytes)
    sets = [first] + [operands(shape, dtype, seed) for seed in range(1, count)]
    outputs = {name: torch.empty(m, n, dtype=first[0].dtype, device=DEVICE) for name in (OURS, *peers)}
    # The transposes are made beforehand: making a view is host time of the caller's, not of the call.
    pairs = [(a, b.t()) for a, b in sets]
    calls: dict[str, Call] = {OURS: lambda i: kernels_dsl.gemm(*pairs[i], out=outputs[OURS])}
    if "cublas" in peers:
        calls["cublas"] = lambda i: torch.mm(*pairs[i], out=outputs["cublas"])
    if "quack" in peers:
        calls.update(quack_calls(sets, outputs["quack"]))

    def verify() -> None:
        out = outputs[OURS].fill_(float("nan"))
        calls[OURS](0)
        tolerance.check(out, reference_gemm(*pairs[0]), gemm_same_dtype(*pairs[0]), case=str(shape))

    name = "x".join(str(size) for size in shape)
    return Case(name, 2.0 * m * n * k, calls, sets=count, verify=verify)


def cases(
    shapes: Sequence[tuple[int, int, int]], dtype: str, peers: Sequence[str], cold: bool = False
) -> Iterator[Case]:
    """The cases one by one, so that only one shape's tensors are alive."""
    import torch

    for shape in shapes:
        yield case(shape, dtype, peers, cold)
        torch.cuda.empty_cache()


def host_rows(dtype: str, peers: Sequence[str]) -> list[dict[str, Any]]:
    """Host microseconds of an eager call with `out=`, at a size where the GPU outruns the host."""
    shape = (256, 256, 256)
    current = case(shape, dtype, peers)
    rows = []
    for name, call in current.calls.items():
        try:
            microseconds = host_us(lambda call=call: call(0))  # type: ignore[misc]
        except Exception as error:
            if name == OURS:
                raise
            print(f"{name:>24}  not measured: {type(error).__name__}: {error}")
            continue
        rows.append({"name": name, "host_us": microseconds})
        print(f"{name:>24}  {microseconds:6.2f} us a call on the host")
    return rows


def run(suites: Sequence[str], dtype: str, peers: Sequence[str], options: Options) -> None:
    """Run the chosen suites one after the other; each writes its own file."""
    # tf32 is what our fp32 GEMM computes, so cuBLAS gets to use it too.
    if dtype == "fp32":
        import torch

        torch.backends.cuda.matmul.allow_tf32 = True
    rounds, results = options.rounds, options.results
    stem = f"gemm_{dtype}" + "_cold" * options.cold
    if "shapes" in suites:
        shapes = cases(SHAPES, dtype, peers, options.cold)
        harness.run_suite(stem, shapes, rounds=rounds, results=results)
    if "ragged" in suites:
        ragged = cases(RAGGED, dtype, [peer for peer in peers if peer != "quack"], options.cold)
        harness.run_suite(f"{stem}_ragged", ragged, rounds=rounds, results=results)
    if "host" in suites:
        print("host time, 256x256x256")
        harness.write(f"gemm_{dtype}_host", machine.header(), host_rows(dtype, peers), results)
    if "first-call" in suites:
        rows = first_call.measure(dtype)
        for row in rows:
            print(first_call.line(row))
        harness.write(f"gemm_{dtype}_first_call", machine.header(), rows, results)


def parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, suites: Sequence[str], dtypes: Sequence[str]
) -> argparse.Namespace:
    """The arguments of a benchmark of products, `suite` and `peers` as lists. Ends the program where they are
    wrong, or there is no GPU."""
    parser.add_argument("--suite", action="append", choices=suites, help="may be repeated; default: all")
    parser.add_argument("--dtype", choices=dtypes, default="bf16")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated, of: %(default)s")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each (default %(default)s)")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON files")
    args = parser.parse_args(argv)
    args.suite = args.suite or list(suites)
    args.peers = [peer for peer in args.peers.split(",") if peer]
    unknown = sorted(set(args.peers) - set(PEERS))
    if unknown:
        parser.error(f"unknown peers {', '.join(unknown)}; known: {', '.join(PEERS)}")
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, must be at least 1")
    import torch

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.gemm`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gemm", description="Dense GEMM against its peers."
    )
    parser.add_argument(
        "--cold", action="store_true", help="rotate inputs, so that each call finds a cold L2"
    )
    args = parsed(parser, argv, SUITES, sorted(DTYPES))
    run(args.suite, args.dtype, args.peers, Options(args.rounds, args.results, args.cold))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
