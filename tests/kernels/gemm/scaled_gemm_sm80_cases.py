"""Cases of the SM80-class GEMM on fp8 operands, and how one is run and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import torch

import lowering
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.config.promotion import GROUP, Promotion
from kernels_dsl.kernels.gemm.entry_views import Views
from kernels_dsl.kernels.gemm.sm80 import gemm_sm80
from lowering.signature import tensor_class
from reference import buffers, inputs, tolerance

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALL = Sm80GemmConfig(64, 64, 64, 3, 2, 2)
BLOCKS = {"1x128": 1, "128x128": GROUP}
"""Rows that share a scale."""


@lowering.jit
def GEMM(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    scales: tuple | None,
    operands: tuple,
    stream,
    config: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
    promotion: cutlass.Constexpr,
):
    """The kernel on tensors in its own orientation."""
    columns = mD.shape[1]
    views = Views(a=mA, b=mB, d=mD, operands=operands, scales=scales, promotion=promotion, columns=columns)
    gemm_sm80(views, stream, config, epilogue)


def scale_both(acc, scale_a, scale_b):
    """The epilogue of scales of tensors and rows."""
    return acc * scale_a * scale_b


def identity(acc):
    """The epilogue where there are no such scales."""
    return acc


@dataclass(frozen=True)
class Case:
    """One scaled GEMM.

    `scale_a`, `scale_b`: "tensor" or "row", of which both must be, or "1x128" or "128x128". `fast`: the
    matrix unit sums all of K. `a_pad`, `b_pad`: elements of gap behind rows, beyond what makes them
    multiples of 16.
    `d_n_major`: whether N is D's contiguous mode.
    """

    m: int
    n: int
    k: int
    l: int = 1
    a_dtype: torch.dtype = E4M3
    b_dtype: torch.dtype = E4M3
    d_dtype: torch.dtype = torch.bfloat16
    scale_a: str = "1x128"
    scale_b: str = "128x128"
    fast: bool = False
    a_pad: int = 0
    b_pad: int = 0
    d_n_major: bool = True
    config: Sm80GemmConfig = SMALL

    @property
    def promotion(self) -> Promotion | None:
        """The kernel's constant."""
        if self.fast:
            return None
        return Promotion(BLOCKS.get(self.scale_a, 0), BLOCKS.get(self.scale_b, 0))

    def __str__(self) -> str:
        names = "-".join(str(x).split("_")[-1] for x in (self.a_dtype, self.b_dtype, self.d_dtype))
        tile = f"{self.config.tile_m}x{self.config.tile_n}x{self.config.tile_k}"
        flags = f"{'fast' if self.fast else 'promoted'}-p{self.a_pad}.{self.b_pad}-{self.d_n_major}"
        return (
            f"{self.m}x{self.n}x{self.k}x{self.l}-{names}-{self.scale_a}.{self.scale_b}-{flags}-{tile}"
        ).replace("torch.", "")


def kernel_view(batched: torch.Tensor) -> torch.Tensor:
    """(L, X, Y) as the kernel's (X, Y, L)."""
    return batched.permute(1, 2, 0)


def _operand(values: torch.Tensor, pad: int) -> torch.Tensor:
    """The operand (L, MN, K) surrounded by NaN, rows at multiples of 16 bytes and `pad` more."""
    row = max(1, values.shape[-1])
    return buffers.embed(values, pad=-row % 16 + pad)


