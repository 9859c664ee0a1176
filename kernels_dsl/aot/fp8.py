"""The fp8 kernels that are worth compiling ahead of time, see `aot`: those that calls of common sizes make.

The calls are made on CPU tensors and recorded, so that whatever chooses a kernel chooses it here too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels_dsl.aot.recorded import Kernel, kernel_of, recorded
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.attention.attention_fp8 import attention_fp8
from kernels_dsl.ops.attention.fp8_inputs import quantize_qkv
from kernels_dsl.ops.quantize.quantize import quantize
from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm

_SIZES = (  # M, N, K
    (64, 4096, 4096), (64, 8192, 8192), (512, 4096, 4096), (2048, 2048, 2048), (4096, 4096, 4096),
    (8192, 8192, 1024), (8192, 8192, 8192), (16384, 1024, 4096),
)  # fmt: skip
_SCALES = {"tensor": (1, 1), "row": (1, None), "1x128": (1, 128), "128x128": (128, 128)}
_SCALINGS = (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"))
_LENGTHS = (512, 4096, 16384)
_BF16 = torch.bfloat16


def _operand(rows: int, columns: int, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of (rows, columns) as `quantize` makes them, unwritten."""
    shape = {"tensor": (1,), "row": (rows, 1)}.get(scaling)
    if shape is None:
        shape = (rows if scaling == "1x128" else -(-rows // 128), -(-columns // 128))
    return torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(shape)


def _scaled(scaling: tuple[str, str], fast: bool, m: int, n: int, k: int) -> None:
    a, scale_a = _operand(m, k, scaling[0])
    b, scale_b = _operand(n, k, scaling[1])
    scaled_gemm(a, b.mT, scale_a, scale_b.mT if scale_b.dim() == 2 else scale_b, use_fast_accum=fast)


def _attention(tensors: list[torch.Tensor], causal: bool) -> None:
    attention_fp8(**quantize_qkv(*tensors), causal=causal)


def _calls(attends: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, what makes the call). `attends`: attention is among them."""
    for scaling, fast in itertools.product(_SCALINGS, (True, False)):
        if not (fast and scaling[0] == "1x128"):
            words = f"scaled_gemm {scaling[0]}" + " fast" * fast
            for size in _SIZES:
                yield words, partial(_scaled, scaling, fast, *size)
    transposes: tuple[tuple[bool | str, str], ...] = (False, ""), (True, " transposed"), ("both", " both")
    for kind, (transpose, turned) in itertools.product(("tensor", "row", "1x128", "128x128"), transposes):
        for rows in (64, 4096):
            x = torch.empty(rows, 4096, dtype=_BF16)
            yield f"quantize {kind}{turned}", partial(quantize, x, scaling=kind, transpose=transpose)
    for dim, length, causal in itertools.product((64, 128, 256) if attends else (), _LENGTHS, (False, True)):
        tensors = [torch.empty(1, length, 8, dim, dtype=_BF16) for _ in range(3)]
        yield f"attention_fp8 d{dim}" + " causal" * causal, partial(_attention, tensors, causal)


def iter_fp8(arch: str) -> Iterator[Kernel]:
    """The fp8 kernels of an architecture, a key of `DEVICES_BY_ARCH`; none where it has no fp8."""
    device = DEVICES_BY_ARCH[arch]
    seen: set[str] = set()
    attends = device.has_wgmma or not device.widens_fp8
    for name, call in _calls(attends) if device.has_fp8 else ():
        for made in recorded(arch, call):
            key = repr(made.function.key_parts(made.args, made.constants, arch))
            if key not in seen:
                seen.add(key)
                config = made.constants.get("config")
                tile = f" {config.tile_m}x{config.tile_n}" if config is not None else ""
                yield kernel_of(f"fp8 {name}, {made.function.name}{tile} #{len(seen)}", made)
