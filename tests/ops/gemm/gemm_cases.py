"""Generated cases of `gemm`: everything about a case follows from its number."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.ops.gemm.gemm import gemm
from reference import buffers, inputs, tolerance
from reference import gemm as reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MN = (1, 2, 7, 16, 17, 33, 64, 65, 127, 128, 129, 191, 255, 257, 320, 513)
_K = (1, 3, 8, 15, 16, 31, 64, 65, 100, 127, 128, 129, 256, 511, 768)
_ACTIVATIONS = (None, None, *ACTIVATIONS)
_EMPTY_ODDS = 0.04


@dataclass(frozen=True)
class Tensor:
    """The layout of a tensor: contiguous mode (-1 rows, -2 columns), gap behind rows, shift of its start."""

    contiguous: int = -1
    pad: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Case:
    """One call. `exact`: integers, compared bit for bit; else normal values, by the tolerance rule."""

    number: int
    family: str
    m: int
    n: int
    k: int
    a_batch: int | None
    b_batch: int | None
    dtype: torch.dtype
    out_dtype: torch.dtype
    a: Tensor
    b: Tensor
    out: Tensor
    bias_axis: str | None
    c: str | None
    residual: str | None
    alpha: float
    beta: float
    activation: str | None
    exact: bool

    def __str__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value not in (None, Tensor()):
                shown.append(f"{field.name}={str(value).replace('torch.', '')}")
        return " ".join(shown)

    @property
    def batch(self) -> int | None:
        """The result's batch."""
        sizes = [size for size in (self.a_batch, self.b_batch) if size is not None]
        return max(sizes) if sizes else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape."""
        return (self.m, self.n) if self.batch is None else (self.batch, self.m, self.n)


def generate(number: int, family: str) -> Case:
    """Case `number` of a family of kernels."""
    draw = random.Random(inputs.case_seed("gemm", family, number))

    def layout() -> Tensor:
        align = draw.choice(("plain", "plain", "padded", "odd", "shifted"))
        pad = {"plain": 0, "padded": 8, "odd": draw.choice((1, 2, 4)), "shifted": 0}[align]
        offset = draw.choice((1, 2, 4, 8)) if align == "shifted" else 0
        return Tensor(draw.choice((-1, -2)), pad, offset)

    m, n, k = (0 if draw.random() < _EMPTY_ODDS else draw.choice(pool) for pool in (_MN, _MN, _K))
    a_batch, b_batch = draw.choice(((None, None), (None, None), (3, 3), (3, None), (None, 2), (1, 3), (2, 1)))
    dtype = draw.choice(DTYPES)
    exact = draw.random() < 0.5
    extra = ("full", "row", "column", None, None, None)
    return Case(
        number, family, m, n, k, a_batch=a_batch, b_batch=b_batch, dtype=dtype,
        out_dtype=draw.choice((dtype, dtype, *DTYPES)), a=layout(), b=layout(), out=layout(),
        bias_axis=draw.choice(("n", "m", None, None)), c=draw.choice(extra), residual=draw.choice(extra),
        alpha=draw.choice((1.0, 2.0, -0.5)), beta=draw.choice((1.0, 0.0, 2.0)),
        activation=draw.choice((None, "relu") if exact else _ACTIVATIONS),
        exact=exact,
    )  # fmt: skip


def _values(case: Case, name: str, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    seed = inputs.case_seed("gemm values", case.family, case.number, name)
    make = inputs.integers if case.exact else inputs.normal
    return make(shape, dtype, seed=seed, device=device)


def arguments(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """a, b and the keywords of the call, each tensor lying between NaNs."""

    def matrix(name: str, batch: int | None, rows: int, columns: int, place: Tensor) -> torch.Tensor:
        shape = (rows, columns) if batch is None else (batch, rows, columns)
        values = _values(case, name, shape, device, case.dtype)
        return buffers.embed(values, contiguous=place.contiguous, pad=place.pad, offset=place.offset)

    a = matrix("a", case.a_batch, case.m, case.k, case.a)
    b = matrix("b", case.b_batch, case.k, case.n, case.b)
    options: dict[str, Any] = {"alpha": case.alpha, "activation": case.activation}
    if case.c is not None:
        options["beta"] = case.beta
    shapes = {"full": case.shape, "row": (case.n,), "column": (case.m, 1)}
    for name, kind in (("c", case.c), ("residual", case.residual)):
        if kind is not None:
            options[name] = buffers.embed(_values(case, name, shapes[kind], device, case.out_dtype))
    if case.bias_axis is not None:
        extent = case.n if case.bias_axis == "n" else case.m
        options["bias"] = buffers.embed(_values(case, "bias", (extent,), device, torch.float32))
        options["bias_axis"] = case.bias_axis
    return a, b, options


def expected(a: torch.Tensor, b: torch.Tensor, options: dict[str, Any], out_dtype: torch.dtype) -> tuple:
    """The float64 result and PyTorch's in the same dtype."""
    options = dict(options)
    if options.pop("bias_axis", "n") == "m":
        options["bias"] = options["bias"][:, None]
    return reference.gemm(a, b, **options), reference.gemm_same_dtype(a, b, **options, out_dtype=out_dtype)


def run(case: Case, device: str, **forced: Any) -> None:
    """Call `gemm` on the case and check every element of the output and the memory around it."""
    a, b, options = arguments(case, device)
    out = buffers.poisoned(
        case.shape, case.out_dtype, device=device, contiguous=case.out.contiguous, pad=case.out.pad,
        offset=case.out.offset,
    )  # fmt: skip
    if device == "cuda":
        # What the op allocates (copies, workspaces) comes from memory that holds NaN.
        stale = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(4)]
        del stale
    result = gemm(a, b, **options, out=out.tensor, family=case.family, **forced)
    assert result is out.tensor
    buffers.check_output(out)
    exact, peer = expected(a, b, options, case.out_dtype)
    if case.exact:
        tolerance.check_exact(result, exact, case=str(case))
    else:
        tolerance.check(result, exact, peer, case=str(case))
