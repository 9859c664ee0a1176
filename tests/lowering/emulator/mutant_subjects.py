"""Kernels to be mutated: this project's, and four of others, unmodified.

The others need `quack-kernels` and `flash-attn-4` (extra `strangers`), and ``CUTLASS_EXAMPLES``, a checkout's
``examples/python/CuTeDSL``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import kernels_dsl
from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig
from reference.bsr import random_bsr
from tests.lowering.emulator.no_triton import without_triton
from tests.ops.bsr import bsr_cases


class Subject(NamedTuple):
    """A kernel: `call(scale)` launches it on the CPU with a problem of that size.

    `foreign`: it makes its own tensors, on a pretended GPU.
    """

    arch: str
    call: Callable[[int], object]
    sms: int | None = None
    foreign: bool = False


def _gemm(config: Sm80GemmConfig | Sm90GemmConfig, m: int, n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-2, 3, (rows, k), generator=generator).to(torch.bfloat16) for rows in (m, n))
    return kernels_dsl.gemm(a, b.mT, config=config)


def _attention(scale: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (1, 400 * scale, 2, 64)  # more tiles than CTAs, short ones next to long ones: rings go round
    q, k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(3))
    return kernels_dsl.attention(q, k, v, causal=True)


def _bsr(scale: int) -> torch.Tensor:
    matrix = random_bsr("one_heavy_row", (3 * scale, 5), (64, 64), 0, seed=1)
    dense = torch.randint(-2, 3, (320, 72), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return kernels_dsl.bsr_gemm(bsr_cases.sparse_of(matrix), dense, family="sm90")


def _quack_gemm(scale: int) -> object:
    without_triton()
    from quack.gemm_interface import gemm

    a = torch.randint(-2, 3, (200 * scale, 264 * scale), device="cuda").bfloat16()
    b = torch.randint(-2, 3, (264 * scale, 136 * scale), device="cuda").bfloat16()
    return gemm(a, b, tuned=False)


def _quack_softmax(scale: int) -> object:
    without_triton()
    import quack

    return quack.softmax(torch.randn(9 * scale, 16384 + 1024, device="cuda", dtype=torch.float32))


def _flash_attention_4(scale: int) -> object:
    without_triton()
    from flash_attn.cute import flash_attn_func

    q, k, v = (torch.randn(1, 256 * scale, 1, 64, device="cuda").bfloat16() for _ in range(3))
    return flash_attn_func(q, k, v, causal=True)


def _cutlass_gemm(scale: int) -> object:
    script = Path(os.environ["CUTLASS_EXAMPLES"], "cute/hopper/kernel/dense_gemm/dense_gemm_persistent.py")
    sizes = ",".join(str(size * scale) for size in (200, 264, 264))
    options = f"--mnkl {sizes},1 --tile_shape_mn 128,64 --warmup_iterations 0 --iterations 1"
    kept, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *options.split(), "--skip_ref_check"]
    sys.path[0:0] = [str(script.parent)]
    try:
        return runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = kept, path


SUBJECTS = {
    "gemm_sm90": Subject(
        "sm_90a", lambda x: _gemm(Sm90GemmConfig(128, 64, stages=2), 136 * x, 72 * x, 264 * x)
    ),
    "gemm_stream_k": Subject(
        "sm_90a", lambda x: _gemm(Sm90GemmConfig(64, 16, stream_k=True), 200 * x, 32 * x, 640 * x), 3
    ),
    "gemm_sm80": Subject(
        "sm_80", lambda x: _gemm(Sm80GemmConfig(64, 64, 32, 3, 2, 2), 72 * x, 72 * x, 136 * x)
    ),
    "attention_sm90": Subject("sm_90a", _attention, 1),
    "attention_sm80": Subject("sm_80", _attention),
    "bsr_sm90": Subject("sm_90a", _bsr, 1),
    "quack_gemm": Subject("sm_90a", _quack_gemm, 2, foreign=True),
    "quack_softmax": Subject("sm_90a", _quack_softmax, 4, foreign=True),
    "flash_attention_4": Subject("sm_90a", _flash_attention_4, 2, foreign=True),
    "cutlass_gemm": Subject("sm_90a", _cutlass_gemm, 2, foreign=True),
}
