"""GEMM with a gate or a reduction in its epilogue, against quack and against PyTorch's separate kernels.

    python -m benchmarks.gemm_fused                     # both suites
    python -m benchmarks.gemm_fused --suite gated

Suites: `gated` (silu(gate) * up of alternating columns of the product, as the first half of a SwiGLU layer),
`reduce` (the sums of squares of the result's rows beside it, as an RMSNorm that follows needs them).
A is (M, K) and B is (N, K) in memory, both with K contiguous. quack counts with the best of its default and
four configurations; cuBLAS with `torch.mm` and PyTorch's own operations after it; `ours_two` is our plain
GEMM with the same operations after it. Operations counted: 2·M·N·K.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import gemm, harness
from benchmarks.gemm import QUACK_CONFIGS
from benchmarks.harness import OURS, Case
from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.measure import Call
from reference import gated, reduced, tolerance

SHAPES = (
    (16384, 22016, 4096),
    (4096, 28672, 4096),
    (8192, 8192, 8192),
    (2048, 12288, 4096),
    (256, 28672, 4096),
    (16, 28672, 4096),
)
"""M, N, K: layers of models with 7 to 70 billion parameters, N both halves of a gated layer."""
SUITES = ("gated", "reduce")
_GATE = GATES["swiglu"]


def _quack(name: str, arguments: tuple[Any, ...], extra: dict[str, Any]) -> dict[str, Call]:
    """quack's function `name` in each configuration; none where quack is not installed."""
    try:
        from quack import gemm_interface
        from quack.gemm_config import GemmConfig
    except ImportError:
        return {}
    function = getattr(gemm_interface, name)
    calls: dict[str, Call] = {
        "quack/default": lambda _set: function(*arguments, tuned=False, **extra),
    }
    for title, ((tile_m, tile_n, cluster_m, cluster_n), pingpong) in QUACK_CONFIGS.items():
        config = GemmConfig(
            tile_m=tile_m, tile_n=tile_n, cluster_m=cluster_m, cluster_n=cluster_n, pingpong=pingpong,
            is_dynamic_persistent=False,
        )  # fmt: skip
        calls[f"quack/{title}"] = lambda _set, config=config: function(*arguments, config=config, **extra)  # type: ignore[misc]
    return calls


def _sums_of_squares(d: Any) -> Any:
    return d.float().square().sum(-1)


def gated_case(shape: tuple[int, int, int], dtype: str, peers: Sequence[str]) -> Case:
    """`gemm_gated` with SwiGLU, without its product in memory."""
    import torch

    import kernels_dsl

    a, b = gemm.operands(shape, dtype)
    weight = b.t()
    out = torch.empty(shape[0], shape[1] // 2, dtype=a.dtype, device=a.device)
    calls: dict[str, Call] = {
        OURS: lambda _set: kernels_dsl.gemm_gated(a, weight, out=out),
        f"{OURS}_two": lambda _set: _GATE.of_pairs(kernels_dsl.gemm(a, weight)),
    }
    if "cublas" in peers:
        calls["cublas"] = lambda _set: _GATE.of_pairs(torch.mm(a, weight))
    if "quack" in peers:
        wanted = {"activation": "swiglu", "store_preact": False, "postact_out": torch.empty_like(out)}
        calls.update(_quack("gemm_gated", (a, weight), wanted))

    def verify() -> None:
        out.fill_(float("nan"))
        calls[OURS](0)
        exact, peer = gated.gemm_gated(a, weight).out, gated.gemm_gated_same_dtype(a, weight).out
        tolerance.check(out, exact, peer, case=f"gated {shape}")

    return _case(shape, calls, verify)


def reduced_case(shape: tuple[int, int, int], dtype: str, peers: Sequence[str]) -> Case:
    """`gemm_reduce` with the sum of squares of each row; quack's `gemm_rms` turns it into 1 / rms."""
    import torch

    import kernels_dsl

    a, b = gemm.operands(shape, dtype)
    weight = b.t()
    out = torch.empty(shape[0], shape[1], dtype=a.dtype, device=a.device)
    sums = torch.empty(shape[0], dtype=torch.float32, device=a.device)

    def two(product: Any) -> Any:
        return product, _sums_of_squares(product)

    calls: dict[str, Call] = {
        OURS: lambda _set: kernels_dsl.gemm_reduce(
            a, weight, reduce="sum_squares", out=out, reduced_out=sums
        ),
        f"{OURS}_two": lambda _set: two(kernels_dsl.gemm(a, weight)),
    }
    if "cublas" in peers:
        calls["cublas"] = lambda _set: two(torch.mm(a, weight))
    if "quack" in peers:
        calls.update(_quack("gemm_rms", (a, weight), {"out": torch.empty_like(out)}))

    def verify() -> None:
        out.fill_(float("nan"))
        sums.fill_(float("nan"))
        calls[OURS](0)
        exact = reduced.gemm_reduce(a, weight, reduce="sum_squares")
        peer = reduced.gemm_reduce_same_dtype(a, weight, reduce="sum_squares")
        tolerance.check(out, exact.out, peer.out, case=f"reduce {shape}")
        tolerance.check(sums, exact.reduced, peer.reduced, case=f"sums {shape}")

    return _case(shape, calls, verify)


def _case(shape: tuple[int, int, int], calls: dict[str, Call], verify: Any) -> Case:
    m, n, k = shape
    return Case(f"{m}x{n}x{k}", 2.0 * m * n * k, calls, verify=verify)


MAKERS = {"gated": gated_case, "reduce": reduced_case}


def cases(suite: str, dtype: str, peers: Sequence[str]) -> Iterator[Case]:
    """The cases one by one, so that only one shape's tensors are alive."""
    import torch

    for shape in SHAPES:
        yield MAKERS[suite](shape, dtype, peers)
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.gemm_fused`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gemm_fused", description="Fused epilogues against their peers."
    )
    args = gemm.parsed(parser, argv, SUITES, ("bf16", "fp16"))
    for suite in args.suite:
        rows = cases(suite, args.dtype, args.peers)
        harness.run_suite(f"gemm_{args.dtype}_{suite}", rows, rounds=args.rounds, results=args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
