"""Generated cases of `scaled_gemm`: everything about a case follows from its number."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm
from reference import buffers, inputs, tolerance
from reference import quantize as quantization
from reference import scaled_gemm as reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
RESULT_SCALE = 4.0
_MN = (1, 2, 7, 16, 17, 33, 64, 65, 127, 128, 129, 191, 255, 257, 320, 513)
_K = (1, 3, 16, 31, 64, 65, 100, 127, 128, 129, 256, 511, 768)
_EMPTY_ODDS = 0.04


@dataclass(frozen=True)
class Case:
    """One call.

    `exact`: integers and scales that are powers of two, compared bit for bit, as fp8 outputs always are; else
    quantised normal values, by the tolerance rule. `pads`: gaps behind the rows of a and b, None for one that
    does not run along K. `kinds`: the scales of a and of b's transpose, as `quantize` names them. `fast`:
    use_fast_accum.
    """

    number: int
    m: int
    n: int
    k: int
    a_batch: int | None
    b_batch: int | None
    dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype
    pads: tuple[int | None, int | None]
    kinds: tuple[str, str]
    fast: bool
    out_contiguous: int
    out_pad: int
    bias: bool
    residual: bool
    activation: str | None
    exact: bool

    def __str__(self) -> str:
        return " ".join(f"{f.name}={str(getattr(self, f.name)).replace('torch.', '')}" for f in fields(self))

    @property
    def groups(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Rows and columns of a and of b that share a scale, where scales are of 128 elements of K."""
        sizes = {"1x128": (1, 128), "128x128": (128, 128)}
        return (sizes[self.kinds[0]], sizes[self.kinds[1]][::-1]) if self.kinds[0] in sizes else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape."""
        sizes = [size for size in (self.a_batch, self.b_batch) if size is not None]
        return (max(sizes), self.m, self.n) if sizes else (self.m, self.n)

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return self.shape[0] * self.m * self.n * self.k if len(self.shape) == 3 else self.m * self.n * self.k


def generate(number: int) -> Case:
    """Case `number`."""
    draw = random.Random(inputs.case_seed("scaled_gemm", number))
    m, n, k = (0 if draw.random() < _EMPTY_ODDS else draw.choice(pool) for pool in (_MN, _MN, _K))
    a_batch, b_batch = draw.choice(((None, None), (None, None), (3, 3), (3, None), (None, 2), (1, 3)))
    out_dtype = draw.choice((*OUTPUTS, *OUTPUTS, E4M3, E5M2))
    exact = draw.random() < 0.5 or out_dtype not in OUTPUTS
    kinds = draw.choice((("tensor", "matrix", "row"), ("tensor", "matrix", "row"), ("1x128", "128x128")))
    return Case(
        number, m, n, k, a_batch=a_batch, b_batch=b_batch,
        dtypes=(draw.choice((E4M3, E4M3, E5M2)), draw.choice((E4M3, E4M3, E5M2))),
        out_dtype=out_dtype, pads=(draw.choice((0, 16, 5, None)), draw.choice((0, 16, 5, None))),
        kinds=(draw.choice(kinds), draw.choice(kinds)), fast=draw.random() < 0.5,
        out_contiguous=draw.choice((-1, -1, -2)), out_pad=draw.choice((0, 8, 3)),
        bias=draw.random() < 0.5, residual=draw.random() < 0.3,
        activation=draw.choice((None, None, "relu") if exact else (None, None, "silu")), exact=exact,
    )  # fmt: skip


def operand(
    case_seed: int, shape: tuple[int, ...], dtype: torch.dtype, kind: str, exact: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values (…, rows, K) and their scales."""
    if not exact:
        x = inputs.outliers(shape, torch.float32, seed=case_seed, device=device)
        return quantization.quantize(x, dtype, scaling=kind)
    values = inputs.integers(shape, dtype, seed=case_seed, device=device)
    scale_shape = quantization.group_amax(values.float(), kind).shape
    generator = torch.Generator().manual_seed(case_seed)
    return values, torch.exp2(torch.randint(-2, 3, scale_shape, generator=generator).float()).to(device)