def _scales(case: Case, rows: int, kind: str, number: int, device: str, exact: bool) -> torch.Tensor:
    """Scales in the layouts of `kernels_dsl.quantize`, NaN around them: powers of two where exact."""
    groups = -(-case.k // GROUP)
    shapes = {
        "tensor": (1, 1),
        "row": (rows, 1),
        "1x128": (rows, groups),
        "128x128": (-(-rows // GROUP), groups),
    }
    shape = (case.l, *shapes[kind])
    seed = inputs.case_seed(str(case)) + number
    if exact:
        values = torch.exp2(inputs.integers(shape, torch.float32, seed=seed, zeros=0.2, limit=2))
    else:
        values = inputs.normal(shape, torch.float32, seed=seed).abs() + 0.25
    return buffers.embed(values.to(device), contiguous=-2 if kind == "1x128" else -1)


def expanded(scale: torch.Tensor, kind: str, shape: tuple[int, int]) -> torch.Tensor:
    """One scale for each element (L, MN, K)."""
    if kind in BLOCKS:
        scale = scale.repeat_interleave(GROUP, dim=2)[:, :, : shape[1]]
        scale = scale.repeat_interleave(BLOCKS[kind], dim=1)[:, : shape[0]]
    return scale.expand(scale.shape[0], *shape)


def launch(case: Case, a, b, d, scale_a, scale_b) -> None:
    """Run the case on (L, M, K), (L, N, K), (L, M, N) and scales as `kernels_dsl.quantize` makes them."""
    align = (tensor_class("operand", kernel_view(x)).align for x in (a, b))
    config = replace(case.config, **dict(zip(("copy_bytes_a", "copy_bytes_b"), align)))
    scales, operands, epilogue = None, (), identity
    if case.scale_a in BLOCKS:
        scales = (kernel_view(scale_a), kernel_view(scale_b))
    else:
        operands = (kernel_view(scale_a.expand(d.shape)), kernel_view(scale_b.mT.expand(d.shape)))
        epilogue = scale_both
    views = (kernel_view(x) for x in (a, b, d))
    GEMM(*views, scales, operands, config=config, epilogue=epilogue, promotion=case.promotion)


def run(case: Case, *, device: str, exact: bool) -> None:
    """Run a case and check it: every element of D written and nothing else, and its values.

    exact: small integers and scales that are powers of two, compared bit for bit; else normal values against
    float64, at most twice the error of the same sum in float32, rounded once to D's dtype.
    """
    seed = inputs.case_seed(str(case))

    def make(rows: int, dtype: torch.dtype, number: int) -> torch.Tensor:
        source = inputs.integers if exact else inputs.normal
        shape = (case.l, rows, case.k)
        return source(shape, torch.float32, seed=seed + number, device=device).to(dtype)

    a = _operand(make(case.m, case.a_dtype, 1), case.a_pad)
    b = _operand(make(case.n, case.b_dtype, 2), case.b_pad)
    scale_a = _scales(case, case.m, case.scale_a, 3, device, exact)
    scale_b = _scales(case, case.n, case.scale_b, 4, device, exact)
    output = buffers.poisoned(
        (case.l, case.m, case.n), case.d_dtype, device=device, contiguous=-1 if case.d_n_major else -2
    )
    launch(case, a, b, output.tensor, scale_a, scale_b)
    if device == "cuda":
        torch.cuda.synchronize()
    buffers.check_output(output)
    wide = [
        x.double() * expanded(scale, kind, tuple(x.shape[1:])).double()
        for x, scale, kind in ((a, scale_a, case.scale_a), (b, scale_b, case.scale_b))
    ]
    expected = wide[0] @ wide[1].mT
    if exact:
        tolerance.check_exact(output.tensor, expected, case=str(case))
    else:
        peer = (wide[0].float() @ wide[1].float().mT).to(case.d_dtype)
        tolerance.check(output.tensor, expected, peer, case=str(case))


F32, F16 = torch.float32, torch.float16
EXACT = [
    Case(64, 64, 512, d_dtype=F32),  # every stage of the pipeline is used more than once
    Case(97, 61, 0),
    Case(1, 1, 1),
    Case(65, 3, 33, a_dtype=E5M2),
    Case(200, 70, 300, l=2, b_dtype=E5M2),  # a raster of tiles, batches, K not a multiple of 128
    Case(70, 136, 400, scale_a="128x128", scale_b="1x128", d_n_major=False, d_dtype=F32),
    Case(70, 72, 272, scale_b="1x128", a_dtype=E5M2, b_dtype=E5M2, a_pad=16, b_pad=4),
    Case(150, 140, 272, scale_a="128x128", scale_b="128x128", a_pad=8),
    Case(70, 72, 272, scale_a="row", scale_b="row", d_dtype=F16),
    Case(70, 72, 272, scale_a="row", scale_b="row", fast=True, b_dtype=E5M2, l=2),
    Case(70, 72, 272, scale_a="tensor", scale_b="tensor", fast=True, a_dtype=E5M2, d_dtype=F32),
    Case(136, 160, 400, config=Sm80GemmConfig(128, 128, 128, 3, 2, 4)),
    Case(70, 264, 200, config=Sm80GemmConfig(32, 256, 64, 3, 1, 4)),  # a tile of two groups of columns
]
NORMAL = [
    Case(80, 72, 400),
    Case(80, 72, 400, scale_a="row", scale_b="row", a_dtype=E5M2, d_dtype=F32),
    Case(80, 72, 400, scale_a="row", scale_b="row", fast=True),
    Case(80, 72, 400, scale_b="1x128", d_dtype=F32, b_dtype=E5M2),
]
