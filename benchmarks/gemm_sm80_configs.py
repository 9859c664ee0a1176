"""Every SM80-class GEMM configuration on a few shapes, in turns with torch.mm: the table's foundation.

    python -m benchmarks.gemm_sm80_configs [--dtype bf16|fp16|fp32] [--majors kk|kr|rk|rr] [--shape M,N,K ...]

A line for each shape and configuration: milliseconds, TFLOPS, and the ratio to torch.mm (above 1 is faster).
`majors` says for A and B whether K (k) or the other mode (r) is contiguous.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch

import lowering
from kernels_dsl.blocks.epilogue.functions import identity
from kernels_dsl.config.budget import why_not
from kernels_dsl.config.gemm import EntryLayout, Sm80GemmConfig
from kernels_dsl.config.gemm_table import SM80_CANDIDATES, adapted
from kernels_dsl.config.problem import Device, GemmProblem
from kernels_dsl.measure import Call, interleaved
from lowering.signature import tensor_class

SHAPES = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (4096, 4096, 1024),
    (1000, 2056, 4104),
    (4095, 4097, 511),
    (128, 8192, 8192),
    (16, 8192, 8192),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GEMM = lowering.jit("kernels_dsl.kernels.gemm.entry_sm80:gemm_sm80_entry")


def _operand(rows: int, k: int, dtype: torch.dtype, k_major: bool) -> torch.Tensor:
    """N(0, 1) values (rows, K, 1) with K or the rows contiguous."""
    values = torch.randn((rows, k) if k_major else (k, rows), device="cuda").to(dtype)
    return (values if k_major else values.t()).unsqueeze(-1)


def configurations(problem: GemmProblem, device: Device) -> list[Sm80GemmConfig]:
    """The table's configurations that fit this problem and device."""
    found = [adapted(candidate.config, problem) for candidate in SM80_CANDIDATES]
    return [c for c in found if isinstance(c, Sm80GemmConfig) and why_not(c, problem, device) is None]


def _device() -> Device:
    properties = torch.cuda.get_device_properties(0)
    smem = properties.shared_memory_per_block_optin
    return Device(
        properties.name, (properties.major, properties.minor), properties.multi_processor_count, smem
    )


def measure_shape(shape: tuple[int, int, int], dtype_name: str, majors: str, rounds: int) -> None:
    """Time one shape and print its lines; each result is compared with torch.mm's first."""
    m, n, k = shape
    dtype = DTYPES[dtype_name]
    a, b = (_operand(rows, k, dtype, major == "k") for rows, major in zip((m, n), majors))
    d = torch.empty(m, n, dtype=dtype, device="cuda")
    align = {f"{name}_align": tensor_class(name, x).align for name, x in (("a", a), ("b", b), ("d", d))}
    major = {"a_k_major": majors[0] == "k", "b_k_major": majors[1] == "k"}
    problem = GemmProblem(m, n, k, ab_type=dtype_name, d_type=dtype_name, **align, **major)  # type: ignore[arg-type]
    left, right, out = a[..., 0], b[..., 0].t(), torch.empty(m, n, dtype=dtype, device="cuda")
    calls: dict[str, Call] = {"torch.mm": lambda _: torch.mm(left, right, out=out)}
    calls["torch.mm"](0)
    for config in configurations(problem, _device()):
        run = partial(GEMM, left, right, d, None, 1, config=config, epilogue=identity, layout=EntryLayout())
        run()
        error = (d.float() - out.float()).abs().max() / out.float().abs().max()
        if not error < 2e-2:
            raise AssertionError(f"{config} on {shape}: relative difference to torch.mm {float(error):.3g}")
        tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k} s{config.stages}"
        tile += f" w{config.warps_m}x{config.warps_n}"
        calls[tile] = lambda _, run=run: run()  # type: ignore[misc]
    timings = interleaved(calls, rounds=rounds)
    base = timings["torch.mm"].ms
    for name, timing in sorted(timings.items(), key=lambda item: item[1].ms):
        tflops = 2 * m * n * k / timing.ms / 1e9
        case = f"{m}x{n}x{k} {dtype_name} {majors}"
        print(f"{case}  {name:24}{timing.ms:9.4f} ms{tflops:8.1f} TFLOPS{base / timing.ms:7.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument(
        "--majors", choices=("kk", "kr", "rk", "rr"), default="kr", help="A's and B's (default kr)"
    )
    parser.add_argument("--shape", action="append", help="M,N,K; may be given several times")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = True
    shapes: Sequence[tuple[int, int, int]] = SHAPES
    if options.shape:
        parts = [[int(x) for x in text.split(",")] for text in options.shape]
        shapes = [(m, n, k) for m, n, k in parts]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ratio: torch.mm's time over ours")
    for shape in shapes:
        measure_shape(shape, options.dtype, options.majors, options.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