def arguments(case: Case, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """[a, b, scale_a, scale_b] and the keywords of the call, each tensor lying between NaNs."""
    made, scales = [], []
    for name, rows, batch, dtype, pad, kind in zip(
        ("a", "b"), (case.m, case.n), (case.a_batch, case.b_batch), case.dtypes, case.pads, case.kinds
    ):
        shape = (rows, case.k) if batch is None else (batch, rows, case.k)
        seed = inputs.case_seed("scaled_gemm values", case.number, name)
        values, scale = operand(seed, shape, dtype, kind, case.exact, device)
        values = buffers.embed(values, contiguous=-2 if pad is None else -1, pad=pad or 0)
        by_columns = case.number % 2 == 0 and scale.dim() > 1
        scale = buffers.embed(scale, contiguous=-2 if by_columns else -1)
        made.append(values if name == "a" else values.mT)
        scales.append(scale.mT if name == "b" and scale.dim() > 1 else scale)
    options: dict[str, Any] = {"activation": case.activation}  # of the epilogue
    dtype = case.out_dtype if case.out_dtype in OUTPUTS else torch.bfloat16
    make = inputs.integers if case.exact else inputs.normal
    for name, given, shape in (("bias", case.bias, (case.n,)), ("residual", case.residual, case.shape)):
        if given:
            seed = inputs.case_seed("scaled_gemm values", case.number, name)
            options[name] = buffers.embed(make(shape, dtype, seed=seed, device=device))
    return made + scales, options


def run(case: Case, device: str, **forced: Any) -> None:
    """Call `scaled_gemm` on the case and check every element of the output and the memory around it."""
    tensors, options = arguments(case, device)
    out = buffers.poisoned(
        case.shape, case.out_dtype, device=device, contiguous=case.out_contiguous, pad=case.out_pad
    )
    if case.out_dtype not in OUTPUTS:
        forced["scale_result"] = torch.full((1,), RESULT_SCALE, device=device)
    fast = case.fast and case.groups is None
    result = scaled_gemm(*tensors, **options, use_fast_accum=fast, out=out.tensor, **forced)
    assert result is out.tensor
    buffers.check_output(out)
    exact = reference.scaled_gemm(*tensors, **options, groups=case.groups)
    if case.out_dtype not in OUTPUTS:
        expected = quantization.to_fp8(exact * RESULT_SCALE, case.out_dtype)
        assert torch.equal(result.contiguous().view(torch.uint8), expected.view(torch.uint8)), str(case)
        return
    if case.exact:
        tolerance.check_exact(result, exact, case=str(case))
        return
    how = {"groups": case.groups, "fast": case.fast, "out_dtype": case.out_dtype}
    peer = reference.as_tensor_cores(*tensors, **options, **how)
    tolerance.check(result, exact, peer, case=str(case))


def check_every_pattern(dtype: torch.dtype, device: str, **forced: Any) -> None:
    """All 256 values of an operand, subnormals, infinities and NaN among them, and a scale of 0: as float64
    has them, whichever operand it is."""
    patterns = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    a = torch.zeros(256, 32, device=device).to(dtype)
    a.view(torch.uint8)[:, 5] = patterns.view(torch.uint8)
    b = torch.ones(16, 32, device=device).to(dtype).mT
    scale_a, scale_b = torch.full((256, 1), 0.5, device=device), torch.ones(1, 16, device=device)
    scale_a[7], scale_b[0, 3] = 0.0, 2.0
    for arguments in ((a, b, scale_a, scale_b), (b.mT, a.mT, scale_b.mT, scale_a.mT)):
        found = scaled_gemm(*arguments, out_dtype=torch.float32, **forced)
        exact = reference.scaled_gemm(*arguments).float()
        assert torch.equal(found.isnan(), exact.isnan())
        assert torch.equal(found.nan_to_num(nan=0.0), exact.nan_to_num(nan=0.0))


def check_odd_block_scales(device: str, **forced: Any) -> None:
    """NaN, infinity, 0 and a subnormal number as scales of 128 of K reach what they should."""
    a, b = torch.full((130, 200), 2.0, device=device).to(E4M3), torch.ones(140, 200, device=device).to(E4M3)
    scale_a, scale_b = torch.ones(130, 2, device=device), torch.ones(2, 2, device=device)
    scale_a[:4, 1] = torch.tensor([torch.nan, torch.inf, 0.0, 2.0**-130], device=device)
    scale_a[:4, 0] = torch.tensor([1.0, 1.0, 1.0, 0.0], device=device)
    scale_b[1, 0] = 4.0
    arguments = (a, b.mT, scale_a, scale_b)
    found = scaled_gemm(*arguments, out_dtype=torch.float32, **forced)
    exact = reference.scaled_gemm(*arguments, groups=((1, 128), (128, 128))).float()
    assert bool(found[0].isnan().all()) and bool(found[1].isinf().all()) and bool((found[2] == 256).all())
    assert torch.equal(found[1:].nan_to_num(posinf=-1.0), exact[1:].nan_to_num(posinf=-1.0))


def check_integers(m: int, n: int, k: int, device: str, blocks: bool, **forced: Any) -> torch.Tensor:
    """Integers, and scales that are powers of two: of 1x128 and 128x128, or one each. Returns the result."""
    draw = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randint(-4, 5, (rows, k), generator=draw).float().to(E4M3) for rows in (m, n))
    shapes = ((m, -(-k // 128)), (-(-n // 128), -(-k // 128))) if blocks else ((), ())
    scales = [torch.randint(-2, 3, shape, generator=draw).float().exp2() for shape in shapes]
    arguments = [x.to(device) for x in (a, b.mT, scales[0], scales[1].mT if blocks else scales[1])]
    out = buffers.poisoned((m, n), torch.float32, device=device)
    scaled_gemm(*arguments, out=out.tensor, **forced)
    buffers.check_output(out)
    groups = ((1, 128), (128, 128)) if blocks else None
    tolerance.check_exact(out.tensor, reference.scaled_gemm(*arguments, groups=groups))
    return out.tensor
