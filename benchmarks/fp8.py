"""fp8: quantisation against a copy of as many bytes, GEMM against cuBLASLt, the rest against 16 bits.

    python -m benchmarks.fp8 [--suite quantize] [--suite gemm] [--suite grouped] [--suite linear]
                             [--suite attention] [--suite error] [--suite gemm_error] [--suite host]

In "attention", ours is the whole call on fp8 tensors, the transpose of V included; the peers are
FlashAttention-3's on the same tensors, and 16-bit attention, ours and cuDNN's. Making the fp8 tensors is not
in it: that is in "quantize".
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import flash3, fp8_gemm, fp8_grouped, harness, machine
from benchmarks.attention import PACKED_FLOPS, PACKED_LENGTHS, PACKED_NAME, packed_inputs
from benchmarks.attention_calls import DEVICE, Shape, causal_pairs, ours, sdpa, tensors
from benchmarks.harness import OURS, Case
from kernels_dsl.measure import Call, host_us, interleaved

MATRICES = [(8192, 8192), (16384, 7168), (4096, 4096)]
LONG_ROWS = [(4096, 16384), (2048, 32768), (1024, 65536), (512, 131072), (256, 262144)]
LAYERS = [(8192, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192), (16384, 2048, 2048)]
"""Rows, in and out features."""
SHAPES = [
    Shape(4, 16, 4096, 128), Shape(1, 16, 16384, 128), Shape(4, 32, 4096, 64), Shape(1, 32, 16384, 64),
    Shape(4, 8, 4096, 256), Shape(1, 8, 16384, 256),
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "ours_dB": {}, "rotated_dB": {"rotate": True}, "blocks_dB": {"scaling": "block"},
}  # fmt: skip
SETS = 3
"""Inputs that rotate, so that a call does not find its input in L2."""
# (scaling, transpose) -> how often x is read.
PASSES: dict[tuple[str, bool | str], int] = {
    ("tensor", False): 2, ("row", False): 1, ("1x128", False): 1, ("128x128", False): 1,
    ("tensor", "both"): 2, ("1x128", True): 1, ("1x128", "both"): 1, ("128x128", "both"): 1,
    ("row", True): 2, ("row", "both"): 2,
}  # fmt: skip
NAMES: dict[bool | str, str] = {False: "", True: ", transpose", "both": ", both"}


def copies(traffic: int, name: str = "copy") -> dict[str, Call]:
    """Two ways to read half of `traffic` bytes and write as many: the driver's copy, a kernel of PyTorch's.
    Which is the faster one depends on the size."""
    import torch

    words = traffic // 8 // 4096 * 4096
    half = [torch.empty(words, dtype=torch.int32, device=DEVICE) for _ in range(SETS + 1)]
    return {
        f"{name}/driver": lambda i: half[SETS].copy_(half[i]),
        f"{name}/kernel": lambda i: torch.bitwise_not(half[i], out=half[SETS]),
    }


def quantize_rows() -> Iterator[dict[str, Any]]:
    """Time and rate of quantisation, and of the faster copy of as many bytes in the same run.

    "of a copy" counts x as often as a scale that has to be known before makes it necessary to read it, and
    twice for matrices, most of which are read once;
    "of a copy once" counts what would have to be moved if x stayed in the GPU between its two reads.
    """
    import torch

    import kernels_dsl

    cases = [(shape, form) for shape in MATRICES for form in PASSES]
    cases += [(shape, ("row", False)) for shape in LONG_ROWS]
    for shape, (scaling, transpose) in cases:
        x = [torch.randn(shape, device=DEVICE).bfloat16() for _ in range(SETS)]

        def call(i: int, x: Any = x, s: str = scaling, t: bool | str = transpose) -> Any:
            return kernels_dsl.quantize(x[i], scaling=s, transpose=t)

        name = f"{shape[0]}×{shape[1]}, {scaling}{NAMES[transpose]}"
        yield quantize_row(name, call, x[0].numel() * x[0].element_size(), PASSES[scaling, transpose])
        torch.cuda.empty_cache()
    for heads in SHAPES[:3]:
        inputs = [tensors(heads, seed=seed) for seed in range(SETS)]

        def qkv(i: int, inputs: Any = inputs) -> Any:
            return quantised(*inputs[i])

        read = sum(t.numel() * t.element_size() for t in inputs[0])
        yield quantize_row(f"q, k, v of {heads}, a scale a head", qkv, read, 2)
        torch.cuda.empty_cache()


def quantize_row(name: str, call: Call, read: int, passes: int) -> dict[str, Any]:
    """A row of `quantize_rows`; read: bytes of what is quantised."""
    import torch
    from torch.utils import _pytree as pytree

    made = [t for t in pytree.tree_leaves(call(0)) if isinstance(t, torch.Tensor)]
    once = read + sum(t.numel() * t.element_size() for t in {t.data_ptr(): t for t in made}.values())
    traffic = once + (passes - 1) * read
    calls = {OURS: call, **copies(traffic), **copies(once, "once")}
    found, _ = harness.best_of(interleaved(calls, sets=SETS, rounds=15, graph=True))
    us = {name: timing.ms * 1e3 for name, timing in found.items()}
    return {
        "name": name, "reads_of_x": passes, "us": us[OURS], "TB_per_s": traffic / us[OURS] / 1e6,
        "of_a_copy": us["copy"] / us[OURS], "of_a_copy_once": us["once"] / us[OURS],
    }  # fmt: skip


def linear_cases() -> Iterator[Case]:
    """Linear layers, forward, and forward and backward, against `torch.nn.functional.linear` in bf16."""
    import torch

    import kernels_dsl

    for rows, k, n in LAYERS:
        x = torch.randn(rows, k, device=DEVICE).bfloat16().requires_grad_()
        weight = torch.randn(n, k, device=DEVICE).bfloat16().requires_grad_()
        gradient = torch.randn(rows, n, device=DEVICE).bfloat16()
        layers: dict[str, Callable[[], Any]] = {
            OURS: lambda: kernels_dsl.scaled_linear(x, weight),  # noqa: B023
            "ours_tensor": lambda: kernels_dsl.scaled_linear(x, weight, recipe="tensor"),  # noqa: B023
            "bf16": lambda: torch.nn.functional.linear(x, weight),  # noqa: B023
        }
        for backward in (False, True):

            def call(_set: int, layer: Any, both: bool = backward) -> Any:
                if not both:
                    with torch.no_grad():
                        return layer()
                return torch.autograd.grad(layer(), (x, weight), gradient)  # noqa: B023

            calls: dict[str, Call] = {name: partial(call, layer=layer) for name, layer in layers.items()}
            products = 3 if backward else 1
            name = f"{rows}×{k}→{n}{', forward and backward' if backward else ', forward'}"
            yield Case(name, 2.0 * rows * k * n * products, calls, notes="ours: row")
        torch.cuda.empty_cache()


def quantised(q: Any, k: Any, v: Any, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """fp8 tensors (B, S, H, D), and the keywords that pass the scales; `options` of `quantize_qkv`."""
    import kernels_dsl

    found = kernels_dsl.quantize_qkv(q, k, v, **options)
    return [found.pop(name) for name in "qkv"], found


def attention_cases(shapes: Sequence[Shape] = SHAPES) -> Iterator[Case]:
    """fp8 attention against 16 bits, and packed sequences at last."""
    import torch

    import kernels_dsl

    for shape in shapes:
        q, k, v = tensors(shape)
        values, descales = quantised(q, k, v)
        values = [x.contiguous() for x in values]
        q8, k8, v8 = values
        by_block, of_blocks = quantised(q, k, v, scaling="block")
        by_block = [x.contiguous() for x in by_block]
        for causal in (False, True):

            def call(_set: int, c: bool = causal) -> Any:
                return kernels_dsl.attention_fp8(*values, **descales, causal=c)  # noqa: B023

            def blocks(_set: int, c: bool = causal) -> Any:
                return kernels_dsl.attention_fp8(*by_block, **of_blocks, causal=c)  # noqa: B023

            calls: dict[str, Call] = {
                OURS: call,
                "ours_blocks": blocks,
                "fa3": flash3.dense(q8, k8, v8, causal, list(descales.values())),
                "ours_bf16": ours(q, k, v, causal=causal),
                "cudnn_bf16": sdpa(q, k, v, "cudnn", causal),
            }
            pairs = causal_pairs(shape.length) if causal else shape.length**2
            yield Case(f"{shape}{' causal' if causal else ''}", shape.flops(pairs), calls)
        torch.cuda.empty_cache()
    yield packed_case()


def packed_case() -> Case:
    """Packed sequences, causal, without scales, against 16 bits."""
    import torch

    import kernels_dsl

    q, k, v, starts = packed_inputs()
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    lengths = (starts, starts, max(PACKED_LENGTHS))
    fp8 = partial(kernels_dsl.attention_fp8_varlen, q8, k8, v8, *lengths, causal=True)
    bf16 = partial(kernels_dsl.attention_varlen, q, k, v, *lengths, causal=True)
    calls: dict[str, Call] = {OURS: lambda _set: fp8(), "ours_bf16": lambda _set: bf16()}
    return Case(PACKED_NAME, PACKED_FLOPS, calls)


def error_rows() -> Iterator[dict[str, Any]]:
    """Error of fp8 attention against float64 on the unquantised tensors: decibels of signal over noise.

    "weights" is what rounding the weights alone to e4m3 leaves, in float64; "values" adds nothing but the
    rounding of Q, K and V; ours has both. "rotated": ours on rotated Q and K; "blocks": ours with a scale for
    every 128 keys.
    """
    import torch

    import kernels_dsl
    from reference import quantize as reference
    from reference.attention import Masking, attention, attention_fp8_weights

    for dim in (64, 128, 256):
        for causal in (False, True):
            for outliers in (False, True):
                q, k, v = tensors(Shape(1, 4, 2048, dim), seed=1)
                if outliers:
                    chosen = torch.rand(v.shape, device=DEVICE) < 1e-3
                    q, k, v = (x + (10 * chosen * torch.randn_like(x)) for x in (q, k, v))
                masking = Masking(right=0 if causal else None)
                exact, _ = attention(q, k, v, masking)
                values, descales = quantised(q, k, v)
                scales = [scale.transpose(1, 2).double() for scale in descales.values()]
                bq, bk, bv = (reference.from_fp8(x) * s for x, s in zip(values, scales))
                found = {}
                for name, options in OPTIONS.items():
                    arguments = kernels_dsl.quantize_qkv(q, k, v, **options)
                    found[name] = kernels_dsl.attention_fp8(**arguments, causal=causal)
                found |= {
                    "values_dB": attention(bq, bk, bv, masking)[0],
                    "weights_dB": attention_fp8_weights(q, k, v, masking),
                    "bf16_dB": kernels_dsl.attention(q, k, v, causal=causal),
                }
                kind = "with outliers" if outliers else "N(0, 1)"
                row: dict[str, Any] = {"name": f"D {dim}, {kind}, {'causal' if causal else 'full'}"}
                yield row | {name: reference.signal_to_noise(x, exact) for name, x in found.items()}


def host_rows() -> Iterator[dict[str, Any]]:
    """Host microseconds of an eager call at sizes where the GPU outruns the host."""
    import torch

    import kernels_dsl

    x = torch.randn((128, 256), device=DEVICE).bfloat16()
    one = torch.ones((), device=DEVICE)
    calls: dict[str, Callable[[], Any]] = {
        f"quantize, {scaling}": partial(kernels_dsl.quantize, x, scaling=scaling)
        for scaling in ("row", "1x128", "128x128", "tensor")
    }
    calls["quantize, tensor with a scale"] = lambda: kernels_dsl.quantize(x, scale=one)
    for scaling in ("row", "1x128", "tensor"):
        both = partial(kernels_dsl.quantize, x, scaling=scaling, transpose="both")
        calls[f"quantize, {scaling}, both"] = both
        calls[f"quantize, {scaling}, both, out"] = partial(both, out=both())
    layer: Any = kernels_dsl.ScaledLinear(256, 128, device=DEVICE, dtype=torch.bfloat16)
    calls["ScaledLinear, forward"] = torch.no_grad()(partial(layer, x))
    values, descales = quantised(*tensors(Shape(1, 4, 128, 64)))
    for recipe in fp8_gemm.RECIPES:
        if recipe.fast or recipe is fp8_gemm.BLOCK:
            arguments = fp8_gemm.operands(x, x, recipe.scaling)
            call = partial(kernels_dsl.scaled_gemm, *arguments, use_fast_accum=recipe.fast)
            calls[f"scaled_gemm, {recipe.name}"] = call
    for causal in (False, True):
        name = "attention_fp8" + ", causal" * causal
        calls[name] = partial(kernels_dsl.attention_fp8, *values, **descales, causal=causal)
    # In the same run, for comparison.
    calls["gemm, bf16"] = partial(kernels_dsl.gemm, x, x.mT)
    calls["attention, bf16"] = partial(kernels_dsl.attention, *tensors(Shape(1, 4, 128, 64)))
    # What tells hosts apart.
    calls["torch.mm"] = partial(torch.mm, x, x.mT)
    calls["torch.empty, four times"] = lambda: [torch.empty((128, 256), device=DEVICE) for _ in range(4)]
    for name, timed in calls.items():
        yield {"name": name, "host_us": host_us(timed)}


LISTED: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "quantize": partial(harness.as_they_come, quantize_rows),
    "error": partial(harness.as_they_come, error_rows),
    "gemm_error": partial(harness.as_they_come, fp8_gemm.error_rows),
    "host": partial(harness.as_they_come, host_rows),
}
CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "attention": attention_cases,
    "gemm": fp8_gemm.cases,
    "linear": linear_cases,
    "grouped": fp8_grouped.cases,
}
SUITES = (*CASES, *LISTED)


def run(suite: str, results: Path) -> None:
    """Run one suite; writes its file."""
    if suite in CASES:
        harness.run_suite(f"fp8_{suite}", CASES[suite](), rounds=20, seconds=0.3, results=results)
        return
    rows = LISTED[suite]()
    harness.write(f"fp8_{suite}", machine.header(), rows, results)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.fp8`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8", description="fp8 against its peers.")
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be repeated; default: all")
    parser.add_argument("--fa3", type=Path, help=flash3.HELP)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON files")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    flash3.load(args.fa3)
    for suite in args.suite or SUITES:
        print(f"-- {suite}", flush=True)
        start = time.perf_counter()
        run(suite, args.results)
        print(f"-- {suite} took {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
