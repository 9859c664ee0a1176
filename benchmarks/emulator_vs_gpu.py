"""Whole GEMM kernels, the emulator on CPU tensors against a GPU: the same calls with the same inputs.

Integer-valued inputs must agree bit for bit. On random ones the tensor cores' accumulation and the last bits
of `ex2.approx` and its like show: float32 results may be apart by 2^-23 of the sum of the products'
magnitudes for each matrix instruction along K, 16-bit ones by their rounding on top.

On a Hopper GPU, both there:  python -m benchmarks.emulator_vs_gpu
GPU there, emulator anywhere: python -m benchmarks.emulator_vs_gpu --record DIR, then --recorded DIR
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kernels_dsl
from kernels_dsl.config.gemm import GemmConfig, Schedule, Sm80GemmConfig, Sm90GemmConfig
from lowering import emulator

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PINGPONG = Schedule.PINGPONG
NAME = "emulator_vs_gpu"


@dataclass(frozen=True)
class Case:
    """One call of `kernels_dsl.gemm`. `shape`: M, N, K; `extras`: which of bias, residual, c it takes.

    `majors`: "k" or "r" (the other mode) for A and B; `exact`: integers, else normal values.
    """

    name: str
    config: GemmConfig
    shape: tuple[int, int, int]
    dtype: torch.dtype = BF16
    out_dtype: torch.dtype | None = None
    majors: str = "kk"
    batch: int = 0
    extras: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True)
class Row:
    """Outcome of one case.

    `equal`: elements with the same bits; `worst`: the largest difference over what is allowed; `seed`: what
    its inputs were made from; `gpu`: digest of the GPU's result.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: str
    rule: str
    elements: int
    equal: int
    worst: float
    ok: bool
    seconds: float
    seed: int
    gpu: str = ""


KERNELS: dict[str, tuple[GemmConfig, tuple[int, int, int]]] = {
    "sm90 cooperative 128x128": (Sm90GemmConfig(128, 128), (200, 136, 264)),
    "sm90 cooperative 256x128": (Sm90GemmConfig(256, 128), (264, 136, 136)),
    "sm90 ping-pong 64x128": (Sm90GemmConfig(64, 128, schedule=PINGPONG), (200, 136, 200)),
    "sm90 cluster 2x1": (Sm90GemmConfig(128, 128, cluster_m=2), (264, 136, 136)),
    "sm90 cluster 1x2 ping-pong": (Sm90GemmConfig(64, 64, cluster_n=2, schedule=PINGPONG), (136, 136, 136)),
    "sm90 split K 3": (Sm90GemmConfig(128, 64, split_k=3), (128, 72, 392)),
    "sm90 global stores": (Sm90GemmConfig(128, 64, epi_tma=False), (131, 61, 72)),
    "sm80 64x64x32": (Sm80GemmConfig(64, 64, 32, 3, 2, 2), (136, 72, 200)),
    "sm80 128x64x32 split K 2": (Sm80GemmConfig(128, 64, 32, 3, 2, 2, split_k=2), (136, 72, 264)),
}
EPILOGUES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bias, relu": (("bias",), {"activation": "relu"}),
    "alpha, beta C, residual": (("c", "residual"), {"alpha": 0.5, "beta": 2.0}),
    "bias, gelu_tanh, residual": (("bias", "residual"), {"activation": "gelu_tanh"}),
    "silu": ((), {"activation": "silu"}),
}


def cases() -> list[Case]:
    """All cases: every kernel with every type, then epilogues, layouts and batches on one of each family."""
    found = []
    for kernel, (config, shape) in KERNELS.items():
        for dtype in (BF16, F16, F32):
            found.append(Case(kernel, config, shape, dtype))
            found.append(Case(kernel, config, shape, dtype, F32, exact=False))
    for kernel in ("sm90 cooperative 128x128", "sm90 ping-pong 64x128", "sm80 64x64x32"):
        config = KERNELS[kernel][0]
        for name, (extras, options) in EPILOGUES.items():
            exact = "lu" not in name or "relu" in name
            found.append(
                Case(f"{kernel}, {name}", config, (136, 72, 136), extras=extras, options=options, exact=exact)
            )
        for majors in ("rk", "kr", "rr"):
            found.append(Case(f"{kernel}, {majors}", config, (136, 72, 72), F16, majors=majors))
        found.append(Case(f"{kernel}, batch", config, (72, 72, 72), batch=3))
    return found


def key(case: Case) -> str:
    """Changes with everything that the case's result depends on."""
    return hashlib.sha256(repr(case).encode()).hexdigest()[:20]


def seed_of(case: Case) -> int:
    """From what the inputs are made of, so that a new field of the configurations leaves them as they are."""
    parts = (case.name, case.shape, case.dtype, case.majors, case.batch, case.extras, case.exact)
    return zlib.crc32(repr(parts).encode())


def inputs(case: Case, seed: int | None = None) -> dict[str, torch.Tensor]:
    """CPU tensors by argument name, by NumPy's generator: the same anywhere. `seed`: `seed_of(case)`."""
    rng = np.random.default_rng(seed_of(case) if seed is None else seed)

    def tensor(*shape: int) -> torch.Tensor:
        values = rng.integers(-3, 4, shape) if case.exact else rng.standard_normal(shape)
        return torch.from_numpy(values.astype(np.float32)).to(case.dtype)

    m, n, k = case.shape
    lead = (case.batch,) if case.batch else ()
    a = tensor(*lead, m, k)
    b = tensor(*lead, k, n)
    tensors = {
        "a": a if case.majors[0] == "k" else a.mT.contiguous().mT,
        "b": b.mT.contiguous().mT if case.majors[1] == "k" else b,
    }
    for name in case.extras:
        tensors[name] = tensor(n) if name == "bias" else tensor(m, n)
    return tensors


