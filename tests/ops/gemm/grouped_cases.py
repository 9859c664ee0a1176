"""Generated cases of `grouped_gemm` and `scaled_grouped_gemm`: all of a case follows from its number."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernels_dsl.ops.gemm.grouped import grouped_gemm, scaled_grouped_gemm
from reference import buffers, inputs, tolerance
from reference import gemm as plain_reference
from reference import quantize as quantization
from reference import scaled_gemm as scaled_reference
from reference.grouped import by_groups

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = (torch.bfloat16, torch.float16, torch.float32)
RESULT_SCALE = 4.0
_SIZES = (0, 0, 1, 2, 7, 16, 33, 63, 64, 65, 128, 129, 200)
_N = (1, 8, 16, 33, 64, 80, 129, 200)
_K = (1, 16, 40, 64, 128, 130, 256)
_BLOCKS = {"1x128": (1, 128), "128x128": (128, 128)}


@dataclass(frozen=True)
class Case:
    """One call.

    `sizes`: rows of each group; `extra`: rows behind the last. `kinds`: scales of a and of each b's
    transpose, as `quantize` names them, "matrix" for one a group; None for operands without. `pads`,
    `exact`, `fast`: as in `scaled_cases`. `bias`: its modes, or "". `out_contiguous`, `out_pad`: the
    result's layout.
    """

    number: int
    sizes: tuple[int, ...]
    extra: int
    n: int
    k: int
    dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype
    kinds: tuple[str, str] | None
    pads: tuple[int | None, int | None]
    bias: str
    residual: bool
    activation: str | None
    fast: bool
    exact: bool
    out_contiguous: int
    out_pad: int

    def __str__(self) -> str:
        return " ".join(f"{f.name}={str(getattr(self, f.name)).replace('torch.', '')}" for f in fields(self))

    @property
    def m(self) -> int:
        """Rows of a."""
        return sum(self.sizes) + self.extra

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return sum(self.sizes) * self.n * self.k


def generate(number: int) -> Case:
    """Case `number`."""
    draw = random.Random(inputs.case_seed("grouped_gemm", number))
    count = draw.choice((1, 2, 3, 5, 40))
    sizes = tuple(draw.choice(_SIZES[: 8 if count > 5 else None]) for _ in range(count))
    kinds, out_dtype = None, draw.choice(WIDE)
    dtypes = (draw.choice((torch.bfloat16, torch.float16, torch.float32)),) * 2
    if draw.random() < 0.6:
        dtypes = draw.choice((E4M3, E4M3, E5M2)), draw.choice((E4M3, E5M2))
        choices = (("tensor", "matrix", "row"), ("tensor", "matrix", "row"))
        if draw.random() < 0.4:
            choices = (("1x128",), ("1x128", "128x128"))
        kinds = draw.choice(choices[0]), draw.choice(choices[1])
        out_dtype = draw.choice((*WIDE, E4M3, E5M2))
    exact = draw.random() < 0.6 or out_dtype not in WIDE
    return Case(
        number, sizes, draw.choice((0, 0, 5)), draw.choice(_N), draw.choice(_K), dtypes, out_dtype, kinds,
        pads=(draw.choice((0, 0, 16, 5, None)), draw.choice((0, 16, 5, None))),
        bias=draw.choice(("", "n", "ln")), residual=draw.random() < 0.3,
        activation=draw.choice((None, None, "relu") if exact else (None, None, "silu")),
        fast=draw.random() < 0.5, exact=exact, out_contiguous=draw.choice((-1, -1, -1, -2)),
        out_pad=draw.choice((0, 8, 3)),
    )  # fmt: skip


def _operand(
    case: Case, index: int, shape: tuple[int, ...], device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values (…, rows, K) and their scales, None without; of a, "matrix" stands for one a group."""
    seed, dtype = inputs.case_seed("grouped_gemm values", case.number, index), case.dtypes[index]
    if case.kinds is None:
        make = inputs.integers if case.exact else inputs.normal
        return make(shape, dtype, seed=seed, device=device), None
    kind = "row" if case.kinds[index] == "matrix" and index == 0 else case.kinds[index]
    if case.exact:
        values = inputs.integers(shape, dtype, seed=seed, device=device)
        of = quantization.group_amax(values.float(), kind).shape
        powers = torch.randint(-2, 3, of, generator=torch.Generator().manual_seed(seed))
        scale = torch.exp2(powers.float()).to(device)
    else:
        x = inputs.outliers(shape, torch.float32, seed=seed, device=device)
        values, scale = quantization.quantize(x, dtype, scaling=kind)
    if case.kinds[index] == "matrix" and index == 0:  # of a group's first row, or of any
        ends = torch.tensor(case.sizes).cumsum(0).tolist()
        starts = [min(end - size, max(case.m - 1, 0)) for end, size in zip(ends, case.sizes)]
        scale = scale[starts].unsqueeze(-1) if case.m else scale.new_ones(len(starts), 1, 1)
    return values, scale


def run(case: Case, device: str, **forced: Any) -> None:
    """Make the call and check every element of the output and the memory around it."""
    groups = len(case.sizes)
    a, scale_a = _operand(case, 0, (case.m, case.k), device)
    b, scale_b = _operand(case, 1, (groups, case.n, case.k), device)
    laid = [
        buffers.embed(x, contiguous=-2 if pad is None else -1, pad=pad or 0)
        for x, pad in zip((a, b), case.pads)
    ]
    a, b = laid[0], laid[1].mT
    offs = torch.tensor(case.sizes, device=device).cumsum(0).to(torch.int32)
    dtype = case.out_dtype if case.out_dtype in WIDE else torch.bfloat16
    make = inputs.integers if case.exact else inputs.normal
    bias = residual = None
    seed = inputs.case_seed("grouped_gemm values", case.number, "extras")
    if case.bias:
        shape = (case.n,) if case.bias == "n" else (groups, case.n)
        bias = buffers.embed(make(shape, dtype, seed=seed, device=device))
    if case.residual:
        residual = buffers.embed(make((case.m, case.n), dtype, seed=seed + 1, device=device))
    out = buffers.poisoned(
        (case.m, case.n), case.out_dtype, device=device, contiguous=case.out_contiguous, pad=case.out_pad
    )
    options = {"bias": bias, "residual": residual, "activation": case.activation, "out": out.tensor, **forced}
    if case.kinds is None:
        grouped_gemm(a, b, offs, **options)
    else:
        if case.out_dtype not in WIDE:
            options["scale_result"] = torch.full((1,), RESULT_SCALE, device=device)
        if case.exact and case.number % 2 == 0:
            options["amax"] = torch.full((1,), torch.nan, device=device)
        given_b = scale_b.mT if scale_b.dim() > 1 else scale_b
        fast = case.fast and not case.kinds[0].startswith("1")
        scaled_grouped_gemm(a, b, scale_a, given_b, offs, use_fast_accum=fast, **options)
    _check(case, (a, b, scale_a, scale_b), (offs, bias, residual), out, options.get("amax"))


def _check(
    case: Case, operands: tuple, extras: tuple, out: buffers.Guarded, amax: torch.Tensor | None
) -> None:
    a, b, scale_a, scale_b = operands
    offs, bias, residual = extras
    last = sum(case.sizes)
    buffers.check_guards(out)
    assert bool((buffers.bits(out.tensor[last:]) == out.pattern).all()), f"{case}: rows of no group written"

    def epilogue(group: int, rows: slice) -> dict[str, Any]:
        own = bias[group] if case.bias == "ln" else bias
        return {
            "bias": own, "residual": None if residual is None else residual[rows],
            "activation": case.activation,
        }  # fmt: skip

    def scales(group: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        of_a = scale_a if scale_a.dim() == 0 else scale_a[group] if scale_a.dim() == 3 else scale_a[rows]
        return of_a, scale_b if scale_b.dim() == 0 else scale_b[group].mT

    def scaled(function: Any, group: int, rows: slice, **how: Any) -> torch.Tensor:
        blocks = None
        if case.kinds[0] in _BLOCKS:
            blocks = _BLOCKS[case.kinds[0]], _BLOCKS[case.kinds[1]][::-1]
        return function(
            a[rows], b[group], *scales(group, rows), groups=blocks, **how, **epilogue(group, rows)
        )

    if case.kinds is None:
        exact = by_groups(offs, lambda g, r: plain_reference.gemm(a[r], b[g], **epilogue(g, r)))
    else:
        exact = by_groups(offs, lambda g, r: scaled(scaled_reference.scaled_gemm, g, r))
    if amax is not None:
        assert amax.item() == (exact.abs().max().item() if exact.numel() else 0.0), str(case)
    found = out.tensor[:last]
    if case.out_dtype not in WIDE:
        expected = quantization.to_fp8(exact * RESULT_SCALE, case.out_dtype)
        assert torch.equal(found.contiguous().view(torch.uint8), expected.view(torch.uint8)), str(case)
    elif case.exact:
        tolerance.check_exact(found, exact, case=str(case))
    elif last and case.n:
        if case.kinds is None:
            like = plain_reference.gemm_same_dtype
            peer = by_groups(offs, lambda g, r: like(a[r], b[g], out_dtype=case.out_dtype, **epilogue(g, r)))
        else:
            how = {"fast": case.fast, "out_dtype": case.out_dtype}
            peer = by_groups(offs, lambda g, r: scaled(scaled_reference.as_tensor_cores, g, r, **how))
        tolerance.check(found, exact, peer, case=str(case))