def call(case: Case, device: str, seed: int | None = None) -> torch.Tensor:
    """The result, on the CPU, of the call on "cuda", or on "cpu" in the emulator."""
    arguments: dict[str, Any] = {name: t.to(device) for name, t in inputs(case, seed).items()}
    arguments |= {"config": case.config, "out_dtype": case.out_dtype, **case.options}
    if device == "cuda":
        return kernels_dsl.gemm(**arguments).cpu()
    with emulator.run(arch="sm_90a"):
        return kernels_dsl.gemm(**arguments)


def allowed(case: Case, result: torch.Tensor) -> torch.Tensor:
    """Distance that random results may be apart, by element: see the module's docstring."""
    tensors = inputs(case)
    magnitude = tensors["a"].double().abs() @ tensors["b"].double().abs()
    instructions = -(-case.shape[2] // (8 if case.dtype == F32 else 16))
    bound = magnitude * instructions * 2.0**-23
    if result.dtype != F32:
        bound = bound + result.double().abs() * torch.finfo(result.dtype).eps
    return bound


def compare(case: Case, ours: torch.Tensor, theirs: torch.Tensor, seconds: float = 0.0) -> Row:
    """The emulator's result against the GPU's."""
    equal = int((_bits(ours) == _bits(theirs)).sum())
    worst = 0.0
    if case.exact:
        ok = equal == ours.numel()
    else:
        difference = (ours.double() - theirs.double()).abs()
        worst = float((difference / allowed(case, ours)).max())
        ok = worst <= 1.0
    rule = "bits" if case.exact else "rounding"
    dtype = str(case.dtype).removeprefix("torch.")
    return Row(
        case.name,
        case.shape,
        dtype,
        rule,
        elements=ours.numel(),
        equal=equal,
        worst=worst,
        ok=ok,
        seconds=round(seconds, 2),
        seed=seed_of(case),
        gpu=digest(theirs),
    )


def digest(result: torch.Tensor) -> str:
    """Identifies a result's bits."""
    return hashlib.sha256(_bits(result).numpy().tobytes()).hexdigest()[:16]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == F32 else torch.int16)


def table(rows: list[Row]) -> str:
    """Summary of the rows for a reader."""
    lines = [f"{'kernel':44} {'M x N x K':>14} {'type':9} {'rule':9} {'equal bits':>14}  worst/allowed"]
    for row in rows:
        size = "x".join(map(str, row.shape))
        share = f"{row.equal}/{row.elements}"
        verdict = "" if row.ok else "  DIFFERENT"
        worst = f"{row.worst:.3f}" if row.rule == "rounding" else ""
        lines.append(f"{row.name:44} {size:>14} {row.dtype:9} {row.rule:9} {share:>14}  {worst}{verdict}")
    return "\n".join(lines)


def record(chosen: list[Case], folder: Path) -> None:
    """Run each case on the GPU and keep the bits of its results, and the machine's facts, in `folder`."""
    from benchmarks import machine

    folder.mkdir(parents=True, exist_ok=True)
    kept = {key(case): _bits(call(case, "cuda")).numpy() for case in chosen}
    np.savez_compressed(folder / f"{NAME}.npz", **kept)  # type: ignore[arg-type]
    (folder / f"{NAME}_header.json").write_text(json.dumps(machine.header(), indent=1) + "\n")


def against(chosen: list[Case], folder: Path) -> tuple[list[Row], list[str]]:
    """Emulate each case and compare with the GPU's results in `folder`; also the names of those not there."""
    stored = np.load(folder / f"{NAME}.npz")
    rows, missing = [], []
    for case in chosen:
        if key(case) not in stored:
            missing.append(case.name)
            continue
        started = time.perf_counter()
        ours = call(case, "cpu")
        seconds = time.perf_counter() - started
        theirs = torch.from_numpy(stored[key(case)]).view(ours.dtype).view(ours.shape)
        rows.append(compare(case, ours, theirs, seconds))
    return rows, missing


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; exit status 1 where the two disagree, 2 where nothing can be compared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--record", type=Path, metavar="DIR", help="run on the GPU alone, results to DIR")
    parser.add_argument("--recorded", type=Path, metavar="DIR", help="compare with the results in DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args(argv)
    chosen = [case for case in cases() if options.only in case.name]
    if not options.recorded and not torch.cuda.is_available():
        print("there is no GPU here; --recorded DIR compares with results that one left")
        return 2
    if options.record:
        record(chosen, options.record)
        return 0
    if options.recorded:
        return _report(chosen, options.recorded, options.json)
    with tempfile.TemporaryDirectory() as folder:
        record(chosen, Path(folder))
        return _report(chosen, Path(folder), options.json)


def _report(chosen: list[Case], folder: Path, file: Path | None) -> int:
    rows, missing = against(chosen, folder)
    print(table(rows))
    for name in missing:
        print(f"{name}: no result of a GPU is in {folder}")
    print(f"{sum(row.ok for row in rows)} of {len(rows)} agree")
    if file:
        header = json.loads((folder / f"{NAME}_header.json").read_text())
        facts = {"suite": NAME, "header": header, "rows": [asdict(row) for row in rows]}
        file.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if rows and all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
